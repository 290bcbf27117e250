"""Environments that wait, hundreds of them in flight on one event loop: `AsyncSlots`, and `AsyncEnvs` around them.

A step has two halves. On the loop, a `_Player` awaits the environment's step, and the first observation of the next
episode where that step ends one, or where the environment failed and was made anew. In the trainer's thread, when
`recv` takes the slice back, its slot asks for all that, in the order it would ask any environment, and is answered at
once. So seeds, checks, faults and what is written to the block are those of every other environment (`Slots`), no lock
is held by either side, and the loop does not touch the block. A worker process has the same (see async_worker.py).

A slice is one environment unless it is said otherwise: one slow page keeps nobody else waiting.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import gymnasium
import numpy as np

from unidle.envs import rare_collections
from unidle.envs.async_env import AsyncEnv
from unidle.envs.block import Block
from unidle.envs.contract import Contract
from unidle.envs.faults import Fault, FaultTally
from unidle.envs.loop_thread import LoopThread
from unidle.envs.make import EnvMaker
from unidle.envs.slot import episode_seed
from unidle.envs.slots import Slots

_CLOSING_SECONDS = 1.0  # that an environment may take to close
_Result = TypeVar("_Result")
_Point = tuple[int, np.ndarray, np.ndarray, dict[str, Any] | None]  # episode, actions, row, state


class _Player:
    """One AsyncEnv on the loop, and the answers that its slot is about to ask for."""

    def __init__(self, maker: EnvMaker, run_seed: int, index: int) -> None:
        self.env: AsyncEnv | None = None
        self._maker, self._seconds = maker, maker.deadline
        self._seed_of = partial(episode_seed, run_seed, index)
        self._steps: list[Any] = []  # outcomes of `step`, the next one last; or what was raised instead
        self._firsts: dict[int, Any] = {}  # seed → outcome of `reset`, or what was raised instead
        self.is_late = False  # it failed because its time was up
        self._is_over = False

    def make(self) -> AsyncEnv:
        """The environment, made if there is none."""
        if self._is_over:
            raise RuntimeError("The pool was closed.")
        if self.env is None:
            self.env = self._maker.awaitable()
        return self.env

    # -- on the loop ---------------------------------------------------------------------------------------------------

    async def begin(self, episode: int) -> bool:
        """Foresee how an episode begins, or where that fails the one after; then it is False."""
        self._steps, self._firsts, self.is_late = [], {}, False
        return await self._begin(episode)

    async def play(self, action: Any, episode: int) -> None:
        """Foresee a step of an open episode."""
        self._steps, self._firsts = [], {}
        if self.env is None:  # its slot has given up, and will say why
            await self.first(self._seed_of(episode + 1))
            return
        self.is_late = False
        if await self._step(self.env, action):
            await self._begin(episode + 1)

    async def replay(self, episode: int, actions: Sequence[Any]) -> None:
        """Foresee how an open episode is come back to."""
        if not await self.begin(episode):
            return
        for action in actions:
            assert self.env is not None
            if await self._step(self.env, action):
                await self._begin(episode + 1)
                break
        self._steps.reverse()

    async def _begin(self, episode: int) -> bool:
        if await self.first(self._seed_of(episode)):
            return True
        await self.first(self._seed_of(episode + 1))
        return False

    async def _step(self, env: AsyncEnv, action: Any) -> bool:
        """True if an episode is to begin: this one ended, or the environment failed."""
        try:
            outcome = await self._within("step", env.step(action))
        except Exception as error:
            self._steps.append(error)
            await self.let_go()
            return True
        self._steps.append(outcome)
        return _has_ended(outcome)

    async def first(self, seed: int) -> bool:
        """Reset; False if that failed, and the environment is gone."""
        try:
            self._firsts[seed] = await self._within("reset", self.make().reset(seed))
        except Exception as error:
            self._firsts[seed] = error
            await self.let_go()
            return False
        return True

    async def let_go(self) -> None:
        """Close the environment, if there is one."""
        env, self.env = self.env, None
        if env is not None:
            with contextlib.suppress(Exception):  # it may well be broken
                async with asyncio.timeout(_CLOSING_SECONDS):
                    await env.close()

    async def end(self) -> None:
        """Close the environment, and make no other."""
        self._is_over = True
        await self.let_go()

    async def _within(self, what: str, call: Coroutine[Any, Any, _Result]) -> _Result:
        """`call`, ended when its time is up."""
        limit = asyncio.timeout(self._seconds)
        try:
            async with limit:
                return await call
        except TimeoutError as error:
            if not limit.expired():
                raise
            self.is_late = True
            raise TimeoutError(f"{what}() was not over after {self._seconds:g} s (--env-timeout)") from error
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if task is not None and task.cancelling():  # the pool is being closed
                raise
            raise RuntimeError(f"{what}() was cancelled by something that it waited for") from error
        except (SystemExit, KeyboardInterrupt) as error:
            raise RuntimeError(f"{what}() raised {error!r}") from error

    # -- in the trainer's thread ---------------------------------------------------------------------------------------

    def take_step(self) -> Any:
        """The outcome of the next step that was foreseen."""
        return _given(self._steps.pop())

    def take_first(self, seed: int, thread: LoopThread) -> Any:
        """The outcome of this reset; waits for it where it was not foreseen."""
        if seed not in self._firsts:
            thread.wait(self.first(seed))
        return _given(self._firsts.pop(seed))


class _StandIn(gymnasium.Env):
    """The environment as its slot has it: all answers are there already, but in rare cases."""

    def __init__(self, player: _Player, contract: Contract, thread: LoopThread) -> None:
        self.observation_space, self.action_space = contract.rows.space, contract.actions.space
        self._player, self._thread = player, thread
        self._env = player.env

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        assert seed is not None
        outcome = self._player.take_first(seed, self._thread)
        self._env = self._player.env  # where there was none until now
        return outcome

    def step(self, action: Any) -> Any:
        return self._player.take_step()

    def close(self) -> None:
        # Often it is closed already and another in its place, that the next stand-in stands for.
        if self._env is not None and self._env is self._player.env:
            self._thread.wait(self._player.let_go())


class AsyncSlots:
    """`Slots` of AsyncEnvs. `begin` sets a slice going, `on_through` hears of it on the loop, `step` takes it in."""

    def __init__(
        self,
        maker: EnvMaker,
        contract: Contract,
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
        self._decode = contract.actions.decoder()
        self._players = [_Player(maker, seed, first_index + line) for line in lines]
        self._on_through = on_through
        self._left: dict[int, int] = {}  # slice → environments that are not through with their step
        self._tasks: set[asyncio.Task[None]] = set()
        self._broken: BaseException | None = None
        self._is_closed = False
        self._slots = Slots(maker, contract, block, lines, seed, first_index)
        self._thread = LoopThread("environments")
        rare_collections.begin()
        self._episodes = list(self._slots)  # whose `episode` is the open one
        for slot, player in zip(self._slots, self._players):
            slot._maker = EnvMaker(maker.name, partial(_StandIn, player, contract, self._thread), makes="one")

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

    def resume(self, points: list[_Point]) -> list[bool]:
        """Bring open episodes back by replaying them, if the environments say that they are such as `repeats`.

        Else those that have taken a step are lost, and the next ones begin: no website is asked for all those pages
        again only to find that one has changed.
        """
        if getattr(self._players[0].env, "repeats", False):
            actions = [[self._decode(action) for action in point[1]] for point in points]
            self._foresee([player.replay(point[0], own) for player, point, own in zip(self._players, points, actions)])
            return self._slots.resume(points)
        is_under_way = [len(actions) > 0 for _, actions, _, _ in points]
        self.start(np.array([point[0] + lost for point, lost in zip(points, is_under_way)], np.int64))
        rows = self._block.rows[self._lines.start : self._lines.stop]
        return [not lost and np.array_equal(row, point[2]) for row, point, lost in zip(rows, points, is_under_way)]

    def close(self) -> None:
        """Cancel what is in flight, close all environments and end the loop; a second time does nothing."""
        if self._is_closed:
            return
        self._is_closed = True
        rare_collections.end()
        with contextlib.suppress(TimeoutError):
            self._thread.wait(self._end(), 3 * _CLOSING_SECONDS)
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

    def _play_all(self, plays: list[tuple[int, _Player, Any, int]]) -> None:
        for play in plays:
            task = self._thread.loop.create_task(self._play(*play))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _play(self, number: int, player: _Player, action: Any, episode: int) -> None:
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
            await asyncio.wait(self._tasks, timeout=_CLOSING_SECONDS)
        await asyncio.gather(*(player.end() for player in self._players))


class AsyncEnvs:
    """N AsyncEnvs behind one block, on one event loop in a thread of this process."""

    workers = 0

    def __init__(
        self,
        maker: EnvMaker,
        contract: Contract,
        n_envs: int,
        seed: int,
        first_index: int = 0,
        slices: int | None = None,
        *,
        max_env_restarts: int = 10,
    ) -> None:
        """As many slices as there are environments, unless it is said otherwise.

        A step or reset that takes longer than the maker's `deadline` is cancelled, and its environment made anew.
        """
        self.contract, self.n_envs = contract, n_envs
        self.block = Block(contract, n_envs)
        cuts = [int(part[0]) for part in np.array_split(np.arange(n_envs), min(slices or n_envs, n_envs))]
        self.bounds = list(zip(cuts, [*cuts[1:], n_envs]))
        self.faults: list[Fault] = []
        self.renewed: list[int] = []  # always empty: no environment can fail while it waits
        self._tally = FaultTally(n_envs, first_index, max_env_restarts)
        self._in_flight = 0  # slices
        self._through: list[int] = []
        self._wanted = 1  # slices that `recv` waits for
        self._news = threading.Condition()  # guards the two
        self._slots = AsyncSlots(maker, contract, self.block, range(n_envs), seed, first_index, self._on_through)
        try:
            self._slots.make()
        except BaseException:
            self.close()
            raise

    def start(self, episodes: np.ndarray) -> None:
        """Begin the given episode in each environment."""
        self._slots.start(episodes)
        self._note_faults()

    def send(self, slices: Sequence[int]) -> None:
        """Set these slices going on the actions in the block."""
        self._in_flight += len(slices)
        self._slots.begin([(number, *self.bounds[number]) for number in slices])

    def recv(self, at_least: int, seconds: float | None = None) -> list[int]:
        """The slices that have been stepped, in order; waits until there are `at_least` of them, or so many seconds."""
        with self._news:
            self._wanted = min(at_least, self._in_flight)
            self._news.wait_for(lambda: len(self._through) >= self._wanted, seconds)
            done, self._through = sorted(self._through), []
        self._in_flight -= len(done)
        for number in done:
            first, end = self.bounds[number]
            self._slots.step(first, end)
            self._tally.forgive(self.block, slice(first, end))
        self._note_faults()
        return done

    def take_story(self) -> dict[str, Any] | None:
        """See `AsyncSlots.take_story`."""
        return self._slots.take_story()

    def states(self) -> list[dict[str, Any] | None]:
        """None: there is nothing to be put into a checkpoint."""
        return self._slots.states()

    def resume(self, points: list[_Point]) -> list[bool]:
        """Bring each open episode back (see `AsyncSlots.resume`); False where it is lost, and another began."""
        repeated = self._slots.resume(points)
        self._note_faults()
        return repeated

    def close(self) -> None:
        """Cancel what is in flight, close all environments and end the loop; a second time does nothing."""
        self._slots.close()

    def _on_through(self, number: int) -> None:
        with self._news:
            self._through.append(number)
            if len(self._through) >= self._wanted:
                self._news.notify()

    def _note_faults(self) -> None:
        for fault in self._slots.take_faults():
            self.faults.append(fault)
            self._tally.add(fault)


def _has_ended(outcome: Any) -> bool:
    try:
        return bool(outcome[2] or outcome[3])
    except Exception:
        return False  # its slot will say what is wrong with it


def _given(answer: Any) -> Any:
    if isinstance(answer, Exception):
        raise answer
    return answer
