"""Generalised advantages and returns in one kernel: each thread scans one environment's steps backwards."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_ENVS = 64  # per block


@triton.jit
def _scan(
    rewards, values, bootstrap, terminated, truncated, importance, advantages, returns, gamma, gain, T, N,
    TRACED: tl.constexpr, ENVS: tl.constexpr,
):  # fmt: skip
    env = tl.program_id(0) * ENVS + tl.arange(0, ENVS)
    inside = env < N
    following = tl.load(values + T * N + env, mask=inside, other=0.0)
    advantage = tl.zeros((ENVS,), tl.float32)
    for back in range(T):
        at = (T - 1 - back) * N + env
        value = tl.load(values + at, mask=inside, other=0.0)
        over = tl.load(terminated + at, mask=inside, other=0) != 0
        cut = tl.load(truncated + at, mask=inside, other=0) != 0
        following = tl.where(cut, tl.load(bootstrap + at, mask=inside, other=0.0), following)
        following = tl.where(over, 0.0, following)
        delta = tl.load(rewards + at, mask=inside, other=0.0) + gamma * following - value
        advantage = delta + tl.where(over | cut, 0.0, gain * advantage)
        tl.store(advantages + at, advantage, mask=inside)
        tl.store(returns + at, advantage + value, mask=inside)
        following = value
        if TRACED:
            advantage *= tl.minimum(tl.load(importance + at, mask=inside, other=0.0), 1.0)


def gae(
    rewards: Tensor,
    values: Tensor,
    bootstrap: Tensor,
    terminated: Tensor,
    truncated: Tensor,
    gamma: float,
    lam: float,
    importance: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`buffers.advantages.gae`."""
    steps, n_envs = rewards.shape
    advantages, returns = torch.empty_like(rewards), torch.empty_like(rewards)
    flags = (terminated.view(torch.uint8), truncated.view(torch.uint8))
    traced = importance is not None
    blocks = triton.cdiv(n_envs, _ENVS)
    _scan[(blocks,)](
        rewards, values, bootstrap, *flags, importance if traced else rewards, advantages, returns,
        gamma, gamma * lam, steps, n_envs, traced, _ENVS, num_warps=2,
    )  # fmt: skip
    return advantages, returns
