"""Environments on the device, seen from the host like any other: for evaluation, where a few of them are watched."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from unidle.envs.block import Block
from unidle.envs.device.device_env import DeviceEnv, MaskedDeviceEnv
from unidle.envs.faults import Fault
from unidle.envs.spec import EnvSpec


class TensorEnvs:
    """A DeviceEnv (on the CPU) behind a block; all of it is one slice."""

    workers = 0

    def __init__(self, env: DeviceEnv, env_spec: EnvSpec) -> None:
        self._env, self.env_spec, self.n_envs = env, env_spec, env.n_envs
        self.block = Block(env_spec, env.n_envs)
        self.bounds = [(0, env.n_envs)]
        self.faults: list[Fault] = []
        self.renewed: list[int] = []
        self._write: Any = env_spec.obs_layout.writer(self.block.obs)
        self._write_final: Any = env_spec.obs_layout.writer(self.block.final_obs)
        self._returns, self._lengths = np.zeros(env.n_envs), np.zeros(env.n_envs, np.int64)

    def start(self, episodes: np.ndarray) -> None:
        """Begin anew everywhere, with episode 0."""
        assert not episodes.any()
        self._state, observation = self._env.begin()
        self._returns[:], self._lengths[:], self.block.episode[:] = 0.0, 0, 0
        self._show(observation)

    def send(self, slices: Sequence[int]) -> None:
        """Take the actions in the block; nothing runs ahead here."""

    def recv(self, at_least: int, seconds: float | None = None) -> list[int]:
        """Step all of them."""
        block = self.block
        self._state, step = self._env.step(self._state, torch.from_numpy(block.actions))
        reward, terminated, truncated = (part.cpu().numpy() for part in (step.reward, step.terminated, step.truncated))
        ended = terminated | truncated
        block.reward[:] = reward
        block.terminated[:], block.truncated[:] = terminated, truncated
        self._returns += reward
        self._lengths += 1
        block.episode_return[ended], block.episode_length[ended] = self._returns[ended], self._lengths[ended]
        self._returns[ended], self._lengths[ended] = 0.0, 0
        block.episode += ended
        self._show(step.observation)
        self._write_final(slice(None), step.final_observation.cpu().numpy())
        return [0]

    def _show(self, observation: Tensor) -> None:
        self._write(slice(None), observation.cpu().numpy())
        if isinstance(self._env, MaskedDeviceEnv):
            self.env_spec.obs_layout.mask_view(self.block.obs)[:] = self._env.mask(self._state).cpu().numpy()

    def states(self) -> list[dict[str, Any] | None]:
        """None: nobody saves these."""
        return [None] * self.n_envs

    def resume(self, points: list[tuple[int, np.ndarray, np.ndarray, dict[str, Any] | None]]) -> list[bool]:
        """Not to be come back to: every episode starts anew."""
        self.start(np.zeros(self.n_envs, np.int64))
        return [False] * self.n_envs

    def close(self) -> None:
        """End the environments, where there is something to end."""
        if hasattr(self._env, "close"):
            self._env.close()
