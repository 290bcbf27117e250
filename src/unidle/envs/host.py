"""What the engine asks of environments on the host, wherever they run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from unidle.envs.block import Block
from unidle.envs.contract import Contract


class HostEnvs(Protocol):
    """Environments on the host, in slices: put actions in the block, `send` slices, `recv` those that were stepped."""

    contract: Contract
    n_envs: int
    block: Block
    workers: int
    bounds: list[tuple[int, int]]  # lines of each slice: (first, end)

    def start(self, episodes: np.ndarray) -> None:
        """Begin the given episode in each environment."""

    def send(self, slices: Sequence[int]) -> None:
        """Set these slices going on the actions in the block."""

    def recv(self, at_least: int) -> list[int]:
        """The slices that have been stepped; waits until there are `at_least` of them."""

    def states(self) -> list[dict[str, Any] | None]:
        """Each environment's own state, where it offers one."""

    def resume(self, points: list[tuple[int, np.ndarray, np.ndarray, dict[str, Any] | None]]) -> list[bool]:
        """Bring each open episode back; False where an environment did not repeat itself."""

    def close(self) -> None:
        """End all environments and their processes."""
