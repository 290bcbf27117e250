"""What follows a gradient of PPO, in two kernels (Triton): clipping, Adam, what is logged, and where to stop."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from unidle.kernels.triton.adam import SQUARES_BLOCK, new_squares, sum_squares, take_step

if TYPE_CHECKING:
    from unidle.algos.ppo import PPO

FIGURES = 8  # places for the five that are logged of a minibatch: a power of two


@triton.jit
def count_minibatch(
    means, stopped, steps, minibatches, totals, FIGURES: tl.constexpr, STOPS: tl.constexpr, MOST_KL: tl.constexpr
):
    """Count a minibatch and what is logged of it, `means` [FIGURES], unless the policy has moved too far by now."""
    figure = tl.arange(0, FIGURES)
    stop = tl.load(stopped)
    if STOPS:
        stop = tl.maximum(stop, tl.sum(tl.where(figure == 3, means > MOST_KL, 0).to(tl.float32)))
        tl.store(stopped, stop)
    tl.store(steps, tl.load(steps) + 1.0 - stop)
    tl.store(minibatches, tl.load(minibatches) + 1.0 - stop)
    before = tl.load(totals + figure, mask=figure < 5, other=0.0)
    tl.store(totals + figure, before + tl.where(stop > 0, 0.0, means), mask=figure < 5)


@triton.jit
def _measure(
    grad, squares, logged, stopped, steps, minibatches, totals,
    SIZE: tl.constexpr, BLOCK: tl.constexpr, FIGURES: tl.constexpr, STOPS: tl.constexpr, MOST_KL: tl.constexpr,
):  # fmt: skip
    """Add up the squares of each block of the gradient, and count the minibatch."""
    sum_squares(grad, squares, SIZE, BLOCK)
    if tl.program_id(0) == 0:
        figure = tl.arange(0, FIGURES)
        means = tl.load(logged + figure, mask=figure < 5, other=0.0)
        count_minibatch(means, stopped, steps, minibatches, totals, FIGURES, STOPS, MOST_KL)


class FusedStep:
    """Does what `PPO.step_along` does."""

    def __init__(self, algo: PPO) -> None:
        self._algo, self._squares = algo, new_squares(algo.parameters.flat)

    @torch.no_grad()
    def __call__(self, logged: Tensor) -> None:
        """One step along the gradient in place, which stays as it is; `logged` are the first five of what is logged."""
        algo, recipe = self._algo, self._algo.recipe
        _measure[(len(self._squares),)](
            algo.parameters.grad,
            self._squares,
            logged,
            algo.stopped,
            algo.adam.steps,
            algo.minibatches,
            algo.sums,
            SIZE=algo.parameters.flat.numel(),
            BLOCK=SQUARES_BLOCK,
            FIGURES=FIGURES,
            STOPS=recipe.target_kl is not None,
            MOST_KL=1.5 * (recipe.target_kl or 0.0),
            num_warps=8,
        )
        take_step(algo.adam, self._squares, recipe.max_grad_norm, stops=(algo.stopped, algo.sums[5:]))
