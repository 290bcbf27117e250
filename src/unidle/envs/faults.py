"""What is told of an environment that failed, and how often in a row each one may."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import numpy as np

from unidle.envs.block import Block
from unidle.errors import TrainingError

FaultKind = Literal["exception", "killed", "hung"]


@dataclass(frozen=True)
class Fault:
    """One failure that training survived."""

    env: int  # its number in the run; of a worker that died, that of its first environment
    kind: FaultKind
    text: str  # for a person: environment, episode, seed, and the traceback if there is one


class FaultTally:
    """How often each environment has failed since it last finished an episode."""

    def __init__(self, n_envs: int, first_index: int, most: int) -> None:
        """`most` failures in a row are borne; the next one is a TrainingError."""
        self._first_index, self._most = first_index, most
        self._counts = np.zeros(n_envs, np.int64)
        self.is_clean = True
        """Nothing has failed that was not forgiven: spares every step a look at the counts."""

    def add(self, fault: Fault, lines: Iterable[int] | None = None) -> None:
        """Count a fault of its environment, or of those in `lines`."""
        self.is_clean = False
        for line in [fault.env - self._first_index] if lines is None else lines:
            self._counts[line] += 1
            if self._counts[line] > self._most:
                raise TrainingError(
                    f"Environment {self._first_index + line} failed {self._counts[line]} times without finishing an "
                    f"episode in between; max_env_restarts allows {self._most}. The last time:\n{fault.text}"
                )

    def forgive(self, block: Block, lines: slice) -> None:
        """Forget the faults of environments among `lines` whose episode has just ended by itself."""
        if self.is_clean:
            return
        ended = (block.terminated[lines] | block.truncated[lines]) & (block.episode_length[lines] >= 0)
        self._counts[lines][ended & ~block.skip[lines] & ~block.redo[lines]] = 0
        self.is_clean = not self._counts.any()
