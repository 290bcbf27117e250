"""Actions of many environments, from the flat form to that of a vector environment."""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium import spaces

from unidle.spaces.actions import ActionLayout, Part
from unidle.spaces.tree import rebuild


def decode_batch(layout: ActionLayout, actions: np.ndarray) -> Any:
    """`ActionLayout.decode` for a batch [N, width]: structured like the space, each leaf [N, …]."""
    return rebuild(layout.space, {part.path: _decode_part(part, actions[:, part.columns]) for part in layout.parts})


def _decode_part(part: Part, values: np.ndarray) -> np.ndarray:
    space: Any = part.space
    if isinstance(space, spaces.Discrete):
        return space.start + values[:, 0].astype(space.dtype)
    if isinstance(space, spaces.MultiDiscrete):
        return values.astype(space.dtype).reshape(-1, *space.nvec.shape) + space.start
    if part.bins is not None:
        chosen = values.astype(np.int64).reshape(-1, *space.shape)
        return np.take_along_axis(part.bins, chosen, 0)
    if space.dtype.kind in "iub":
        values = np.rint(values)
    elif space.dtype == np.float64:
        # Close float64 bounds (a joint locked at 0.1) may have no float32 between them.
        values = np.minimum(np.maximum(values, space.low.ravel()), space.high.ravel())
    return values.astype(space.dtype).reshape(-1, *space.shape)
