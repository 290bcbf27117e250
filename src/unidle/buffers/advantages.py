"""Advantages and returns: generalised advantage estimation, V-trace, and discounted sums."""

from __future__ import annotations

import torch
from torch import Tensor


def reverse_scan(decay: Tensor, value: Tensor) -> Tensor:
    """y[t] = value[t] + decay[t] · y[t + 1] along dimension 0, with y = 0 past the end.

    By doubling: after k rounds every y[t] has 2^k terms, so 2,048 steps take 11 rounds instead of 2,048.
    """
    y, decay = value.clone(), decay.clone()
    shift, length = 1, len(value)
    while shift < length:
        # Both right-hand sides are computed before they are stored, so every round reads the previous round's values.
        y[:-shift] = y[:-shift] + decay[:-shift] * y[shift:]
        decay[:-shift] = decay[:-shift] * decay[shift:]
        shift *= 2
    return y


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
    """Generalised advantages (GAE, Schulman et al. 2016, eq. 16) and the value targets A + V.

    values [T + 1, N] are V(obs); bootstrap [T, N] is V(final observation) where an episode was truncated. The value
    after termination is 0; a truncated episode bootstraps from its true final observation.

    importance [T, N] are the ratios π(a)/μ(a) of the current policy and the one that acted. Where a ratio is below 1,
    its step and the following ones count less in the advantages of earlier actions (V-trace, Espeholt et al. 2018,
    section 4.1; but the targets A + V are not weighted by the ratio of the step's own action).
    """
    ended = terminated | truncated
    next_values = torch.where(truncated, bootstrap, values[1:]).masked_fill(terminated, 0.0)
    delta = rewards + gamma * next_values - values[:-1]
    decay = gamma * lam * (~ended).to(delta.dtype)
    if importance is not None:
        decay[:-1] *= importance[1:].clamp(max=1.0)
    advantages = reverse_scan(decay, delta)
    return advantages, advantages + values[:-1]


def discounted_returns(rewards: Tensor, ended: Tensor, carry: Tensor, gamma: float) -> tuple[Tensor, Tensor]:
    """Running discounted sums G[t] = r[t] + γ G[t - 1], [T, N], reset at the end of an episode.

    `carry` [N] comes from the previous rollout; returns the sums and the carry for the next one.
    """
    # 1 where step t continues the episode of step t - 1.
    continues = torch.cat([torch.ones_like(ended[:1]), ~ended[:-1]]).to(rewards.dtype)
    first = rewards[0] + gamma * carry
    values = torch.cat([first.unsqueeze(0), rewards[1:]])
    decay = gamma * continues
    sums = reverse_scan(decay.flip(0), values.flip(0)).flip(0)
    return sums, sums[-1] * (~ended[-1]).to(rewards.dtype)
