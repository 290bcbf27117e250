"""AsyncEnvs as HostEnvs, on an event loop in this process.

By default each environment is its own slice, so that a slow request delays no other environment.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import numpy as np

from unidle.envs.aio.slots import AsyncSlots
from unidle.envs.faults import Fault, FaultCounter
from unidle.envs.make import EnvMaker
from unidle.envs.open_episode import Difference, OpenEpisode
from unidle.envs.shared_block import SharedBlock
from unidle.envs.spec import EnvSpec


class AsyncEnvs:
    """N AsyncEnvs on one block, on one event loop in a thread of this process."""

    workers = 0

    def __init__(
        self,
        maker: EnvMaker,
        env_spec: EnvSpec,
        n_envs: int,
        seed: int,
        first_index: int = 0,
        slices: int | None = None,
        *,
        max_env_restarts: int = 10,
    ) -> None:
        """Create `slices` slices, by default one per environment.

        A step or reset that exceeds the maker's `step_timeout` is cancelled and its environment restarted.
        """
        self.env_spec, self.n_envs = env_spec, n_envs
        self.block = SharedBlock(env_spec, n_envs)
        cuts = [int(part[0]) for part in np.array_split(np.arange(n_envs), min(slices or n_envs, n_envs))]
        self.bounds = list(zip(cuts, [*cuts[1:], n_envs]))
        self.faults: list[Fault] = []
        self.restarted: list[int] = []  # always empty: no environment can fail between steps
        self._fault_counter = FaultCounter(n_envs, first_index, max_env_restarts)
        self._in_flight = 0  # slices
        self._finished: list[int] = []
        self._wanted = 1  # slices that `recv` waits for
        self._changed = threading.Condition()  # guards `_finished` and `_wanted`
        self._slots = AsyncSlots(maker, env_spec, self.block, range(n_envs), seed, first_index, self._on_finished)
        try:
            self._slots.make()
        except BaseException:
            self.close()
            raise

    def start(self, episodes: np.ndarray) -> None:
        """Start the given episode in each environment."""
        self._slots.start(episodes)
        self._record_faults()

    def send(self, slices: Sequence[int]) -> None:
        """Step these slices with the actions in the block."""
        self._in_flight += len(slices)
        self._slots.send([(number, *self.bounds[number]) for number in slices])

    def has_finished(self, at_least: int) -> bool:
        """Whether `recv` of so many slices would return at once."""
        return len(self._finished) >= min(at_least, self._in_flight)

    def recv(self, at_least: int, seconds: float | None = None) -> list[int]:
        """Wait for `at_least` finished slices, or for that many seconds, and return the finished ones in order."""
        with self._changed:
            self._wanted = min(at_least, self._in_flight)
            self._changed.wait_for(lambda: len(self._finished) >= self._wanted, seconds)
            done, self._finished = sorted(self._finished), []
        self._in_flight -= len(done)
        for number in done:
            first, end = self.bounds[number]
            self._slots.step(first, end)
            self._fault_counter.reset_finished(self.block, slice(first, end))
        self._record_faults()
        return done

    def take_episode_record(self) -> dict[str, Any] | None:
        """See `AsyncSlots.take_episode_record`."""
        return self._slots.take_episode_record()

    def states(self) -> list[dict[str, Any] | None]:
        """None for all: the state of a remote service cannot be saved."""
        return self._slots.states()

    def resume(self, points: Sequence[OpenEpisode]) -> list[Difference | None]:
        """Restore each open episode (see `AsyncSlots.resume`)."""
        differences = self._slots.resume(points)
        self._record_faults()
        return differences

    def close(self) -> None:
        """Cancel all requests, close all environments and end the loop; a second call does nothing."""
        self._slots.close()

    def _on_finished(self, number: int) -> None:
        with self._changed:
            self._finished.append(number)
            if len(self._finished) >= self._wanted:
                self._changed.notify()

    def _record_faults(self) -> None:
        for fault in self._slots.take_faults():
            self.faults.append(fault)
            self._fault_counter.add(fault)
