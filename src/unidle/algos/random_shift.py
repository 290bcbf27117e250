"""Random shifts of sampled images, an augmentation with which SAC and DQN learn from pixels (DrQ, Yarats et al. 2021).

An image is padded by repeating its border and cropped at random to its size:

    shifted[y, x] = image[clamp(y + Δy), clamp(x + Δx)],  Δy, Δx uniform in −n … n

for all channels alike, so all frames of a stack too; every image of every observation of a batch has its own shift.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from unidle.buffers.replay import Transitions
from unidle.nn.encoder import leaf_tensor
from unidle.spaces.observations import Leaf, ObservationLayout, has_channels_last, image_axes


class RandomShift:
    """Shifts the images of a batch, by offsets drawn from the generator that sampled it."""

    def __init__(self, layout: ObservationLayout, pixels: int) -> None:
        self._images = [leaf for leaf in layout.leaves if leaf.is_image]
        self._pixels = pixels

    def __call__(self, batch: Transitions, generator: torch.Generator) -> Transitions:
        """The batch with other shifts in `obs` than in `next_obs`."""
        shape = (2, len(self._images), 2, len(batch))
        offsets = torch.randint(2 * self._pixels + 1, shape, generator=generator, device=batch.obs.device)
        obs, next_obs = (self._shifted(*pair) for pair in zip((batch.obs, batch.next_obs), offsets - self._pixels))
        return replace(batch, obs=obs, next_obs=next_obs)

    def _shifted(self, obs: Tensor, offsets: Tensor) -> Tensor:
        shifted = obs.clone()
        for leaf, (down, right) in zip(self._images, offsets):
            leaf_tensor(shifted, leaf).copy_(shift_images(leaf_tensor(obs, leaf), leaf, down, right))
        return shifted


def shift_images(images: Tensor, leaf: Leaf, down: Tensor, right: Tensor) -> Tensor:
    """Images [B, *shape] of `leaf`; pixel (y, x) of image b is that at (y + down[b], x + right[b]), or the nearest."""
    axes = image_axes(leaf.shape)
    assert axes is not None
    channels, height, width = axes
    rows, columns = (
        (torch.arange(size, device=images.device) + by.unsqueeze(1)).clamp(0, size - 1)
        for size, by in ((height, down), (width, right))
    )
    source = (rows.unsqueeze(2) * width + columns.unsqueeze(1)).flatten(1)  # [B, height × width]
    is_channels_last = has_channels_last(leaf.shape)
    axis = 1 if is_channels_last else 2
    pixels = images.reshape(len(images), *((-1, channels) if is_channels_last else (channels, -1)))
    return pixels.gather(axis, source.unsqueeze(3 - axis).expand_as(pixels)).view_as(images)
