"""A synthetic environment with the observations and the speed of Atari, `pixel_env:Quadrant`.

Worker processes import this file, so it must not import torch or other slow modules.
"""

from __future__ import annotations

import time
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

SHAPE = (4, 84, 84)  # four frames, channels first, as a frame stack has them
_EPISODE_STEPS, _PICTURES = 200, 64


class Quadrant(gymnasium.Env[Any, Any]):
    """Noise with one brighter quadrant; naming it earns 1, so a CNN learns it. A step takes `step_us` of CPU time."""

    observation_space = spaces.Box(0, 255, SHAPE, np.uint8)
    action_space = spaces.Discrete(4)

    def __init__(self, step_us: float = 150.0) -> None:
        self._step_s = step_us * 1e-6
        rng = np.random.default_rng(0)  # the same pictures in every environment
        self._pictures = rng.integers(0, 200, (_PICTURES, *SHAPE), np.uint8)
        for number, picture in enumerate(self._pictures):
            down, right = divmod(number % 4, 2)
            picture[:, 42 * down : 42 * down + 42, 42 * right : 42 * right + 42] += 50

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        """Start an episode."""
        super().reset(seed=seed)
        self._steps, self._number = 0, int(self.np_random.integers(_PICTURES))
        return self._pictures[self._number].copy(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Work for the duration of a step, and show another picture."""
        until = time.perf_counter() + self._step_s
        reward = float(action == self._number % 4)
        self._steps += 1
        self._number = int(self.np_random.integers(_PICTURES))
        while time.perf_counter() < until:
            pass
        return self._pictures[self._number].copy(), reward, False, self._steps == _EPISODE_STEPS, {}
