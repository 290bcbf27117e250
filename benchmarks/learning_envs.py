"""Environments of learning.py that Gymnasium does not have: one of pixels, and one that needs memory."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

_BOARD, _SCALE = 10, 4  # cells per side, pixels per cell


class Catch(gymnasium.Env):
    """A ball falls from the top of a board, and a paddle at the bottom must be under it: a return of 1, else −1."""

    observation_space = spaces.Box(0, 255, (_BOARD * _SCALE, _BOARD * _SCALE, 1), np.uint8)
    action_space = spaces.Discrete(3)  # left, stay, right

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[np.ndarray, dict]:
        """A ball in a random column, and the paddle in the middle."""
        super().reset(seed=seed)
        self._row, self._column, self._paddle = 0, int(self.np_random.integers(_BOARD)), _BOARD // 2
        return self._image(), {}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict]:
        """Move the paddle, and the ball one row down."""
        self._row += 1
        self._paddle = min(max(self._paddle + int(action) - 1, 0), _BOARD - 1)
        ends = self._row == _BOARD - 1
        reward = (1.0 if self._paddle == self._column else -1.0) if ends else 0.0
        return self._image(), reward, ends, False, {}

    def _image(self) -> np.ndarray:
        board = np.zeros((_BOARD, _BOARD), np.uint8)
        board[self._row, self._column] = board[-1, self._paddle] = 255
        return np.kron(board, np.ones((_SCALE, _SCALE), np.uint8))[..., None]


class _WithoutVelocities(gymnasium.ObservationWrapper):
    def observation(self, observation: np.ndarray) -> np.ndarray:
        return observation * np.array([1, 0, 1, 0], observation.dtype)


def cartpole_without_velocities() -> gymnasium.Env:
    """CartPole-v1 whose velocities are 0 in the observation, as in rl-zoo's CartPoleNoVel-v1."""
    return _WithoutVelocities(gymnasium.make("CartPole-v1"))
