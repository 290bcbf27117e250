"""Faults of environments, and the limit on consecutive ones."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import numpy as np

from unidle.envs.shared_block import SharedBlock
from unidle.errors import TrainingError

FaultKind = Literal["exception", "killed", "hung"]


@dataclass(frozen=True)
class Fault:
    """One failure that training survived."""

    env: int  # index in the run; if a worker died, that of its first environment
    kind: FaultKind
    text: str  # environment, episode, seed, and the traceback if there is one


class FaultCounter:
    """Counts the faults of each environment since it last finished an episode."""

    def __init__(self, n_envs: int, first_index: int, limit: int) -> None:
        """After `limit` consecutive faults of one environment, the next one raises a TrainingError."""
        self._first_index, self._limit = first_index, limit
        self._counts = np.zeros(n_envs, np.int64)
        self.is_zero = True  # lets callers skip `reset_finished` on every step

    def add(self, fault: Fault, env_ids: Iterable[int] | None = None) -> None:
        """Count a fault for its environment, or for all of `env_ids`."""
        self.is_zero = False
        for env_id in [fault.env - self._first_index] if env_ids is None else env_ids:
            self._counts[env_id] += 1
            if self._counts[env_id] > self._limit:
                raise TrainingError(
                    f"Environment {self._first_index + env_id} failed {self._counts[env_id]} times without finishing "
                    f"an episode in between; max_env_restarts allows {self._limit}. The last fault:\n{fault.text}"
                )

    def reset_finished(self, block: SharedBlock, env_ids: slice) -> None:
        """Reset the count of environments among `env_ids` that just finished an episode."""
        if self.is_zero:
            return
        ended = (block.terminated[env_ids] | block.truncated[env_ids]) & (block.episode_length[env_ids] >= 0)
        self._counts[env_ids][ended & ~block.skip[env_ids] & ~block.retry[env_ids]] = 0
        self.is_zero = not self._counts.any()
