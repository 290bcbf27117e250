"""Environments with one planted reason to be slow, `planted_envs:Name`. They import no torch unless that is it."""

from __future__ import annotations

import time
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces


class Cheap(gymnasium.Env):
    """A step costs next to nothing."""

    observation_space = spaces.Box(-1, 1, (8,), np.float32)
    action_space = spaces.Discrete(2)

    def __init__(self) -> None:
        self._seen, self._steps = np.zeros(8, np.float32), 0

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[np.ndarray, dict]:
        self._steps = 0
        return self._seen, {}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict]:
        self.work()
        self._steps += 1
        return self._seen, 1.0, False, self._steps >= 100, {}

    def work(self) -> None:
        """What a step costs."""


class Sleeping(Cheap):
    """It waits."""

    def work(self) -> None:
        time.sleep(0.005)


class Burning(Cheap):
    """It computes."""

    def work(self) -> None:
        end = time.thread_time() + 0.003
        while time.thread_time() < end:
            sum(range(300))


class Threaded(Cheap):
    """It computes on eight threads, whatever the machine has."""

    def __init__(self) -> None:
        super().__init__()
        import torch

        torch.set_num_threads(8)
        self._matrix = torch.randn(512, 512)

    def work(self) -> None:
        self._matrix = (self._matrix @ self._matrix).tanh()


class Masked(Cheap):
    """Only one action is allowed at a time, and it minds."""

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[np.ndarray, dict]:
        return super().reset()[0], self._info()

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict]:
        if action != self._steps % 2:
            raise ValueError(f"action {action} is not allowed")
        seen, reward, terminated, truncated, _ = super().step(action)
        return seen, reward, terminated, truncated, self._info()

    def _info(self) -> dict[str, Any]:
        mask = np.zeros(2, np.int8)
        mask[self._steps % 2] = 1
        return {"action_mask": mask}
