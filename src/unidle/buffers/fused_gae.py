"""Advantages and returns as one kernel (Triton): each thread goes backwards through one environment's steps."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_LINES = 64  # environments that a block takes


@triton.jit
def _gae(
    rewards, values, bootstrap, terminated, truncated, importance, advantages, returns, gamma, gain, T, N,
    TRACED: tl.constexpr, LINES: tl.constexpr,
):  # fmt: skip
    line = tl.program_id(0) * LINES + tl.arange(0, LINES)
    inside = line < N
    following = tl.load(values + T * N + line, mask=inside, other=0.0)
    advantage = tl.zeros((LINES,), tl.float32)
    for back in range(T):
        at = (T - 1 - back) * N + line
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


def fused_gae(
    rewards: Tensor,
    values: Tensor,
    bootstrap: Tensor,
    terminated: Tensor,
    truncated: Tensor,
    gamma: float,
    lam: float,
    importance: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`rollout.gae`, on a GPU."""
    steps, n_envs = rewards.shape
    advantages, returns = torch.empty_like(rewards), torch.empty_like(rewards)
    flags = (terminated.view(torch.uint8), truncated.view(torch.uint8))
    traced = importance is not None
    blocks = triton.cdiv(n_envs, _LINES)
    _gae[(blocks,)](
        rewards, values, bootstrap, *flags, importance if traced else rewards, advantages, returns,
        gamma, gamma * lam, steps, n_envs, traced, _LINES, num_warps=2,
    )  # fmt: skip
    return advantages, returns
