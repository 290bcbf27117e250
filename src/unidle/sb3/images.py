"""Images as Stable-Baselines3's networks get them: channels first, as after its VecTransposeImage."""

from __future__ import annotations

import numpy as np
from gymnasium import spaces

from unidle.spaces.observations import image_axes


def is_image(space: spaces.Space) -> bool:
    """Whether Stable-Baselines3 takes the observation as an image."""
    return isinstance(space, spaces.Box) and space.dtype == np.uint8 and len(space.shape) == 3


def has_channels_last(space: spaces.Space) -> bool:
    """Whether it is an image that Stable-Baselines3 transposes."""
    if not is_image(space) or space.shape is None:
        return False
    axes = image_axes(space.shape)
    return axes is not None and space.shape[2] == axes[0] != space.shape[0]


def channels_first(space: spaces.Space) -> spaces.Space:
    """The space with all images transposed."""
    if isinstance(space, spaces.Dict):
        return spaces.Dict({key: channels_first(part) for key, part in space.spaces.items()})
    if isinstance(space, spaces.Box) and has_channels_last(space):
        return spaces.Box(np.moveaxis(space.low, -1, 0), np.moveaxis(space.high, -1, 0), dtype=np.uint8)
    return space
