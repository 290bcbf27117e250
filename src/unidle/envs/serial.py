"""Environments stepped one after the other in this process: the least overhead for the quickest of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from unidle.envs.block import Block
from unidle.envs.contract import Contract
from unidle.envs.make import EnvMaker
from unidle.envs.slot import EnvSlot


class SerialEnvs:
    """N environments behind one block, in this process."""

    workers = 0

    def __init__(
        self,
        maker: EnvMaker,
        contract: Contract,
        n_envs: int,
        seed: int,
        first_index: int = 0,
        block: Block | None = None,
        first_line: int = 0,
    ) -> None:
        """Environments `first_index`, …, in a block of their own or (in a worker) in some lines of a larger one."""
        self.contract, self.n_envs = contract, n_envs
        self.block = block or Block(contract, n_envs)
        self.bounds = [(0, n_envs)]
        self._slots = [
            EnvSlot(maker, first_index + i, first_line + i, seed, contract, self.block) for i in range(n_envs)
        ]

    def start(self, episodes: np.ndarray) -> None:
        """Begin the given episode in each environment."""
        for slot, episode in zip(self._slots, episodes):
            slot.start_episode(int(episode))

    def send(self, slices: Sequence[int]) -> None:
        """Take the actions in the block; nothing runs ahead here."""

    def recv(self, at_least: int) -> list[int]:
        """Step every environment; they are one slice."""
        self.step(0, self.n_envs)
        return [0]

    def step(self, first: int, end: int) -> None:
        """Step some of the environments."""
        for slot in self._slots[first:end]:
            slot.step()

    def states(self) -> list[dict[str, Any] | None]:
        """Each environment's own state, where it offers one."""
        return [slot.state() for slot in self._slots]

    def resume(self, points: list[tuple[int, np.ndarray, np.ndarray, dict[str, Any] | None]]) -> list[bool]:
        """Bring each open episode back (see `EnvSlot.resume`); False where an environment did not repeat itself."""
        return [slot.resume(*point) for slot, point in zip(self._slots, points)]

    def close(self) -> None:
        """Close every environment."""
        for slot in self._slots:
            slot.env.close()
