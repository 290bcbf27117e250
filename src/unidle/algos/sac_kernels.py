"""SAC's faster way on a GPU, compared with the plain one before anything is learned by it."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from unidle.algos.fused_sac import FusedUpdate, suits
from unidle.kernels.dispatch import compare, restored
from unidle.kernels.triton.adam import FusedAdam

if TYPE_CHECKING:
    from unidle.algos.sac import SAC
    from unidle.buffers.replay import Transitions

# Of the policy's gradient: in TF32 another critic may be the lower one of a sample or two.
_POLICY_TOLERANCE = 0.1


def proven_update(algo: SAC, batch: Transitions, noise: Tensor) -> FusedUpdate | None:
    """What learns by kernels, if there are any for this algorithm; a RuntimeError if they are wrong on this batch."""
    if not suits(algo):
        return None
    fused = FusedUpdate(algo)
    plain, ours = (_seen(algo, partial(way, batch, noise)) for way in (algo.learn_plainly, fused.learn))
    names = ("errors", "critics' gradient", "policy's gradient", "temperature's gradient", "losses")
    for name, mine, theirs in zip(names, ours, plain):
        compare(name, mine, theirs, _POLICY_TOLERANCE if name == "policy's gradient" else 0.02)
    for name, step in fused.steps.items():
        _compare_steps(algo, name, step)
    return fused


def _seen(algo: SAC, learn: Callable[[], Tensor]) -> list[Tensor]:
    """What there is to compare after learning at a rate of 0, after which all is as it was.

    At a rate above 0 rounding alone would make the critics that the policy then learns from two different ones.
    """
    with restored([*algo.changes, algo.learning_rate]):
        algo.learning_rate.zero_()
        algo.sums.zero_()
        errors = learn().clone()
        grads = [parameters.grad.clone() for parameters in (algo.critic_parameters, algo.parameters)]
        for grad in grads:
            if math.isfinite(algo.recipe.max_grad_norm):  # the plain way clips in place, before it steps
                grad.mul_((algo.recipe.max_grad_norm / (torch.linalg.vector_norm(grad) + 1e-6)).clamp(max=1.0))
        return [errors, *grads, algo.temperature_grad.clone(), algo.sums.clone()]


def _compare_steps(algo: SAC, name: str, step: FusedAdam) -> None:
    """Adam along the same gradient, which is in place: where that is close to 0, rounding alone turns a step round."""
    adam = algo.adams[name]
    changed = [adam.flat, algo.target_flat, *adam.state_dict().values()]

    def moved(way: Callable[[], None]) -> list[Tensor]:
        with restored([*changed, adam.grad]) as before:
            way()
            return [tensor - value for tensor, value in zip(changed, before)]

    def fused() -> None:
        adam.steps.add_(1.0)
        step.step()

    for mine, theirs in zip(moved(fused), moved(partial(algo.step_plainly, name))):
        compare(f"step of the {name}", mine, theirs, 1e-3)
