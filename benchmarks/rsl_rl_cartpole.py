"""RSL-RL for gpu_resident.py: its own runner and settings on unidle's CartPole physics.

RSL-RL has no discrete actions, so the sign of one continuous action is the direction to push.
"""

from __future__ import annotations

import contextlib
import io
import time
from importlib.metadata import version
from typing import Any

import torch
from rsl_rl.env import VecEnv
from rsl_rl.runners import OnPolicyRunner
from tensordict import TensorDict
from torch import Tensor

from unidle.tasks.classic_control import TASKS, Classic

STEPS, WARM_UP, ITERATIONS_PER_CALL = 24, 5, 5


class CartPole(VecEnv):
    """N CartPoles with RSL-RL's interface."""

    def __init__(self, n_envs: int, device: str) -> None:
        self._env = Classic(TASKS["unidle/CartPole-v1"], n_envs, 0, device)
        self._state, self._observation = self._env.begin()
        self.num_envs, self.num_actions, self.max_episode_length = n_envs, 1, 500
        self.device: Any = device
        self.cfg: Any = {}
        self.episode_length_buf = torch.zeros(n_envs, dtype=torch.long, device=device)

    def get_observations(self) -> TensorDict:
        """Return the current observations."""
        return TensorDict({"policy": self._observation}, batch_size=[self.num_envs])

    def step(self, actions: Tensor) -> tuple[TensorDict, Tensor, Tensor, dict[str, Any]]:
        """Push to the right where the action is positive."""
        self._state, step = self._env.step(self._state, (actions > 0).float())
        self._observation, ended = step.observation, step.terminated | step.truncated
        self.episode_length_buf = self._state["length"]
        return self.get_observations(), step.reward, ended.long(), {"time_outs": step.truncated}


def train(n_envs: int, seconds: float) -> dict[str, Any]:
    """Train; steps per second are measured after a few iterations."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    networks = {"class_name": "MLPModel", "hidden_dims": [64, 64], "activation": "tanh"}
    distribution = {"class_name": "GaussianDistribution", "init_std": 1.0}
    settings = {
        "num_steps_per_env": STEPS,
        "save_interval": 10**9,
        "obs_groups": {"actor": ["policy"], "critic": ["policy"]},
        "algorithm": {"class_name": "PPO", "num_learning_epochs": 5, "num_mini_batches": 4},
        "actor": {**networks, "distribution_cfg": distribution},
        "critic": dict(networks),
    }
    with contextlib.redirect_stdout(io.StringIO()):
        runner = OnPolicyRunner(CartPole(n_envs, device), settings, None, device)
        runner.learn(WARM_UP)
        _synchronize(device)
        iterations, began = 0, time.perf_counter()
        while time.perf_counter() - began < seconds:
            runner.learn(ITERATIONS_PER_CALL)
            _synchronize(device)
            iterations += ITERATIONS_PER_CALL
    rate = iterations * n_envs * STEPS / (time.perf_counter() - began)
    return {"steps_per_second": rate, "iterations": iterations, "rsl-rl-lib": version("rsl-rl-lib")}


def _synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()
