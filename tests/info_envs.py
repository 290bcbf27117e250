"""Environments that report numbers in info."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from unidle.envs.aio.async_env import AsyncEnv


class Counts(gymnasium.Env):
    """Episodes of 2 to 6 steps; at the end, info has their length in several forms."""

    observation_space = spaces.Box(-1, 1, (1,), np.float32)
    action_space = spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[np.ndarray, dict]:
        super().reset(seed=seed)
        self._left = self._length = int(self.np_random.integers(2, 7))
        return np.zeros(1, np.float32), {}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict]:
        self._left -= 1
        return np.zeros(1, np.float32), 0.5, self._left == 0, False, self.info()

    def info(self) -> dict[str, Any]:
        """Numbers at the end of an episode, and others before it, which nobody may log."""
        if self._left:
            return {"steps": -1.0, "is_long": True, "array": np.array([-1.0])}
        is_long = self._length > 3
        found = {"steps": self._length, "is_long": is_long, "array": np.array([2.0 * self._length]), "text": "3"}
        return found | ({"sometimes": 1.0} if is_long else {})


class AsyncCounts(AsyncEnv):
    """The same as coroutines."""

    observation_space, action_space = Counts.observation_space, Counts.action_space

    def __init__(self) -> None:
        self._env = Counts()

    async def reset(self, seed: int) -> tuple[np.ndarray, dict]:
        return self._env.reset(seed=seed)

    async def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict]:
        return self._env.step(action)

    async def close(self) -> None:
        """Nothing to close."""
