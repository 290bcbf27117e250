"""Environments stepped one after the other in this process: the least overhead for the quickest of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from unidle.envs.block import Block
from unidle.envs.faults import Fault, FaultTally
from unidle.envs.make import EnvMaker
from unidle.envs.pool.slots import Slots
from unidle.envs.spec import EnvSpec


class SerialEnvs:
    """N environments behind one block, in this process."""

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
        self.block = Block(env_spec, n_envs)
        self.bounds = [(0, n_envs)]
        self.faults: list[Fault] = []
        self.renewed: list[int] = []  # always empty: no environment can die while it waits
        self._tally = FaultTally(n_envs, first_index, max_env_restarts)
        self._is_sent = False
        self._slots = Slots(maker, env_spec, self.block, range(n_envs), seed, first_index)
        self._slots.make()

    def start(self, episodes: np.ndarray) -> None:
        """Begin the given episode in each environment."""
        self._slots.start(episodes)
        self._note_faults()

    def send(self, slices: Sequence[int]) -> None:
        """Take the actions in the block; nothing runs ahead here."""
        self._is_sent |= len(slices) > 0

    def recv(self, at_least: int, seconds: float | None = None) -> list[int]:
        """Step every environment, however long it takes; they are one slice."""
        if not self._is_sent:
            return []
        self._is_sent = False
        self._slots.step(0, self.n_envs)
        self._tally.forgive(self.block, slice(0, self.n_envs))
        self._note_faults()
        return [0]

    def states(self) -> list[dict[str, Any] | None]:
        """Each environment's own state, where it offers one."""
        return self._slots.states()

    def resume(self, points: list[tuple[int, np.ndarray, np.ndarray, dict[str, Any] | None]]) -> list[bool]:
        """Bring each open episode back (see `EnvSlot.resume`); False where an environment did not repeat itself."""
        repeated = self._slots.resume(points)
        self._note_faults()
        return repeated

    def close(self) -> None:
        """Close every environment."""
        self._slots.close()

    def _note_faults(self) -> None:
        for fault in self._slots.take_faults():
            self.faults.append(fault)
            self._tally.add(fault)
