"""AsyncEnvs on a block: hundreds in flight on one event loop.

A step has two halves. On the loop, each environment's `AsyncEnvRunner` awaits the step and the reset that may follow.
In the trainer's thread, when the slice is received, its slot makes the same calls in the usual order and gets the
prefetched results at once. So seeds, checks, faults and writes to the block are those of any other environment
(`Slots`), neither side holds a lock, and the loop does not touch the block. Worker processes use the same class (see
worker.py).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from unidle.envs.aio import gc_pause
from unidle.envs.aio.loop_thread import LoopThread
from unidle.envs.aio.runner import CLOSING_SECONDS, AsyncEnvRunner, EnvProxy
from unidle.envs.faults import Fault
from unidle.envs.make import EnvMaker
from unidle.envs.open_episode import Difference, OpenEpisode
from unidle.envs.pool.slots import Slots
from unidle.envs.shared_block import SharedBlock
from unidle.envs.spec import EnvSpec


class AsyncSlots:
    """`Slots` of AsyncEnvs: `send` starts a slice, the loop calls `on_finished`, then `step` writes it to the block."""

    def __init__(
        self,
        maker: EnvMaker,
        env_spec: EnvSpec,
        block: SharedBlock,
        env_ids: range,
        seed: int,
        first_index: int,
        on_finished: Callable[[int], None],
        is_cancelled: Callable[[], bool] = lambda: False,
    ) -> None:
        """Waiting stops once `is_cancelled` returns True, for example because the trainer has exited."""
        self._is_cancelled = is_cancelled
        self._block, self._env_ids, self._first = block, env_ids, first_index + env_ids.start
        self._decode = env_spec.action_layout.decoder()
        self._runners = [AsyncEnvRunner(maker, seed, first_index + env_id) for env_id in env_ids]
        self._on_finished = on_finished
        self._pending: dict[int, int] = {}  # slice → environments still in their step
        self._tasks: set[asyncio.Task[None]] = set()
        self._loop_error: BaseException | None = None
        self._is_closed = False
        self._slots = Slots(maker, env_spec, block, env_ids, seed, first_index)
        self._thread = LoopThread("environments")
        gc_pause.begin()
        self._episodes = list(self._slots)  # for the number of the open episode
        for slot, runner in zip(self._slots, self._runners):
            slot._maker = EnvMaker(maker.name, partial(EnvProxy, runner, env_spec, self._thread), kind="gymnasium")

    def take_faults(self) -> list[Fault]:
        """Return the faults since the last call."""
        return [
            replace(fault, kind="hung") if self._runners[fault.env - self._first].timed_out else fault
            for fault in self._slots.take_faults()
        ]

    def make(self) -> None:
        """Create every environment; a failure is raised, because before training it is probably a mistake."""

        async def make_all() -> None:
            for runner in self._runners:
                runner.make()

        self._thread.wait(make_all())

    def start(self, episodes: np.ndarray) -> None:
        """Start the given episode in each environment, or the next one if that fails."""
        self._prefetch([runner.begin(int(episode)) for runner, episode in zip(self._runners, episodes)])
        self._slots.start(episodes)

    def restart(self, episodes: np.ndarray, fallback_obs: np.ndarray | None) -> None:
        """Start the given episodes in a worker that replaces a dead one."""
        self._prefetch([runner.begin(int(episode)) for runner, episode in zip(self._runners, episodes)])
        self._slots.restart(episodes, fallback_obs)

    def send(self, slices: Iterable[tuple[int, int, int]]) -> None:
        """Start slices (number, first, end); first and end are relative to this object's first environment."""
        calls = []
        for number, first, end in slices:
            skip = self._block.skip[self._env_ids[first] : self._env_ids[end - 1] + 1].tolist()
            own = [index for index in range(first, end) if not skip[index - first]]
            self._pending[number] = len(own)
            for index in own:
                action = self._decode(self._block.actions[self._env_ids[index]])
                calls.append((number, self._runners[index], action, self._episodes[index].episode))
            if not own:
                self._on_finished(number)
        self._thread.loop.call_soon_threadsafe(self._step_all, calls)

    def step(self, first: int, end: int) -> None:
        """Write the results of a finished slice to the block."""
        if self._loop_error is not None:
            raise RuntimeError("The event loop of the environments failed.") from self._loop_error
        self._slots.step(first, end)
        self._count_requests(first, end)

    def take_episode_record(self) -> dict[str, Any] | None:
        """Return the record of the first environment's first episode since the last call, and record the next one."""
        env: Any = self._runners[0].env
        if not hasattr(env, "records_next_episode"):
            return None
        record: dict[str, Any] | None = env.episode_record
        env.episode_record, env.records_next_episode = None, True
        return record

    def states(self) -> list[dict[str, Any] | None]:
        """None for all: the state of a remote service cannot be saved."""
        return [None] * len(self._env_ids)

    def resume(self, points: Sequence[OpenEpisode]) -> list[Difference | None]:
        """Replay open episodes if the environments declare `deterministic = True` (formerly `repeats`).

        Otherwise episodes with at least one step are lost and the next ones start: fetching all their pages again would
        burden the website, and any of them may have changed.
        """
        env = self._runners[0].env
        if getattr(env, "deterministic", getattr(env, "repeats", False)):
            replays = [
                runner.replay(point.episode, [self._decode(action) for action in point.actions])
                for runner, point in zip(self._runners, points)
            ]
            self._prefetch(replays)
            return self._slots.resume(points)
        has_steps = [len(point.actions) > 0 for point in points]
        self.start(np.array([point.episode + lost for point, lost in zip(points, has_steps)], np.int64))
        obs = self._block.obs[self._env_ids.start : self._env_ids.stop]
        return [
            Difference("its pages are not fetched again", is_lost=True)
            if lost
            else None
            if np.array_equal(now, point.obs)
            else Difference("its first observation differed", is_lost=True)
            for now, point, lost in zip(obs, points, has_steps)
        ]

    def close(self) -> None:
        """Cancel all requests, close all environments and end the loop; a second call does nothing."""
        if self._is_closed:
            return
        self._is_closed = True
        gc_pause.end()
        with contextlib.suppress(TimeoutError):
            self._thread.wait(self._close_envs(), 3 * CLOSING_SECONDS)
        self._thread.close()

    def _count_requests(self, first: int, end: int) -> None:
        """Add the environments' request counters to the block."""
        for index in range(first, end):
            counts = getattr(self._runners[index].env, "requests_made", None)
            if counts is not None:
                self._block.requests[self._env_ids[index]] += counts
                counts[:] = 0

    def _prefetch(self, work: Sequence[Coroutine[Any, Any, Any]]) -> None:
        async def gather() -> None:
            await asyncio.gather(*work)

        self._thread.wait_unless_cancelled(self._is_cancelled, gather())

    # -- on the loop ---------------------------------------------------------------------------------------------------

    def _step_all(self, calls: list[tuple[int, AsyncEnvRunner, Any, int]]) -> None:
        for call in calls:
            task = self._thread.loop.create_task(self._step_env(*call))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _step_env(self, number: int, runner: AsyncEnvRunner, action: Any, episode: int) -> None:
        try:
            await runner.step(action, episode)
        except BaseException as error:
            if self._is_closed:
                raise
            self._loop_error = error
        self._pending[number] -= 1
        if not self._pending[number]:
            self._on_finished(number)

    async def _close_envs(self) -> None:
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=CLOSING_SECONDS)
        await asyncio.gather(*(runner.close() for runner in self._runners))
