"""The interface between the engine and environments on the host, wherever they run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np

from unidle.envs.faults import Fault as Fault
from unidle.envs.open_episode import Difference, OpenEpisode
from unidle.envs.shared_block import SharedBlock
from unidle.envs.spec import EnvSpec


class HostEnvs(Protocol):
    """Environments on the host, in slices: write actions to the block, `send` slices, `recv` the slices that finished.

    An env id is an environment's index in the block. From `send` to `recv` the caller may read the actions of a slice
    but must not touch its other entries of the block, `block.skip` included. Call `start`, `states` and `resume` only
    while no slice is in flight.

    A failed environment is restarted with its next episode. If its step has to be repeated, `block.retry` is set and
    `faults` has the reason. `recv` raises TrainingError if an environment keeps failing.
    """

    env_spec: EnvSpec
    n_envs: int
    block: SharedBlock
    workers: int
    bounds: list[tuple[int, int]]  # env ids of each slice: (first, end)
    faults: list[Fault]  # since the caller last cleared it
    # Env ids that started a new episode although they were not being stepped; `block.final_obs` has their last
    # observation. The caller clears it after each `recv`.
    restarted: list[int]

    def start(self, episodes: np.ndarray) -> None:
        """Start the given episode in each environment."""

    def send(self, slices: Sequence[int]) -> None:
        """Step these slices with the actions in the block."""

    def has_finished(self, at_least: int) -> bool:
        """Whether `recv` of so many slices would return at once, or does its work itself instead of waiting."""

    def recv(self, at_least: int, seconds: float | None = None) -> list[int]:
        """Wait for `at_least` finished slices, or for that many seconds, and return the finished ones."""

    def states(self) -> list[dict[str, Any] | None]:
        """Return what a checkpoint holds of each environment besides its episode: {"env": …}, {"carried": …} or None.

        "env" is its state now, "carried" the state of its wrappers at the start of each episode since
        `block.oldest_episode`.
        """

    def resume(self, points: Sequence[OpenEpisode]) -> list[Difference | None]:
        """Restore the open episode of each environment; None for those that reproduced it."""

    def close(self) -> None:
        """Close all environments and end their processes."""


@runtime_checkable
class StatisticsHolder(Protocol):
    """HostEnvs whose wrappers normalise with running means, which checkpoints and evaluations need."""

    def statistics(self) -> dict[str, Any]:
        """The running means; empty if there are none."""

    def load_statistics(self, state: dict[str, Any], *, freeze: bool = False) -> None:
        """Continue from `statistics`; with `freeze`, for an evaluation, they do not change."""


@runtime_checkable
class EpisodeRecorder(Protocol):
    """HostEnvs that can record an episode for the report; only evaluation asks for it."""

    def take_episode_record(self) -> dict[str, Any] | None:
        """Return the JSON record of the first env's first episode since the last call, and record the next one."""
