"""Environments with several tasks and a success to tell of, small enough to be played by hand."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces


class Errands(gymnasium.Env):
    """Walk past the place that the task names; slots take turns at the tasks. Its steps are 3 to 9, by the seed."""

    observation_space = spaces.Box(-np.inf, np.inf, (5,), np.float32)
    action_space = spaces.Box(-1, 1, (1,), np.float32)
    takes_turns = True
    names = ("left", "here", "right")

    def __init__(self, n_slots: int = 1, deadly: str = "", seconds: float = 0.0, tells: str = "success") -> None:
        """Where there is a file `deadly`, it is removed and this process dies; a step takes some `seconds`."""
        self.n_slots, self._deadly, self._seconds, self._tells = n_slots, deadly, seconds, tells

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[np.ndarray, dict]:
        super().reset(seed=seed)
        chosen = options or {"env": 0, "episode": 0}
        self.task = (chosen["env"] + self.n_slots * chosen["episode"]) % 3
        self.x, self.left = float(self.np_random.normal()), int(self.np_random.integers(3, 10))
        return self._seen(), {}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict]:
        if self._deadly and Path(self._deadly).exists():
            Path(self._deadly).unlink()
            os._exit(9)
        time.sleep(self._seconds)
        self.x += float(action[0])
        self.left -= 1
        distance = abs(self.x - (self.task - 1))
        return self._seen(), -distance, False, self.left == 0, {self._tells: float(distance < 0.4)}

    def _seen(self) -> np.ndarray:
        return np.array([self.x, self.left, *np.eye(3)[self.task]], np.float32)
