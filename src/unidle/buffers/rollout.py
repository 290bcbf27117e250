"""A rollout: the steps of one iteration, as tensors on the device."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class RolloutArrays:
    """NumPy views of a rollout on a host; kept, because for a few steps creating a view takes longer than using it."""

    obs: np.ndarray
    starts: np.ndarray
    actions: np.ndarray
    rewards: np.ndarray
    terminated: np.ndarray
    truncated: np.ndarray


class Rollout:
    """T steps of N environments. Where an episode ends at step t, obs[t + 1] is the first observation of the next."""

    def __init__(
        self, n_steps: int, n_envs: int, obs_bytes: int, width: int, state_size: int, device: torch.device
    ) -> None:
        def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self.obs = zeros(n_steps + 1, n_envs, obs_bytes, dtype=torch.uint8)  # the last has no action yet
        self.starts = zeros(n_steps + 1, n_envs, dtype=torch.bool)  # obs[t] is the first of its episode
        # As sampled, before scaling and clipping. Inference always runs for all environments; the results of those that
        # are not ready go to one extra step. (In `obs` they go to the last step, which is written last.)
        self.actions_and_trash = zeros(n_steps + 1, n_envs, width)
        self.actions = self.actions_and_trash[:-1]
        self.rewards = zeros(n_steps, n_envs)
        self.terminated = zeros(n_steps, n_envs, dtype=torch.bool)
        self.truncated = zeros(n_steps, n_envs, dtype=torch.bool)
        # states[t] is the recurrent state after step t - 1, not yet zeroed where obs[t] starts an episode.
        self.states = zeros(n_steps + 1, n_envs, state_size)
        # The final observation of every truncated episode, and its step and environment; few, so stored separately.
        self.final_obs = zeros(0, obs_bytes, dtype=torch.uint8)
        self.final_at = zeros(0, dtype=torch.long)  # t × N + env; T × N for unused entries

    @property
    def shape(self) -> tuple[int, int]:
        """(T, N)"""
        return self.rewards.shape[0], self.rewards.shape[1]

    @cached_property
    def arrays(self) -> RolloutArrays:
        """Its tensors as arrays, if it is on a host."""
        tensors = self.obs, self.starts, self.actions, self.rewards, self.terminated, self.truncated
        return RolloutArrays(*(tensor.numpy() for tensor in tensors))
