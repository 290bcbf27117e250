"""Keeps the true final observations of truncated episodes while a rollout is collected on the device."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from unidle.buffers.rollout import Rollout


class CapturedFinalObs:
    """For steps in a CUDA graph: preallocated for the most truncations a rollout can have, and filled by masks."""

    def __init__(self, rollout: Rollout, episode_limit: int | None) -> None:
        (steps, n_envs), obs_bytes, device = rollout.shape, rollout.obs.shape[-1], rollout.obs.device
        self._rollout, self._n_steps = rollout, rollout.rewards.numel()
        self._per_env = 0 if episode_limit is None else 1 + (steps - 1) // episode_limit
        self._envs = torch.arange(n_envs, device=device)
        self._truncations = torch.zeros(n_envs, dtype=torch.long, device=device)  # in this rollout so far
        self.carried_state = [self._truncations]
        rollout.final_obs = torch.zeros(self._per_env * n_envs, obs_bytes, dtype=torch.uint8, device=device)
        # Unused entries point past the end.
        rollout.final_at = torch.full((self._per_env * n_envs,), self._n_steps, device=device)

    def begin(self) -> None:
        """Start a rollout."""
        self._truncations.zero_()
        self._rollout.final_at.fill_(self._n_steps)

    def store(self, obs: Callable[[], Tensor], truncated: Tensor, step: Tensor) -> None:
        """Keep the observations `obs()` [env, byte] of the environments that were `truncated` at `step` [1]."""
        rollout, n_envs = self._rollout, len(self._envs)
        where = step * n_envs + self._envs
        for number in range(self._per_env):
            part = slice(number * n_envs, (number + 1) * n_envs)
            now = truncated & (self._truncations == number)
            kept = rollout.final_obs[part]
            kept.copy_(torch.where(now.unsqueeze(-1), obs(), kept))
            rollout.final_at[part] = torch.where(now, where, rollout.final_at[part])
        self._truncations.add_(truncated)

    def end(self) -> None:
        """End a rollout."""


class SimulatorFinalObs:
    """For simulators, whose episodes may be truncated at any step: keeps every observation and selects at the end."""

    def __init__(self, rollout: Rollout) -> None:
        self._rollout = rollout
        self._all = torch.zeros_like(rollout.obs[1:])  # [time, env, byte]
        self.carried_state: list[Tensor] = []

    def begin(self) -> None:
        """Start a rollout."""

    def store(self, obs: Callable[[], Tensor], truncated: Tensor, step: Tensor) -> None:
        """Keep the observations `obs()` [env, byte] of `step` [1]."""
        self._all.index_copy_(0, step, obs().unsqueeze(0))

    def end(self) -> None:
        """Select those of truncated episodes; this waits for the device."""
        rollout = self._rollout
        rollout.final_at = rollout.truncated.flatten().nonzero().squeeze(1)
        rollout.final_obs = self._all.flatten(0, 1)[rollout.final_at]
