"""Gradient clipping, Adam and the soft target update in two kernels: one sums squares, one does the rest.

torch's fused Adam gives each block 65,536 elements of a tensor, so a network of four million parameters leaves half of
a large GPU idle; and the target update reads all parameters again.
"""

from __future__ import annotations

import math
from typing import Protocol

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK, SQUARES_BLOCK = 1024, 8192  # elements per program


class AdamState(Protocol):
    """The tensors and constants of one Adam optimiser (see `nn.optim.adam.FlatAdam`)."""

    flat: Tensor  # [1, parameter]: kernels step one member
    grad: Tensor
    mean: Tensor  # first moment
    square: Tensor  # second moment
    steps: Tensor  # [1]
    learning_rate: Tensor  # [1]
    eps: float
    betas: tuple[float, float]


@triton.jit
def sum_squares(grad, squares, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Sum the squares of each program's block."""
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    gradient = tl.load(grad + offs, mask=offs < SIZE, other=0.0)
    tl.store(squares + tl.program_id(0), tl.sum(gradient * gradient))


@triton.jit
def adam(
    parameter, gradient, mean, square, count, learning_rate,
    LOG_BETA1: tl.constexpr, LOG_BETA2: tl.constexpr, BETA1: tl.constexpr, BETA2: tl.constexpr, EPS: tl.constexpr,
):  # fmt: skip
    """Parameter and moments after step number `count`."""
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
    SIZE: tl.constexpr, BLOCK: tl.constexpr, N_SQUARES: tl.constexpr, SQUARES_P2: tl.constexpr, CLIP: tl.constexpr,
    MAX_NORM: tl.constexpr, KL_STOP: tl.constexpr, UPDATE_TARGETS: tl.constexpr, TAU: tl.constexpr,
    LOG_BETA1: tl.constexpr, LOG_BETA2: tl.constexpr, BETA1: tl.constexpr, BETA2: tl.constexpr, EPS: tl.constexpr,
):  # fmt: skip
    """Clip the gradient and step; with UPDATE_TARGETS also update the targets by TAU.

    With KL_STOP, if `stopped` is 0 the gradient norm is added to `norms`, else nothing changes.
    """
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = offs < SIZE
    gradient = tl.load(grad + offs, mask=inside, other=0.0)
    if CLIP or KL_STOP:
        i = tl.arange(0, SQUARES_P2)
        norm = tl.sqrt(tl.sum(tl.load(squares + i, mask=i < N_SQUARES, other=0.0)))
    if CLIP:
        # Written so that NaN propagates and is noticed.
        gradient *= tl.where(norm + 1e-6 > MAX_NORM, MAX_NORM / (norm + 1e-6), 1.0)
    if KL_STOP:
        stop = tl.load(stopped) > 0
        if tl.program_id(0) == 0:
            tl.store(norms, tl.load(norms) + tl.where(stop, 0.0, norm))
        if stop:
            return
    parameter, mean, square = adam(
        tl.load(parameters + offs, mask=inside, other=0.0),
        gradient,
        tl.load(means + offs, mask=inside, other=0.0),
        tl.load(mean_squares + offs, mask=inside, other=0.0),
        tl.load(steps),
        tl.load(learning_rate),
        LOG_BETA1, LOG_BETA2, BETA1, BETA2, EPS,
    )  # fmt: skip
    tl.store(parameters + offs, parameter, mask=inside)
    tl.store(means + offs, mean, mask=inside)
    tl.store(mean_squares + offs, square, mask=inside)
    if UPDATE_TARGETS:
        target = tl.load(targets + offs, mask=inside, other=0.0)
        tl.store(targets + offs, target + TAU * (parameter - target), mask=inside)


def beta_constants(state: AdamState) -> dict[str, float]:
    """The constants that `adam` needs besides EPS."""
    beta1, beta2 = state.betas
    return {"LOG_BETA1": math.log(beta1), "LOG_BETA2": math.log(beta2), "BETA1": beta1, "BETA2": beta2}


def new_squares(flat: Tensor) -> Tensor:
    """An output buffer for `sum_squares` with blocks of SQUARES_BLOCK."""
    return torch.zeros(triton.cdiv(flat.numel(), SQUARES_BLOCK), device=flat.device)


def take_step(
    state: AdamState,
    squares: Tensor,
    max_norm: float,
    *,
    block: int = _BLOCK,
    targets: Tensor | None = None,
    tau: float = 0.0,
    kl_stop: tuple[Tensor, Tensor] | None = None,
) -> None:
    """Step along the gradient, clipped to `max_norm`; `squares` add up to its squared norm. Does not count the step.

    Each program takes `block` elements. `targets` move by `tau` towards the parameters. `kl_stop` is (a flag: the step
    is skipped unless it is 0; a sum that the gradient norm is added to).
    """
    size, unused = state.flat.numel(), squares
    _step[(triton.cdiv(size, block),)](
        state.flat,
        state.grad,
        state.mean,
        state.square,
        unused if targets is None else targets,
        squares,
        state.steps,
        state.learning_rate,
        *((unused, unused) if kl_stop is None else kl_stop),
        SIZE=size,
        BLOCK=block,
        N_SQUARES=len(squares),
        SQUARES_P2=triton.next_power_of_2(len(squares)),
        CLIP=math.isfinite(max_norm),
        MAX_NORM=max_norm,
        KL_STOP=kl_stop is not None,
        UPDATE_TARGETS=targets is not None,
        TAU=tau,
        EPS=state.eps,
        **beta_constants(state),
        num_warps=4 if block >= _BLOCK else 2,
    )


class FusedAdam:
    """Steps one Adam optimiser's tensors; the caller counts the steps."""

    def __init__(self, state: AdamState, max_norm: float, targets: Tensor | None = None, tau: float = 0.0) -> None:
        """`targets` move by `tau` towards the parameters with every step."""
        self._state, self._max_norm, self._targets, self._tau = state, max_norm, targets, tau
        self._squares = new_squares(state.flat)

    def step(self) -> None:
        """Step along the gradient, clipped on the fly: the gradient itself stays unchanged."""
        state, squares = self._state, self._squares
        if math.isfinite(self._max_norm):
            sum_squares[(len(squares),)](state.grad, squares, SIZE=state.flat.numel(), BLOCK=SQUARES_BLOCK, num_warps=8)
        take_step(state, squares, self._max_norm, targets=self._targets, tau=self._tau)
