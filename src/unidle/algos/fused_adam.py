"""Clipping, Adam and the targets that follow, in two kernels (Triton): one to measure the gradient, one for the rest.

torch's fused Adam gives every 65,536 numbers of one tensor to one block, so that on a network of four million half of a
large GPU is idle; and the parameters go through memory once more for their targets.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from unidle.nn.optim.adam import BETA1, BETA2, FlatAdam

_BLOCK, SQUARED = 1024, 8192  # numbers that a program takes


@triton.jit
def sum_squares(grad, squares, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Add up the squares of each program's block."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    gradient = tl.load(grad + at, mask=at < SIZE, other=0.0)
    tl.store(squares + tl.program_id(0), tl.sum(gradient * gradient))


@triton.jit
def adam(
    parameter, gradient, mean, square, count, learning_rate,
    LOG_BETA1: tl.constexpr, LOG_BETA2: tl.constexpr, BETA1: tl.constexpr, BETA2: tl.constexpr, EPS: tl.constexpr,
):  # fmt: skip
    """Give parameter, mean and mean square after the `count`-th step."""
    mean += (1.0 - BETA1) * (gradient - mean)
    square = BETA2 * square + (1.0 - BETA2) * gradient * gradient
    count = count.to(tl.float64)  # 1 − β² loses its digits in single precision
    correction1 = (1.0 - tl.exp(count * LOG_BETA1)).to(tl.float32)
    correction2 = (1.0 - tl.exp(count * LOG_BETA2)).to(tl.float32)
    change = learning_rate / correction1 * mean / (tl.sqrt(square) / tl.sqrt(correction2) + EPS)
    return parameter - change, mean, square


@triton.jit
def _step(
    parameters, grad, means, mean_squares, targets, squares, steps, learning_rate, stopped, norms,
    SIZE: tl.constexpr, BLOCK: tl.constexpr, SQUARES: tl.constexpr, SQUARES_UP: tl.constexpr, CLIP: tl.constexpr,
    MAX_NORM: tl.constexpr, STOPS: tl.constexpr, FOLLOW: tl.constexpr, TAU: tl.constexpr,
    LOG_BETA1: tl.constexpr, LOG_BETA2: tl.constexpr, BETA1: tl.constexpr, BETA2: tl.constexpr, EPS: tl.constexpr,
):  # fmt: skip
    """Step along the clipped gradient; with FOLLOW the targets move by TAU of the way.

    With STOPS its length is added to `norms`, and nothing happens where `stopped`.
    """
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < SIZE
    gradient = tl.load(grad + at, mask=inside, other=0.0)
    if CLIP or STOPS:
        part = tl.arange(0, SQUARES_UP)
        norm = tl.sqrt(tl.sum(tl.load(squares + part, mask=part < SQUARES, other=0.0)))
    if CLIP:
        # Written so that what is not a number stays in, to be seen.
        gradient *= tl.where(norm + 1e-6 > MAX_NORM, MAX_NORM / (norm + 1e-6), 1.0)
    if STOPS:
        stop = tl.load(stopped) > 0
        if tl.program_id(0) == 0:
            tl.store(norms, tl.load(norms) + tl.where(stop, 0.0, norm))
        if stop:
            return
    parameter, mean, square = adam(
        tl.load(parameters + at, mask=inside, other=0.0),
        gradient,
        tl.load(means + at, mask=inside, other=0.0),
        tl.load(mean_squares + at, mask=inside, other=0.0),
        tl.load(steps),
        tl.load(learning_rate),
        LOG_BETA1, LOG_BETA2, BETA1, BETA2, EPS,
    )  # fmt: skip
    tl.store(parameters + at, parameter, mask=inside)
    tl.store(means + at, mean, mask=inside)
    tl.store(mean_squares + at, square, mask=inside)
    if FOLLOW:
        target = tl.load(targets + at, mask=inside, other=0.0)
        tl.store(targets + at, target + TAU * (parameter - target), mask=inside)


BETAS = {"LOG_BETA1": math.log(BETA1), "LOG_BETA2": math.log(BETA2), "BETA1": BETA1, "BETA2": BETA2}


def room_for_squares(flat: Tensor) -> Tensor:
    """For what `sum_squares` gives of a gradient by these parameters, in blocks of SQUARED."""
    return torch.zeros(triton.cdiv(flat.numel(), SQUARED), device=flat.device)


def take_step(
    plain: FlatAdam,
    squares: Tensor,
    max_norm: float,
    *,
    block: int = _BLOCK,
    targets: Tensor | None = None,
    tau: float = 0.0,
    stops: tuple[Tensor, Tensor] | None = None,
) -> None:
    """Step as `plain` does, but for counting, along its gradient clipped to `max_norm`; `squares` add up to its square.

    A program takes `block` numbers. `targets` move by `tau` of the way towards the parameters. `stops` are what is 0
    unless nothing is to happen, and the sum of lengths that the gradient's is added to.
    """
    size, nothing = plain.flat.numel(), squares
    _step[(triton.cdiv(size, block),)](
        plain.flat,
        plain.grad,
        plain.mean,
        plain.square,
        nothing if targets is None else targets,
        squares,
        plain.steps,
        plain.learning_rate,
        *((nothing, nothing) if stops is None else stops),
        SIZE=size,
        BLOCK=block,
        SQUARES=len(squares),
        SQUARES_UP=triton.next_power_of_2(len(squares)),
        CLIP=math.isfinite(max_norm),
        MAX_NORM=max_norm,
        STOPS=stops is not None,
        FOLLOW=targets is not None,
        TAU=tau,
        EPS=plain.eps,
        **BETAS,
        num_warps=4 if block >= _BLOCK else 2,
    )


class FusedAdam:
    """Does what `FlatAdam` does, on its tensors, except to count the step: that is up to whoever calls."""

    def __init__(self, plain: FlatAdam, max_norm: float, targets: Tensor | None = None, tau: float = 0.0) -> None:
        """`targets` move by `tau` of the way towards the parameters with every step."""
        self._plain, self._max_norm, self._targets, self._tau = plain, max_norm, targets, tau
        self._squares = room_for_squares(plain.flat)

    def step(self) -> None:
        """One step along the gradient, which is clipped on the way and stays as it is."""
        plain, squares = self._plain, self._squares
        if math.isfinite(self._max_norm):
            sum_squares[(len(squares),)](plain.grad, squares, SIZE=plain.flat.numel(), BLOCK=SQUARED, num_warps=8)
        take_step(plain, squares, self._max_norm, targets=self._targets, tau=self._tau)
