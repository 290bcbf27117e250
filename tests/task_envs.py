"""A small multi-task environment that reports success."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces


class MultiTaskWalk(gymnasium.Env):
    """Walk to the task's target; each slot cycles through the tasks. Episodes of 3 to 9 steps, drawn from the seed."""

    observation_space = spaces.Box(-np.inf, np.inf, (5,), np.float32)
    action_space = spaces.Box(-1, 1, (1,), np.float32)
    is_multi_task = True
    names = ("left", "here", "right")

    def __init__(
        self, n_envs: int = 1, kill_file: str = "", step_seconds: float = 0.0, success_key: str = "success"
    ) -> None:
        """If the file `kill_file` exists, it is deleted and the process exits; a step takes `step_seconds`."""
        self.n_envs, self._kill_file, self._step_seconds, self._success_key = (
            n_envs,
            kill_file,
            step_seconds,
            success_key,
        )

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[np.ndarray, dict]:
        super().reset(seed=seed)
        chosen = options or {"env": 0, "episode": 0}
        self.task = (chosen["env"] + self.n_envs * chosen["episode"]) % 3
        self.x, self.left = float(self.np_random.normal()), int(self.np_random.integers(3, 10))
        return self._observation(), {}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict]:
        if self._kill_file and Path(self._kill_file).exists():
            Path(self._kill_file).unlink()
            os._exit(9)
        time.sleep(self._step_seconds)
        self.x += float(action[0])
        self.left -= 1
        distance = abs(self.x - (self.task - 1))
        return self._observation(), -distance, False, self.left == 0, {self._success_key: float(distance < 0.4)}

    def _observation(self) -> np.ndarray:
        return np.array([self.x, self.left, *np.eye(3)[self.task]], np.float32)
