"""PPO's step after the gradient in two kernels: clipping, Adam, the metrics' sums and the KL stop."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from unidle.kernels.ppo_types import Coefficients, Counters
from unidle.kernels.triton.adam import SQUARES_BLOCK, AdamState, new_squares, sum_squares, take_step

# A minibatch has five metrics, in the order of `algos.ppo`: policy loss, value loss, entropy, approximate KL (3), clip
# fraction. Triton needs a power of two.
METRICS_P2 = 8


@triton.jit
def count_minibatch(
    means, stopped, steps, minibatches, metric_sums,
    METRICS_P2: tl.constexpr, HAS_MAX_KL: tl.constexpr, MAX_KL: tl.constexpr,
):  # fmt: skip
    """Count a minibatch and add its metrics `means` [METRICS_P2], unless the KL divergence ended the iteration."""
    metric = tl.arange(0, METRICS_P2)
    stop = tl.load(stopped)
    if HAS_MAX_KL:
        stop = tl.maximum(stop, tl.sum(tl.where(metric == 3, means > MAX_KL, 0).to(tl.float32)))
        tl.store(stopped, stop)
    tl.store(steps, tl.load(steps) + 1.0 - stop)
    tl.store(minibatches, tl.load(minibatches) + 1.0 - stop)
    sums = tl.load(metric_sums + metric, mask=metric < 5, other=0.0)
    tl.store(metric_sums + metric, sums + tl.where(stop > 0, 0.0, means), mask=metric < 5)


@triton.jit
def _sum_and_count(
    grad, squares, metrics, stopped, steps, minibatches, metric_sums,
    SIZE: tl.constexpr, BLOCK: tl.constexpr, METRICS_P2: tl.constexpr, HAS_MAX_KL: tl.constexpr, MAX_KL: tl.constexpr,
):  # fmt: skip
    """Sum the squares of each block of the gradient, and count the minibatch."""
    sum_squares(grad, squares, SIZE, BLOCK)
    if tl.program_id(0) == 0:
        metric = tl.arange(0, METRICS_P2)
        means = tl.load(metrics + metric, mask=metric < 5, other=0.0)
        count_minibatch(means, stopped, steps, minibatches, metric_sums, METRICS_P2, HAS_MAX_KL, MAX_KL)


def stop_constants(coefficients: Coefficients) -> dict[str, bool | float]:
    """The constants of `count_minibatch` that depend on the target KL divergence."""
    return {"HAS_MAX_KL": coefficients.max_kl is not None, "MAX_KL": coefficients.max_kl or 0.0}


class FusedStep:
    """Clips, steps and counts as `algos.ppo.PPO.step` does."""

    def __init__(self, adam: AdamState, counters: Counters, coefficients: Coefficients) -> None:
        self._adam, self._counters, self._coefficients = adam, counters, coefficients
        self._squares = new_squares(adam.flat)

    @torch.no_grad()
    def __call__(self, metrics: Tensor) -> None:
        """One step along the gradient, which stays unchanged; `metrics` are the minibatch's first five."""
        adam, counters = self._adam, self._counters
        _sum_and_count[(len(self._squares),)](
            adam.grad,
            self._squares,
            metrics,
            counters.stopped,
            adam.steps,
            counters.minibatches,
            counters.sums,
            SIZE=adam.flat.numel(),
            BLOCK=SQUARES_BLOCK,
            METRICS_P2=METRICS_P2,
            **stop_constants(self._coefficients),
            num_warps=8,
        )
        kl_stop = counters.stopped, counters.sums[:, 5:]
        take_step(adam, self._squares, self._coefficients.max_grad_norm, kl_stop=kl_stop)
