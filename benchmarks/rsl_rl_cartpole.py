"""RSL-RL for gpu_resident.py: its own runner and settings on unidle's CartPole physics.

RSL-RL has no discrete actions, so the sign of one continuous action is the direction to push. It is given what makes it
fast without changing it: TF32, no check of every step for NaN, and an environment whose step is one CUDA graph. The
environment's share is the time of its steps alone, one after the other, in the time of a whole iteration.
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

from unidle.engine.cuda_graphs import Capture
from unidle.tasks.classic_control import TASKS, Classic

STEPS, WARM_UP, ITERATIONS_PER_CALL = 24, 5, 5
_TIMED_STEPS = 500  # of the environment alone


class CartPole(VecEnv):
    """N CartPoles with RSL-RL's interface; on a GPU a step is one CUDA graph."""

    def __init__(self, n_envs: int, device: str) -> None:
        self._env = Classic(TASKS["unidle/CartPole-v1"], n_envs, 0, device)
        self._state, self._observation = self._env.begin()
        self._state = {name: tensor.clone() for name, tensor in self._state.items()}  # in place from here on
        self._observation, self._action = self._observation.clone(), torch.zeros(n_envs, 1, device=device)
        self._reward = torch.zeros(n_envs, device=device)
        self._ended = torch.zeros(n_envs, dtype=torch.long, device=device)
        self._truncated = torch.zeros(n_envs, dtype=torch.bool, device=device)
        self.num_envs, self.num_actions, self.max_episode_length = n_envs, 1, 500
        self.device: Any = device
        self.cfg: Any = {}
        self.episode_length_buf = self._state["length"]
        self.capture = Capture(torch.device(device), print)
        changes = [*self._state.values(), self._observation, self._reward, self._ended, self._truncated]
        self._advance = self.capture("the environment's step", self._step, changes)

    def _step(self) -> None:
        state, step = self._env.step(self._state, (self._action > 0).float())
        for name, tensor in state.items():
            self._state[name].copy_(tensor)
        self._observation.copy_(step.observation)
        self._reward.copy_(step.reward)
        self._ended.copy_(step.terminated | step.truncated)
        self._truncated.copy_(step.truncated)

    def get_observations(self) -> TensorDict:
        """Return a copy of the current observations, which RSL-RL stores only after the next step."""
        return TensorDict({"policy": self._observation.clone()}, batch_size=[self.num_envs])

    def step(self, actions: Tensor) -> tuple[TensorDict, Tensor, Tensor, dict[str, Any]]:
        """Push to the right where the action is positive."""
        self._action.copy_(actions)
        self._advance()
        return self.get_observations(), self._reward, self._ended, {"time_outs": self._truncated}


def train(n_envs: int, seconds: float) -> dict[str, Any]:
    """Train; steps per second are measured after a few iterations."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.set_float32_matmul_precision("high")  # TF32, as on unidle's side
    networks = {"class_name": "MLPModel", "hidden_dims": [64, 64], "activation": "tanh"}
    distribution = {"class_name": "GaussianDistribution", "init_std": 1.0}
    settings = {
        "num_steps_per_env": STEPS,
        "save_interval": 10**9,
        "check_for_nan": False,
        "obs_groups": {"actor": ["policy"], "critic": ["policy"]},
        "algorithm": {"class_name": "PPO", "num_learning_epochs": 5, "num_mini_batches": 4},
        "actor": {**networks, "distribution_cfg": distribution},
        "critic": dict(networks),
    }
    with contextlib.redirect_stdout(io.StringIO()):
        envs = CartPole(n_envs, device)
        runner = OnPolicyRunner(envs, settings, None, device)
        runner.learn(WARM_UP)
        _synchronize(device)
        iterations, began = 0, time.perf_counter()
        while time.perf_counter() - began < seconds:
            runner.learn(ITERATIONS_PER_CALL)
            _synchronize(device)
            iterations += ITERATIONS_PER_CALL
        elapsed = time.perf_counter() - began
        env_seconds = _seconds_of_steps(envs)
    if envs.capture.fallbacks:
        raise RuntimeError(f"RSL-RL's environment was not captured: {envs.capture.fallbacks}")
    return {
        "steps_per_second": iterations * n_envs * STEPS / elapsed,
        "environment_share": env_seconds * iterations / elapsed,
        "iterations": iterations,
        "rsl-rl-lib": version("rsl-rl-lib"),
    }


def _seconds_of_steps(envs: CartPole) -> float:
    """Seconds of an iteration's steps of the environment alone."""
    actions = torch.randn(envs.num_envs, 1, device=envs.device)
    with torch.inference_mode():
        envs.step(actions)
        _synchronize(envs.device)
        began = time.perf_counter()
        for _ in range(_TIMED_STEPS):
            envs.step(actions)
        _synchronize(envs.device)
    return (time.perf_counter() - began) / _TIMED_STEPS * STEPS


def _synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()
