"""Packed observations that are stacks of frames: taken apart into frames, and put together again.

    a stack of 4 images (84, 84)   | o₀ o₁ o₂ o₃ |   packed, 28,224 bytes; the newest frame o₃ is new, the others are in
    its predecessor's              | o₋₁ o₀ o₁ o₂ |  the stack before

A frame holds what one observation adds: the newest part of every leaf, and the action mask, which is not stacked.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from unidle.spaces.observations import ObservationLayout


@dataclass(frozen=True)
class _Field:
    """One leaf: bytes [outer, n, inner] at `offset` of an observation, [outer, inner] at `frame_offset` of a frame."""

    offset: int
    frame_offset: int
    outer: int
    inner: int


class Frames:
    """The frames of packed observations, for stacks of `n` observations of which the newest is the last."""

    def __init__(self, layout: ObservationLayout) -> None:
        self.n, self.obs_bytes = layout.frame_stack, layout.obs_bytes
        self._fields: list[_Field] = []
        end = 0
        for leaf, axis in zip(layout.leaves, layout.stack_axes, strict=True):
            outer = 1 if axis == 0 else math.prod(leaf.shape[:-1])
            inner = leaf.nbytes // outer // self.n
            self._fields.append(_Field(leaf.offset, end, outer, inner))
            end = _aligned(end + outer * inner)
        self._mask = slice(layout.mask_offset, layout.mask_offset + layout.mask_width)
        self._frame_mask = slice(end, end + layout.mask_width)
        self.frame_bytes = _aligned(end + layout.mask_width)

    @staticmethod
    def of(layout: ObservationLayout) -> Frames | None:
        """None unless the observation is a stack with images: the frames of numbers alone are not worth the work."""
        has_images = any(leaf.is_image for leaf in layout.leaves)
        return Frames(layout) if layout.frame_stack > 1 and has_images else None

    def of_stacks(self, obs: Tensor) -> Tensor:
        """All frames of observations [B, obs_bytes], oldest first: [B, n, frame_bytes]."""
        frames = obs.new_zeros(len(obs), self.n, self.frame_bytes)
        for field in self._fields:
            self._in_frames(frames, field).copy_(self._in_stack(obs, field))
        frames[..., self._frame_mask] = obs[:, None, self._mask]
        return frames

    def newest(self, obs: Tensor) -> Tensor:
        """The newest frame of observations [B, obs_bytes]: [B, frame_bytes]."""
        frame = obs.new_zeros(len(obs), 1, self.frame_bytes)
        for field in self._fields:
            self._in_frames(frame, field).copy_(self._in_stack(obs, field)[:, -1:])
        frame[:, 0, self._frame_mask] = obs[:, self._mask]
        return frame[:, 0]

    def stacked(self, frames: Tensor) -> Tensor:
        """The observations [B, obs_bytes] with these frames [B, n, frame_bytes], oldest first."""
        obs = frames.new_zeros(len(frames), self.obs_bytes)
        for field in self._fields:
            self._in_stack(obs, field).copy_(self._in_frames(frames, field))
        obs[:, self._mask] = frames[:, -1, self._frame_mask]
        return obs

    def _in_stack(self, obs: Tensor, field: _Field) -> Tensor:
        """A view of a leaf as [B, n, outer, inner]."""
        size = field.outer * self.n * field.inner
        leaf = obs[:, field.offset : field.offset + size]
        return leaf.unflatten(1, (field.outer, self.n, field.inner)).transpose(1, 2)

    @staticmethod
    def _in_frames(frames: Tensor, field: _Field) -> Tensor:
        """A view of its part in frames [B, k, frame_bytes], as [B, k, outer, inner]."""
        part = frames[..., field.frame_offset : field.frame_offset + field.outer * field.inner]
        return part.unflatten(2, (field.outer, field.inner))


def _aligned(offset: int) -> int:
    return -(-offset // 8) * 8
