"""Environments that wait, hundreds of them in flight on one event loop, behind the lines of a block: `AsyncSlots`.

A step has two halves. On the loop, each environment's `Player` awaits the step and whatever follows from it. In the
trainer's thread, when the slice is taken back, its slot asks for all that, in the order it would ask any environment,
and is answered at once. So seeds, checks, faults and what is written to the block are those of every other environment
(`Slots`), no lock is held by either side, and the loop does not touch the block. A worker process has the same (see
async_worker.py).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from unidle.envs.aio import gc_pause as rare_collections
from unidle.envs.aio.loop_thread import LoopThread
from unidle.envs.aio.player import CLOSING_SECONDS, Player, StandIn
from unidle.envs.block import Block
from unidle.envs.faults import Fault
from unidle.envs.make import EnvMaker
from unidle.envs.pool.slots import Slots
from unidle.envs.spec import EnvSpec


class AsyncSlots:
    """`Slots` of AsyncEnvs. `begin` sets a slice going, `on_through` hears of it on the loop, `step` takes it in."""

    def __init__(
        self,
        maker: EnvMaker,
        env_spec: EnvSpec,
        block: Block,
        lines: range,
        seed: int,
        first_index: int,
        on_through: Callable[[int], None],
        is_unwanted: Callable[[], bool] = lambda: False,
    ) -> None:
        """`is_unwanted` says that nobody waits any more for what was asked for."""
        self._is_unwanted = is_unwanted
        self._block, self._lines, self._first = block, lines, first_index + lines.start
        self._decode = env_spec.action_layout.decoder()
        self._players = [Player(maker, seed, first_index + line) for line in lines]
        self._on_through = on_through
        self._left: dict[int, int] = {}  # slice → environments that are not through with their step
        self._tasks: set[asyncio.Task[None]] = set()
        self._broken: BaseException | None = None
        self._is_closed = False
        self._slots = Slots(maker, env_spec, block, lines, seed, first_index)
        self._thread = LoopThread("environments")
        rare_collections.begin()
        self._episodes = list(self._slots)  # whose `episode` is the open one
        for slot, player in zip(self._slots, self._players):
            slot._maker = EnvMaker(maker.name, partial(StandIn, player, env_spec, self._thread), makes="one")

    def take_faults(self) -> list[Fault]:
        """What failed since this was last asked."""
        return [
            replace(fault, kind="hung") if self._players[fault.env - self._first].is_late else fault
            for fault in self._slots.take_faults()
        ]

    def make(self) -> None:
        """Make every environment; a failure is not survived here, where it is likely to be a mistake."""

        async def make_all() -> None:
            for player in self._players:
                player.make()

        self._thread.wait(make_all())

    def start(self, episodes: np.ndarray) -> None:
        """Begin the given episode in each environment, or the one after where that fails."""
        self._foresee([player.begin(int(episode)) for player, episode in zip(self._players, episodes)])
        self._slots.start(episodes)

    def renew(self, episodes: np.ndarray, spare: np.ndarray | None) -> None:
        """Begin the given episodes in the place of a worker that died."""
        self._foresee([player.begin(int(episode)) for player, episode in zip(self._players, episodes)])
        self._slots.renew(episodes, spare)

    def begin(self, slices: Iterable[tuple[int, int, int]]) -> None:
        """Set slices (number, first, end) going, their environments counted from the first of these."""
        plays = []
        for number, first, end in slices:
            skip = self._block.skip[self._lines[first] : self._lines[end - 1] + 1].tolist()
            own = [index for index in range(first, end) if not skip[index - first]]
            self._left[number] = len(own)
            for index in own:
                action = self._decode(self._block.actions[self._lines[index]])
                plays.append((number, self._players[index], action, self._episodes[index].episode))
            if not own:
                self._on_through(number)
        self._thread.loop.call_soon_threadsafe(self._play_all, plays)

    def step(self, first: int, end: int) -> None:
        """Take in what a slice that is through has brought."""
        if self._broken is not None:
            raise RuntimeError("The event loop of the environments broke down.") from self._broken
        self._slots.step(first, end)
        self._count_requests(first, end)

    def take_story(self) -> dict[str, Any] | None:
        """What the first environment tells of the first episode that ended since this was last asked, if it can."""
        env: Any = self._players[0].env
        if not hasattr(env, "wants_story"):
            return None
        story: dict[str, Any] | None = env.story
        env.story, env.wants_story = None, True
        return story

    def states(self) -> list[dict[str, Any] | None]:
        """None: what is waited for is elsewhere, and cannot be put into a checkpoint."""
        return [None] * len(self._lines)

    def resume(self, points: list[tuple[int, np.ndarray, np.ndarray, dict[str, Any] | None]]) -> list[bool]:
        """Bring open episodes back by replaying them, if the environments say that they are such as `repeats`.

        Else those that have taken a step are lost, and the next ones begin: no website is asked for all those pages
        again only to find that one has changed.
        """
        if getattr(self._players[0].env, "repeats", False):
            replays = [
                player.replay(episode, [self._decode(action) for action in actions])
                for player, (episode, actions, _, _) in zip(self._players, points)
            ]
            self._foresee(replays)
            return self._slots.resume(points)
        is_under_way = [len(actions) > 0 for _, actions, _, _ in points]
        self.start(np.array([episode + lost for (episode, *_), lost in zip(points, is_under_way)], np.int64))
        obs = self._block.obs[self._lines.start : self._lines.stop]
        return [
            not lost and np.array_equal(row, wanted) for row, (_, _, wanted, _), lost in zip(obs, points, is_under_way)
        ]

    def close(self) -> None:
        """Cancel what is in flight, close all environments and end the loop; a second time does nothing."""
        if self._is_closed:
            return
        self._is_closed = True
        rare_collections.end()
        with contextlib.suppress(TimeoutError):
            self._thread.wait(self._end(), 3 * CLOSING_SECONDS)
        self._thread.close()

    def _count_requests(self, first: int, end: int) -> None:
        """Add what environments that make requests say of them."""
        for index in range(first, end):
            counts = getattr(self._players[index].env, "requests_made", None)
            if counts is not None:
                self._block.requests[self._lines[index]] += counts
                counts[:] = 0

    def _foresee(self, work: Sequence[Coroutine[Any, Any, Any]]) -> None:
        async def together() -> None:
            await asyncio.gather(*work)

        self._thread.wait_unless(self._is_unwanted, together())

    # -- on the loop ---------------------------------------------------------------------------------------------------

    def _play_all(self, plays: list[tuple[int, Player, Any, int]]) -> None:
        for play in plays:
            task = self._thread.loop.create_task(self._play(*play))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _play(self, number: int, player: Player, action: Any, episode: int) -> None:
        try:
            await player.play(action, episode)
        except BaseException as error:
            if self._is_closed:
                raise
            self._broken = error
        self._left[number] -= 1
        if not self._left[number]:
            self._on_through(number)

    async def _end(self) -> None:
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=CLOSING_SECONDS)
        await asyncio.gather(*(player.end() for player in self._players))
