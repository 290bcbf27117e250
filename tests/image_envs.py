"""Small environments with images, which import no torch."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces


class RandomImages(gymnasium.Env):
    """Noise from the episode's seed, which earns the action; episodes end at random, in both ways."""

    def __init__(self, shape: tuple[int, ...] = (10, 9, 3), continuous: bool = False) -> None:
        self.observation_space = spaces.Box(0, 255, shape, np.uint8)
        self.action_space = spaces.Box(-1, 1, (2,)) if continuous else spaces.Discrete(3)

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[Any, dict]:
        super().reset(seed=seed)
        return self._image(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict]:
        draw = self.np_random.random()
        return self._image(), float(np.sum(action)), draw < 0.08, 0.08 <= draw < 0.16, {}

    def _image(self) -> np.ndarray:
        return self.np_random.integers(1, 256, self.observation_space.shape, np.uint8)


class DirectedEpisodes(gymnasium.Env):
    """Noise in a space; an action of 1 terminates, 2 truncates, 3 does both."""

    action_space = spaces.Discrete(4)

    def __init__(self, space: spaces.Space, seed: int) -> None:
        self.observation_space = space
        self._rng = np.random.default_rng(seed)

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[Any, dict]:
        return self._observation(self.observation_space), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict]:
        return self._observation(self.observation_space), float(self._rng.random()), bool(action & 1), action > 1, {}

    def _observation(self, space: spaces.Space) -> Any:
        if isinstance(space, spaces.Dict):
            return {key: self._observation(part) for key, part in space.items()}
        assert isinstance(space, (spaces.Box, spaces.MultiBinary))
        return self._rng.integers(0, 2 if isinstance(space, spaces.MultiBinary) else 256, space.shape).astype(
            space.dtype
        )


class BrightQuadrant(gymnasium.Env):
    """One quadrant of a noisy image is brighter; naming it earns 1. An episode is 16 images."""

    observation_space = spaces.Box(0, 255, (16, 16), np.uint8)
    action_space = spaces.Discrete(4)

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[np.ndarray, dict]:
        super().reset(seed=seed)
        self._steps = 0
        return self._image(), {}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict]:
        reward = float(action == self._bright)
        self._steps += 1
        return self._image(), reward, False, self._steps == 16, {}

    def _image(self) -> np.ndarray:
        self._bright = int(self.np_random.integers(4))
        image = self.np_random.integers(0, 100, (16, 16), np.uint8)
        down, right = divmod(self._bright, 2)
        image[8 * down : 8 * down + 8, 8 * right : 8 * right + 8] += 100
        return image
