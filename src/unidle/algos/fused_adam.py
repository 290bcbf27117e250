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

from unidle.nn.adam import BETA1, BETA2, FlatAdam

_BLOCK, _SQUARED = 1024, 8192  # numbers that a program takes


@triton.jit
def squared(grad, squares, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Add up the squares of a program's block."""
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
    parameters, grad, means, mean_squares, targets, squares, steps, learning_rate,
    SIZE: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr, BLOCKS_UP: tl.constexpr, CLIP: tl.constexpr,
    MAX_NORM: tl.constexpr, FOLLOW: tl.constexpr, TAU: tl.constexpr,
    LOG_BETA1: tl.constexpr, LOG_BETA2: tl.constexpr, BETA1: tl.constexpr, BETA2: tl.constexpr, EPS: tl.constexpr,
):  # fmt: skip
    """Step along the clipped gradient; with FOLLOW the targets move by TAU of the way."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < SIZE
    gradient = tl.load(grad + at, mask=inside, other=0.0)
    if CLIP:
        block = tl.arange(0, BLOCKS_UP)
        norm = tl.sqrt(tl.sum(tl.load(squares + block, mask=block < BLOCKS, other=0.0)))
        # Written so that what is not a number stays in, to be seen.
        gradient *= tl.where(norm + 1e-6 > MAX_NORM, MAX_NORM / (norm + 1e-6), 1.0)
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


class FusedAdam:
    """Does what `FlatAdam` does, on its tensors, except to count the step: that is up to whoever calls."""

    def __init__(self, plain: FlatAdam, max_norm: float, targets: Tensor | None = None, tau: float = 0.0) -> None:
        """`targets` move by `tau` of the way towards the parameters with every step."""
        self._plain, self._targets = plain, plain.flat if targets is None else targets
        size = plain.flat.numel()
        blocks = triton.cdiv(size, _SQUARED)
        self._squares = torch.zeros(blocks, device=plain.flat.device)
        self._constants = {
            "SIZE": size,
            "BLOCK": _BLOCK,
            "BLOCKS": blocks,
            "BLOCKS_UP": triton.next_power_of_2(blocks),
            "CLIP": math.isfinite(max_norm),
            "MAX_NORM": max_norm,
            "FOLLOW": targets is not None,
            "TAU": tau,
            "EPS": plain.eps,
            **BETAS,
        }

    def step(self) -> None:
        """One step along the gradient, which is clipped on the way and stays as it is."""
        plain, size = self._plain, self._plain.flat.numel()
        if self._constants["CLIP"]:
            squared[(len(self._squares),)](plain.grad, self._squares, SIZE=size, BLOCK=_SQUARED, num_warps=8)
        _step[(triton.cdiv(size, _BLOCK),)](
            plain.flat,
            plain.grad,
            plain.mean,
            plain.square,
            self._targets,
            self._squares,
            plain.steps,
            plain.learning_rate,
            **self._constants,
        )
