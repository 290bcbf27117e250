"""PPO's step after the gradient in two kernels: clipping, Adam, the metrics' sums and the KL stop."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from unidle.kernels.ppo_types import Coefficients, Counters
from unidle.kernels.triton.adam import SQUARES_BLOCK, AdamState, new_squares, sum_squares, take_step

FIGURES = 8  # places for the five metrics of a minibatch: a power of two


@triton.jit
def count_minibatch(
    means, stopped, steps, minibatches, totals, FIGURES: tl.constexpr, STOPS: tl.constexpr, MOST_KL: tl.constexpr
):
    """Count a minibatch and add its metrics `means` [FIGURES], unless the KL divergence ended the iteration."""
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
    """Sum the squares of each block of the gradient, and count the minibatch."""
    sum_squares(grad, squares, SIZE, BLOCK)
    if tl.program_id(0) == 0:
        figure = tl.arange(0, FIGURES)
        means = tl.load(logged + figure, mask=figure < 5, other=0.0)
        count_minibatch(means, stopped, steps, minibatches, totals, FIGURES, STOPS, MOST_KL)


def stop_constants(coefficients: Coefficients) -> dict[str, bool | float]:
    """The constants of `count_minibatch` that depend on the target KL divergence."""
    return {"STOPS": coefficients.max_kl is not None, "MOST_KL": coefficients.max_kl or 0.0}


class FusedStep:
    """Clips, steps and counts as `algos.ppo.PPO.step` does."""

    def __init__(self, adam: AdamState, counters: Counters, coefficients: Coefficients) -> None:
        self._adam, self._counters, self._coefficients = adam, counters, coefficients
        self._squares = new_squares(adam.flat)

    @torch.no_grad()
    def __call__(self, metrics: Tensor) -> None:
        """One step along the gradient, which stays unchanged; `metrics` are the minibatch's first five."""
        adam, counters = self._adam, self._counters
        _measure[(len(self._squares),)](
            adam.grad,
            self._squares,
            metrics,
            counters.stopped,
            adam.steps,
            counters.minibatches,
            counters.sums,
            SIZE=adam.flat.numel(),
            BLOCK=SQUARES_BLOCK,
            FIGURES=FIGURES,
            **stop_constants(self._coefficients),
            num_warps=8,
        )
        stops = counters.stopped, counters.sums[5:]
        take_step(adam, self._squares, self._coefficients.max_grad_norm, stops=stops)
