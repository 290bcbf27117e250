"""A vector environment in a worker process of the pool: what `Slots` are for single environments."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from unidle.envs.faults import Fault
from unidle.envs.make import EnvMaker
from unidle.envs.open_episode import Difference, OpenEpisode
from unidle.envs.shared_block import SharedBlock
from unidle.envs.spec import EnvSpec
from unidle.envs.vector.host_envs import LOST
from unidle.envs.vector.part import VectorPart, make_vector
from unidle.envs.vector.vector_wrappers import Statistics
from unidle.errors import USER_EXCEPTIONS, wrap_errors


class VectorSlots:
    """The environments at `env_ids` of a block, stepped together; an exception in them ends the run."""

    def __init__(
        self, maker: EnvMaker, env_spec: EnvSpec, block: SharedBlock, env_ids: range, seed: int, first_index: int
    ) -> None:
        """The vector environment is created when it is needed first."""
        self._maker, self._env_spec, self._block = maker, env_spec, block
        self._env_ids, self._seed, self._first_index = env_ids, seed, first_index
        self._made: VectorPart | None = None

    @property
    def _part(self) -> VectorPart:
        if self._made is None:
            with wrap_errors("The vector environment could not be created"):
                vector = make_vector(self._maker, len(self._env_ids))
            run = self._seed, self._first_index
            self._made = VectorPart(vector, self._env_spec, self._block, self._env_ids.start, *run)
        return self._made

    def make(self) -> None:
        """Create the vector environment."""
        _ = self._part

    def start(self, episodes: np.ndarray) -> None:
        """Reset all environments and number their episodes as given."""
        self._part.start(episodes)

    def restart(self, episodes: np.ndarray, fallback_obs: np.ndarray) -> None:
        """Start the given episodes in a worker that replaces a dead one."""
        self._part.start(episodes)

    def step(self, first: int, end: int) -> None:
        """Step every environment: they are one slice, of which none is skipped."""
        self._block.retry[self._env_ids.start : self._env_ids.stop] = False
        self._part.send()
        self._part.recv()

    def take_faults(self) -> list[Fault]:
        """None: a failure ends the run."""
        return []

    def states(self) -> list[dict[str, Any] | None]:
        """None for all: their state is not accessible."""
        return [None] * len(self._env_ids)

    def resume(self, points: Sequence[OpenEpisode]) -> list[Difference | None]:
        """Start new episodes; open ones cannot be restored."""
        self._part.start(np.array([point.episode + 1 for point in points]))
        return [LOST] * len(points)

    def statistics(self) -> Statistics:
        """The running means in wrappers around the vector environment."""
        return self._part.vector.statistics()

    def load_statistics(self, state: Statistics, freeze: bool) -> None:
        """Continue from `statistics`."""
        self._part.vector.load_statistics(state, freeze=freeze)

    def close(self) -> None:
        """Close the vector environment."""
        if self._made is not None:
            try:
                self._made.vector.close()
            except USER_EXCEPTIONS:  # it is not needed any more
                self._made = None
