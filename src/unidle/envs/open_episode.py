"""Episodes that were open at a checkpoint, and how they may differ when they are replayed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class OpenEpisode:
    """An episode that was open at a checkpoint: what restores it, and what a replay is compared with."""

    episode: int
    actions: np.ndarray  # [k, width] so far
    rewards: np.ndarray  # [k]
    obs: np.ndarray  # the latest observation, packed
    # {"env": …}: the environment's own state; {"carried": …}: the wrappers' state when the episode began.
    state: dict[str, Any] | None = None


@dataclass(frozen=True)
class Difference:
    """How a resumed environment differs from before."""

    text: str
    is_lost: bool  # the episode could not be restored: the next one has begun
