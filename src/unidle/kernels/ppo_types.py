"""Inputs of PPO's kernels: tensors and plain numbers from `algos.ppo.PPO` and its batches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


class Batch(Protocol):
    """A rollout cut into S sequences of L steps (see `algos.ppo.Batch`)."""

    obs: Tensor  # [S, L, obs_bytes]
    actions: Tensor  # [S, L, width]
    log_probs: Tensor  # [S, L]
    values: Tensor  # [S, L]
    advantages: Tensor  # [S, L]
    returns: Tensor  # [S, L]
    weights: Tensor | None  # [S, L]


@dataclass(frozen=True)
class Counters:
    """Device-side totals over the minibatches of an iteration."""

    sums: Tensor  # [member, 6] policy loss, value loss, entropy, KL, clip fraction, gradient norm
    minibatches: Tensor  # [member]
    stopped: Tensor  # [member] 1 once the KL divergence has exceeded `max_kl`

    @staticmethod
    def zeros(members: int, n_metrics: int, device: torch.device) -> Counters:
        """Counters for `members`, all 0."""
        zero = torch.zeros(members, device=device)
        return Counters(torch.zeros(members, n_metrics, device=device), zero, zero.clone())

    def zero_(self) -> None:
        """Reset all counters at the start of an iteration."""
        for counter in (self.sums, self.minibatches, self.stopped):
            counter.zero_()


@dataclass(frozen=True)
class Coefficients:
    """The constants of PPO's loss and step that are compiled into kernels; of one member."""

    ent_coef: float
    vf_coef: float
    clip_range_vf: float | None
    normalize_advantage: bool
    advantage_eps: float  # added to the standard deviation of the advantages
    max_grad_norm: float
    max_kl: float | None  # a minibatch that exceeds it ends the iteration
