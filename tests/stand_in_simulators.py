"""Stand-ins for simulators on the device, with the interface of Isaac Lab: Python takes most of each step."""

from __future__ import annotations

import time
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium import spaces

STEP_S = 0.004
_LIMIT = 50


class SlowPython(gymnasium.Env):
    """A step takes `STEP_S` of Python, however many environments there are."""

    is_vector_env = True

    def __init__(self, num_envs: int) -> None:
        self.num_envs, self.device = num_envs, "cpu"
        self._lengths = torch.zeros(num_envs, dtype=torch.long)
        self.single_observation_space = spaces.Dict({"policy": spaces.Box(-np.inf, np.inf, (2,))})
        self.single_action_space = spaces.Box(-np.inf, np.inf, (1,))

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[dict, dict]:
        return {"policy": torch.zeros(self.num_envs, 2)}, {}

    def step(self, actions: torch.Tensor) -> tuple[dict, torch.Tensor, torch.Tensor, torch.Tensor, dict]:
        end = time.perf_counter() + STEP_S
        while time.perf_counter() < end:
            pass
        self._lengths += 1
        ended = self._lengths >= _LIMIT
        self._lengths[ended] = 0
        obs = {"policy": actions.expand(-1, 2)}
        return obs, -actions[:, 0].abs(), torch.zeros_like(ended), ended, {}


def of_any_size(num_envs: int = 16, **more: Any) -> SlowPython:
    """A simulator with as many environments as wanted."""
    return SlowPython(num_envs)


def of_fixed_size() -> SlowPython:
    """A simulator that always has 16 environments."""
    return SlowPython(16)
