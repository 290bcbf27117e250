"""What follows a gradient of PPO, in two kernels (Triton): clipping, Adam, what is logged, and where to stop."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from unidle.algos.fused_adam import BETAS, adam, squared

if TYPE_CHECKING:
    from unidle.algos.ppo import PPO

_BLOCK, _SQUARED = 1024, 8192  # numbers that a program takes
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
    squared(grad, squares, SIZE, BLOCK)
    if tl.program_id(0) == 0:
        figure = tl.arange(0, FIGURES)
        means = tl.load(logged + figure, mask=figure < 5, other=0.0)
        count_minibatch(means, stopped, steps, minibatches, totals, FIGURES, STOPS, MOST_KL)


@triton.jit
def _step(
    parameters, grad, mean, square, squares, stopped, steps, totals, learning_rate,
    SIZE: tl.constexpr, BLOCK: tl.constexpr, SQUARES: tl.constexpr, SQUARES_UP: tl.constexpr,
    MAX_NORM: tl.constexpr, LOG_BETA1: tl.constexpr, LOG_BETA2: tl.constexpr, BETA1: tl.constexpr,
    BETA2: tl.constexpr, EPS: tl.constexpr,
):  # fmt: skip
    """Clip the gradient to MAX_NORM and take a step of Adam along it, unless `stopped`."""
    part = tl.arange(0, SQUARES_UP)
    norm = tl.sqrt(tl.sum(tl.load(squares + part, mask=part < SQUARES, other=0.0)))
    stop = tl.load(stopped) > 0
    if tl.program_id(0) == 0:
        tl.store(totals + 5, tl.load(totals + 5) + tl.where(stop, 0.0, norm))
    if stop:
        return
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < SIZE
    # Written so that what is not a number stays in, to be seen.
    gradient = tl.load(grad + at, mask=inside, other=0.0)
    gradient *= tl.where(norm + 1e-6 > MAX_NORM, MAX_NORM / (norm + 1e-6), 1.0)
    parameter, m, v = adam(
        tl.load(parameters + at, mask=inside, other=0.0),
        gradient,
        tl.load(mean + at, mask=inside, other=0.0),
        tl.load(square + at, mask=inside, other=0.0),
        tl.load(steps),
        tl.load(learning_rate),
        LOG_BETA1, LOG_BETA2, BETA1, BETA2, EPS,
    )  # fmt: skip
    tl.store(mean + at, m, mask=inside)
    tl.store(square + at, v, mask=inside)
    tl.store(parameters + at, parameter, mask=inside)


def take_step(algo: PPO, squares: Tensor, block: int) -> None:
    """Step along the gradient in place, whose squares are added up in `squares`; a program takes `block` numbers."""
    flat, adam = algo.parameters.flat, algo.adam
    _step[(triton.cdiv(flat.numel(), block),)](
        flat,
        algo.parameters.grad,
        adam.mean,
        adam.square,
        squares,
        algo.stopped,
        adam.steps,
        algo.sums,
        algo.learning_rate,
        SIZE=flat.numel(),
        BLOCK=block,
        SQUARES=len(squares),
        SQUARES_UP=triton.next_power_of_2(len(squares)),
        MAX_NORM=algo.recipe.max_grad_norm,
        EPS=adam.eps,
        **BETAS,
        num_warps=2 if block < _BLOCK else 4,
    )


class FusedStep:
    """Does what `PPO.step_along` does."""

    def __init__(self, algo: PPO) -> None:
        self._algo = algo
        flat = algo.parameters.flat
        self._squares = torch.zeros(triton.cdiv(flat.numel(), _SQUARED), device=flat.device)

    @torch.no_grad()
    def __call__(self, logged: Tensor) -> None:
        """One step along the gradient in place, which stays as it is; `logged` are the first five of what is logged."""
        algo, target_kl = self._algo, self._algo.recipe.target_kl
        _measure[(len(self._squares),)](
            algo.parameters.grad,
            self._squares,
            logged,
            algo.stopped,
            algo.adam.steps,
            algo.minibatches,
            algo.sums,
            SIZE=algo.parameters.flat.numel(),
            BLOCK=_SQUARED,
            FIGURES=FIGURES,
            STOPS=target_kl is not None,
            MOST_KL=1.5 * (target_kl or 0.0),
            num_warps=8,
        )
        take_step(algo, self._squares, _BLOCK)
