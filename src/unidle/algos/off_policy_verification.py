"""Batches that reach every branch of the losses of off-policy algorithms, to verify their kernels with.

A run's first batch may have no terminated episode, equal weights, and values within all limits.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from unidle.algos.sac import SAC
from unidle.buffers.replay import Transitions
from unidle.kernels.dispatch import restored

_LIMITS = 2.0  # standard deviation of the values that `spread_values` sets, in units of their limit


def proof_batch(batch: Transitions, near: Tensor | float, distance: float) -> Transitions:
    """`batch` with different weights, some 0; every second transition is terminal.

    The returns of terminal transitions, which are their targets, are `near` plus or minus half or twice `distance`.
    """
    row = torch.arange(len(batch), device=batch.returns.device)
    steps = batch.returns.new_tensor([-2.0, -0.5, 0.5, 2.0])[row // 2 % 4]
    return dataclasses.replace(
        batch,
        weights=batch.valid * (0.5 + 0.25 * (row % 5)) * (row % 7 > 0),
        discounts=torch.where(row % 2 == 0, 0.0, batch.discounts),
        returns=torch.where(row % 2 == 0, near + distance * steps, batch.returns),
    )


def sac_proof_batch(sac: SAC, batch: Transitions) -> Transitions:
    """Targets on both sides of the value limit and inside it."""
    return proof_batch(batch, 0.0, sac.recipe.value_limit or 1.0)


@contextmanager
def spread_values(sac: SAC, batch: Transitions, lowest: int | None = None) -> Iterator[None]:
    """Scales the critics' output layers so that values lie on both sides of the value limit; restores them.

    The critic `lowest`, and its target, has the minimum for every transition by far, so that rounding does not decide
    whose gradient the actor follows.
    """
    ensembles = sac.critics.ensemble, sac.targets.ensemble
    with restored([sac.critic_parameters.flat.detach(), sac.target_flat]):
        with torch.no_grad():
            values = sac.critics(batch.obs, batch.actions)
            limit = sac.recipe.value_limit
            scale = 1.0 if limit is None else float(_LIMITS * limit / values.std())
            gap = 4 * scale * float(values.max() - values.min())
            for ensemble in ensembles:
                ensemble.weights[-1].data.mul_(scale)
                ensemble.biases[-1].data.mul_(scale)
                if lowest is not None and len(values) > 1:
                    ensemble.biases[-1].data[lowest].sub_(gap)
        yield
