"""`--frame-stack N`: the observation is the latest N of the environment's, as in Stable-Baselines3's VecFrameStack."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from unidle.errors import UsageError
from unidle.spaces.observations import MASK, ObservationLayout, image_axes
from unidle.spaces.tree import Path, describe_path, follow, rebuild, walk


class FrameStack(gymnasium.Wrapper):
    """Stacks the latest `n` observations, the newest last; those before the episode are zeros.

    Images are stacked along their channels, everything else along the last axis. A Dict or Tuple is stacked part by
    part, without the action mask.
    """

    def __init__(self, env: gymnasium.Env, n: int) -> None:
        super().__init__(env)
        self._axes = {path: _axis(leaf, path) for path, leaf in walk(env.observation_space) if path != (MASK,)}
        self._frames: dict[Path, np.ndarray] = {}  # the observation that is returned, by leaf
        self._n = n
        self.observation_space = self._stacked_space(env.observation_space, ())

    def described_in(self, layout: ObservationLayout) -> ObservationLayout:
        """`layout`, of this environment's observations, with what it takes to store each frame of a stack once."""
        return replace(layout, frame_stack=self._n, stack_axes=tuple(self._axes[leaf.path] for leaf in layout.leaves))

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Start an episode; the stack holds zeros and its first observation."""
        observation, info = self.env.reset(seed=seed, options=options)
        self._frames = {}
        return self._push(observation), info

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """Step; the oldest observation leaves the stack."""
        observation, reward, terminated, truncated, info = self.env.step(action)
        return self._push(observation), reward, terminated, truncated, info

    def _push(self, observation: Any) -> Any:
        leaves = {path: follow(observation, path) for path, _ in walk(self.env.observation_space)}
        for path, axis in self._axes.items():
            frame = _with_channels(leaves[path])
            before = self._frames.get(path)
            if before is None:
                before = np.concatenate([np.zeros_like(frame)] * self._n, axis)
            width = frame.shape[axis]
            kept = before[width:] if axis == 0 else before[..., width:]
            # A new array each time, because the caller may keep it.
            self._frames[path] = leaves[path] = np.concatenate((kept, frame), axis)
        return rebuild(self.observation_space, leaves)

    def _stacked_space(self, space: spaces.Space, path: Path) -> spaces.Space:
        if isinstance(space, spaces.Dict):
            return spaces.Dict({key: self._stacked_space(part, (*path, key)) for key, part in space.spaces.items()})
        if isinstance(space, spaces.Tuple):
            return spaces.Tuple([self._stacked_space(part, (*path, index)) for index, part in enumerate(space.spaces)])
        if path not in self._axes:
            return space
        assert isinstance(space, spaces.Box)
        # Zeros, which stand for the time before the episode, need not be within the bounds of an observation.
        low, high = np.minimum(_with_channels(space.low), 0), np.maximum(_with_channels(space.high), 0)
        low, high = (np.concatenate([bound] * self._n, self._axes[path]) for bound in (low, high))
        return spaces.Box(low, high, dtype=space.dtype.type)


def _axis(leaf: spaces.Space, path: Path) -> int:
    """The axis along which a leaf is stacked."""
    if not isinstance(leaf, spaces.Box) or not leaf.shape:
        raise UsageError(
            f"--frame-stack stacks Box spaces with at least one dimension, but {describe_path('observation', path)} is "
            f"a {type(leaf).__name__}; leave it out, or wrap the environment (--wrapper module:callable)."
        )
    if not _is_image(leaf.shape, leaf.dtype):
        return -1
    return 0 if len(leaf.shape) == 2 or leaf.shape[0] < leaf.shape[2] else -1


def _is_image(shape: tuple[int, ...], dtype: Any) -> bool:
    return dtype == np.uint8 and image_axes(shape) is not None


def _with_channels(array: np.ndarray) -> np.ndarray:
    """The array itself; an image without a channel axis gets one in front."""
    return array[None] if array.ndim == 2 and _is_image(array.shape, array.dtype) else array
