"""Describes a device environment and its policy to the kernel that fills a whole rollout."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from unidle.buffers.rollout import Rollout
from unidle.envs.device.device_env import hash_seed
from unidle.kernels.triton.rollout import FusedRollout, RolloutTensors
from unidle.nn.actor_critic import ActorCritic
from unidle.nn.describe import describe_small_mlp, small_mlp_tensors
from unidle.tasks.classic_control import Classic

_MAX_MISMATCH = 0.02  # share of environments whose first step by a kernel may differ: TF32 products round


def rollout_kernel(
    env: Any,
    policy: Any,
    rollout: Rollout,
    noise: Tensor,
    state: Mapping[str, Tensor],
    starts_next: Tensor,
    returns: Tensor,
    lengths: Tensor,
) -> FusedRollout | str:
    """The kernel for `env` in `state` with `policy`, or the reason why there is none.

    `starts_next`, `returns` and `lengths` [N] belong to the open episodes.
    """
    if type(env) is not Classic or not isinstance(policy, ActorCritic):
        return "the environment is not a classic-control task, or the policy not an actor-critic"
    mlp = describe_small_mlp(policy)
    if isinstance(mlp, str):
        return mlp
    if mlp.mask_offset is not None:
        return "actions are masked"
    distribution = policy.distribution
    tensors = RolloutTensors(
        noise=noise,
        physics=state["physics"],
        episodes=state["episode"],
        lengths=state["length"],
        indices=env.indices,
        seed=torch.tensor([hash_seed(env.seed)], device=noise.device),
        starts_next=starts_next,
        returns=returns,
        counts=lengths,
        obs=rollout.obs,
        starts=rollout.starts,
        actions=rollout.actions,
        rewards=rollout.rewards,
        terminated=rollout.terminated,
        truncated=rollout.truncated,
        final_obs=rollout.final_obs,
        final_at=rollout.final_at,
        action_scale=distribution.scale,
        action_shift=distribution.shift,
        action_low=distribution.low,
        action_high=distribution.high,
    )
    return FusedRollout(mlp, small_mlp_tensors(policy), tensors, env.task.name, env.episode_limit)


def check_first_step(found: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    """RuntimeError unless the kernel's first step, tensors [env, ..], equals the environment's up to rounding."""
    agree = torch.stack([_agree(ours, theirs) for ours, theirs in zip(found, expected)]).all(0)
    # TF32 products differ slightly, which occasionally decides between two actions.
    if int((~agree).sum()) > max(1, _MAX_MISMATCH * len(agree)):
        raise RuntimeError("the kernel's first step differs from the environment's")


def _agree(ours: Tensor, theirs: Tensor) -> Tensor:
    """[env] whether two results [env, ..] are equal up to rounding."""
    close = torch.isclose(ours.float(), theirs.float(), rtol=0.02, atol=0.02)
    return close.view(len(close), -1).all(1)
