"""Environments stepped one after the other in this process: the lowest overhead for fast environments."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from unidle.envs.faults import Fault, FaultCounter
from unidle.envs.make import EnvMaker
from unidle.envs.open_episode import Difference, OpenEpisode
from unidle.envs.pool.slots import Slots
from unidle.envs.shared_block import SharedBlock
from unidle.envs.spec import EnvSpec


class SerialEnvs:
    """N environments on one block, in this process; all of them are one slice."""

    workers = 0

    def __init__(
        self,
        maker: EnvMaker,
        env_spec: EnvSpec,
        n_envs: int,
        seed: int,
        first_index: int = 0,
        *,
        max_env_restarts: int = 10,
    ) -> None:
        self.env_spec, self.n_envs = env_spec, n_envs
        self.block = SharedBlock(env_spec, n_envs)
        self.bounds = [(0, n_envs)]
        self.faults: list[Fault] = []
        self.restarted: list[int] = []  # always empty: no environment can fail between steps
        self._fault_counter = FaultCounter(n_envs, first_index, max_env_restarts)
        self._is_sent = False
        self._slots = Slots(maker, env_spec, self.block, range(n_envs), seed, first_index)
        self._slots.make()

    def start(self, episodes: np.ndarray) -> None:
        """Start the given episode in each environment."""
        self._slots.start(episodes)
        self._record_faults()

    def send(self, slices: Sequence[int]) -> None:
        """Mark the slice to be stepped by `recv`."""
        self._is_sent |= len(slices) > 0

    def has_finished(self, at_least: int) -> bool:
        """True: `recv` steps."""
        return True

    def recv(self, at_least: int, seconds: float | None = None) -> list[int]:
        """Step every environment, however long it takes."""
        if not self._is_sent:
            return []
        self._is_sent = False
        self._slots.step(0, self.n_envs)
        self._fault_counter.reset_finished(self.block, slice(0, self.n_envs))
        self._record_faults()
        return [0]

    def states(self) -> list[dict[str, Any] | None]:
        """Return what a checkpoint holds of each environment (see `EnvSlot.state`)."""
        return self._slots.states()

    def resume(self, points: Sequence[OpenEpisode]) -> list[Difference | None]:
        """Restore each open episode (see `EnvSlot.resume`)."""
        differences = self._slots.resume(points)
        self._record_faults()
        return differences

    def close(self) -> None:
        """Close every environment."""
        self._slots.close()

    def _record_faults(self) -> None:
        for fault in self._slots.take_faults():
            self.faults.append(fault)
            self._fault_counter.add(fault)
