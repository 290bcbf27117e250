"""A DeviceEnv on the CPU as HostEnvs, for evaluation."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from unidle.envs.device.device_env import DeviceEnv, MaskedDeviceEnv
from unidle.envs.faults import Fault
from unidle.envs.open_episode import Difference, OpenEpisode
from unidle.envs.shared_block import SharedBlock
from unidle.envs.spec import EnvSpec


class TensorEnvs:
    """A DeviceEnv (on the CPU) with a block; all its environments are one slice."""

    workers = 0

    def __init__(self, env: DeviceEnv, env_spec: EnvSpec) -> None:
        self._env, self.env_spec, self.n_envs = env, env_spec, env.n_envs
        self.block = SharedBlock(env_spec, env.n_envs)
        self.bounds = [(0, env.n_envs)]
        self.faults: list[Fault] = []
        self.restarted: list[int] = []
        self._write: Any = env_spec.obs_layout.writer(self.block.obs)
        self._write_final: Any = env_spec.obs_layout.writer(self.block.final_obs)
        self._returns, self._lengths = np.zeros(env.n_envs), np.zeros(env.n_envs, np.int64)

    def start(self, episodes: np.ndarray) -> None:
        """Start episode 0 in every environment."""
        assert not episodes.any()
        self._state, observation = self._env.begin()
        self._returns[:], self._lengths[:], self.block.episode[:] = 0.0, 0, 0
        self._write_obs(observation)

    def send(self, slices: Sequence[int]) -> None:
        """Do nothing; `recv` steps."""

    def has_finished(self, at_least: int) -> bool:
        """True: `recv` steps."""
        return True

    def recv(self, at_least: int, seconds: float | None = None) -> list[int]:
        """Step all environments."""
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
        self._write_obs(step.observation)
        self._write_final(slice(None), self._structured(step.final_observation))
        return [0]

    def _structured(self, observation: Tensor) -> Any:
        """An array, or a dict of arrays for a Dict space, whose groups are concatenated in the tensor."""
        array, leaves = observation.cpu().numpy(), self.env_spec.obs_layout.leaves
        if not leaves[0].path:
            return array
        ends = np.cumsum([math.prod(leaf.shape) for leaf in leaves])
        parts = np.split(array, ends[:-1], 1)
        return {leaf.path[0]: part.reshape(len(array), *leaf.shape) for leaf, part in zip(leaves, parts)}

    def _write_obs(self, observation: Tensor) -> None:
        self._write(slice(None), self._structured(observation))
        if isinstance(self._env, MaskedDeviceEnv) and self.env_spec.obs_layout.mask_width:
            self.env_spec.obs_layout.mask_view(self.block.obs)[:] = self._env.mask(self._state).cpu().numpy()

    def states(self) -> list[dict[str, Any] | None]:
        """None for all: evaluation is not checkpointed."""
        return [None] * self.n_envs

    def resume(self, points: Sequence[OpenEpisode]) -> list[Difference | None]:
        """Start new episodes; open ones are not restored."""
        self.start(np.zeros(self.n_envs, np.int64))
        return [Difference("its state is not saved", is_lost=True)] * self.n_envs

    def close(self) -> None:
        """Close the environment, if it has `close`."""
        if hasattr(self._env, "close"):
            self._env.close()
