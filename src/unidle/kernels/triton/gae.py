"""Generalised advantages and returns in one kernel: each thread scans one environment's steps backwards."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK_ENVS = 64


@triton.jit
def _scan(
    rewards, values, bootstrap, terminated, truncated, importance, advantages, returns, gamma, gamma_lam, T, N,
    VTRACE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    env = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = env < N
    next_value = tl.load(values + T * N + env, mask=inside, other=0.0)
    advantage = tl.zeros((BLOCK,), tl.float32)
    for i in range(T):
        offs = (T - 1 - i) * N + env
        value = tl.load(values + offs, mask=inside, other=0.0)
        is_terminated = tl.load(terminated + offs, mask=inside, other=0) != 0
        is_truncated = tl.load(truncated + offs, mask=inside, other=0) != 0
        next_value = tl.where(is_truncated, tl.load(bootstrap + offs, mask=inside, other=0.0), next_value)
        next_value = tl.where(is_terminated, 0.0, next_value)
        delta = tl.load(rewards + offs, mask=inside, other=0.0) + gamma * next_value - value
        advantage = delta + tl.where(is_terminated | is_truncated, 0.0, gamma_lam * advantage)
        tl.store(advantages + offs, advantage, mask=inside)
        tl.store(returns + offs, advantage + value, mask=inside)
        next_value = value
        if VTRACE:
            advantage *= tl.minimum(tl.load(importance + offs, mask=inside, other=0.0), 1.0)


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
    """Same as `buffers.advantages.gae`."""
    steps, n_envs = rewards.shape
    advantages, returns = torch.empty_like(rewards), torch.empty_like(rewards)
    flags = (terminated.view(torch.uint8), truncated.view(torch.uint8))
    vtrace = importance is not None
    blocks = triton.cdiv(n_envs, _BLOCK_ENVS)
    _scan[(blocks,)](
        rewards, values, bootstrap, *flags, importance if vtrace else rewards, advantages, returns,
        gamma, gamma * lam, steps, n_envs, vtrace, _BLOCK_ENVS, num_warps=2,
    )  # fmt: skip
    return advantages, returns
