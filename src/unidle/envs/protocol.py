"""What the engine asks of environments on the host, wherever they run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np

from unidle.envs.block import Block
from unidle.envs.faults import Fault as Fault
from unidle.envs.spec import EnvSpec


class HostEnvs(Protocol):
    """Environments on the host, in slices: put actions in the block, `send` slices, `recv` those that were stepped.

    Between `send` and `recv` the lines of a slice, `block.skip` included, are not to be touched; but for its actions,
    which may be read. `start`, `states` and `resume` are for when no slice is under way.

    Environments that fail are made again and begin their next episode. A line of a returned slice whose step did not
    happen says so in `block.redo`, and `faults` then tells why. `recv` raises TrainingError when an environment fails
    again and again.
    """

    env_spec: EnvSpec
    n_envs: int
    block: Block
    workers: int
    bounds: list[tuple[int, int]]  # lines of each slice: (first, end)
    faults: list[Fault]  # what failed; for the caller to clear
    # Lines that began a new episode though they were not being stepped; their last observation before it is in
    # `block.final_obs`. For the caller to clear after each `recv`.
    renewed: list[int]

    def start(self, episodes: np.ndarray) -> None:
        """Begin the given episode in each environment."""

    def send(self, slices: Sequence[int]) -> None:
        """Set these slices going on the actions in the block."""

    def recv(self, at_least: int, seconds: float | None = None) -> list[int]:
        """The slices that have been stepped; waits until there are `at_least` of them, or for so many seconds."""

    def states(self) -> list[dict[str, Any] | None]:
        """Each environment's own state, where it offers one."""

    def resume(self, points: list[tuple[int, np.ndarray, np.ndarray, dict[str, Any] | None]]) -> list[bool]:
        """Bring each open episode back; False where an environment did not repeat itself."""

    def close(self) -> None:
        """End all environments and their processes."""


@runtime_checkable
class Storied(Protocol):
    """HostEnvs of which some may tell of an episode; never asked for in training."""

    def take_story(self) -> dict[str, Any] | None:
        """What the first environment tells of the first episode that ended since this was last asked, as JSON."""
