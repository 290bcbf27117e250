"""PPO's loss of a minibatch and its gradient with respect to the network's outputs, in three kernels.

Through autograd the loss is about a hundred kernels that take longer to launch than to run. Here one normalises a
minibatch's advantages, one reads everything else in place, without gathering it first, and one reduces; the backward
pass is one product each. The network itself, whatever it is, stays with autograd.

The formulas are those of `algos.ppo`, differentiated by hand.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from unidle.kernels.ppo_types import Batch, Coefficients
from unidle.kernels.triton.ppo_step import FIGURES
from unidle.kernels.triton.small_mlp import distribution

_MAX_OUTPUTS, _MAX_HEADS = 128, 8
_OUTPUTS_AT_ONCE, _ADVANTAGES_AT_ONCE = 2048, 16384  # per program
_PROPAGATE_NAN: tl.constexpr = tl.constexpr(tl.PropagateNan.ALL)


@triton.jit
def policy_terms(
    log_prob, log_probs, advantages, weights, advantage_norm, clip_range, i, inside,
    SHARE: tl.constexpr, WEIGHTED: tl.constexpr,
):  # fmt: skip
    """Gradient of the policy loss with respect to the log-probabilities of samples i; sums of loss, KL and clipped.

    SHARE is one sample's weight in the minibatch's mean.
    """
    advantage = tl.load(advantages + i, mask=inside, other=0.0)
    advantage = (advantage - tl.load(advantage_norm)) * tl.load(advantage_norm + 1)
    log_ratio = log_prob - tl.load(log_probs + i, mask=inside, other=0.0)
    log_ratio = tl.where(inside, log_ratio, 0.0)
    ratio = tl.exp(log_ratio)
    clip = tl.load(clip_range)
    clipped = tl.minimum(tl.maximum(ratio, 1.0 - clip, _PROPAGATE_NAN), 1.0 + clip, _PROPAGATE_NAN)
    weight = tl.load(weights + i, mask=inside, other=0.0) if WEIGHTED else inside.to(tl.float32)
    kept = ~(ratio * advantage > clipped * advantage)  # written so that NaN propagates
    by_log_prob = tl.where(kept, -weight * advantage * ratio, 0.0) * SHARE
    surrogate = tl.minimum(ratio * advantage, clipped * advantage, _PROPAGATE_NAN)
    return (
        tl.where(inside, by_log_prob, 0.0),
        tl.sum(tl.where(inside, -weight * surrogate, 0.0)),
        tl.sum(ratio - 1.0 - log_ratio),
        tl.sum((tl.abs(ratio - 1.0) > clip).to(tl.float32)),
    )


@triton.jit
def value_terms(
    value, values, returns, i, inside, SHARE: tl.constexpr, CLIP_VALUES: tl.constexpr, VALUE_RANGE: tl.constexpr
):
    """Gradient of the value loss with respect to the values of samples i, and the sum of that loss."""
    target = tl.load(returns + i, mask=inside, other=0.0)
    error = value - target
    slope = inside
    if CLIP_VALUES:
        old = tl.load(values + i, mask=inside, other=0.0)
        moved = tl.minimum(tl.maximum(value - old, -VALUE_RANGE, _PROPAGATE_NAN), VALUE_RANGE, _PROPAGATE_NAN)
        slope = inside & (tl.abs(value - old) <= VALUE_RANGE)
        error = old + moved - target
    error = tl.where(inside, error, 0.0)
    return tl.where(slope, 2.0 * SHARE * error, 0.0), tl.sum(error * error)


@triton.jit
def _normalise(
    advantages, order, norm,
    SAMPLES: tl.constexpr, LENGTH: tl.constexpr, BLOCK: tl.constexpr, ADVANTAGE_EPS: tl.constexpr,
):  # fmt: skip
    """Mean of a minibatch's advantages, and the inverse of their standard deviation."""
    total = tl.zeros((BLOCK,), tl.float32)
    for begin in range(0, SAMPLES, BLOCK):
        sample = begin + tl.arange(0, BLOCK)
        i = tl.load(order + sample // LENGTH, mask=sample < SAMPLES, other=0) * LENGTH + sample % LENGTH
        total += tl.load(advantages + i, mask=sample < SAMPLES, other=0.0)
    mean = tl.sum(total) / SAMPLES
    total = tl.zeros((BLOCK,), tl.float32)
    for begin in range(0, SAMPLES, BLOCK):
        sample = begin + tl.arange(0, BLOCK)
        i = tl.load(order + sample // LENGTH, mask=sample < SAMPLES, other=0) * LENGTH + sample % LENGTH
        difference = tl.load(advantages + i, mask=sample < SAMPLES, other=0.0) - mean
        total += tl.where(sample < SAMPLES, difference * difference, 0.0)
    deviation = tl.sqrt(tl.sum(total) / (SAMPLES - 1))
    tl.store(norm, mean)
    tl.store(norm + 1, 1.0 / (deviation + ADVANTAGE_EPS))


@triton.jit
def _slopes(
    logits, mean, log_std, value,  # network outputs: [SAMPLES, LOGITS], [SAMPLES, REALS], [REALS], [SAMPLES]
    actions, log_probs, values, advantages, returns, weights,  # of the whole rollout
    order,  # int64: the minibatch's sequences
    advantage_norm, clip_range,
    by_logits, by_mean, by_value,  # the same shapes
    spreads,  # [programs, OUTS_UP]: each program's part of the gradient with respect to log_std
    sums,  # [programs, FIGURES]: policy loss, value loss, entropy, KL, clipped
    LOGITS_ROW: tl.constexpr, REALS_ROW: tl.constexpr,  # strides
    SAMPLES: tl.constexpr, LENGTH: tl.constexpr, HEADS: tl.constexpr, STARTS: tl.constexpr, REALS: tl.constexpr,
    LOGITS: tl.constexpr, OUTS_UP: tl.constexpr, WEIGHTED: tl.constexpr, CLIP_VALUES: tl.constexpr,
    VALUE_RANGE: tl.constexpr, ENTROPY: tl.constexpr, VALUE: tl.constexpr, BM: tl.constexpr, FIGURES: tl.constexpr,
):  # fmt: skip
    """Compute the gradient of the loss, and each program's sums of its terms."""
    block = tl.program_id(0)
    sample = block * BM + tl.arange(0, BM)
    inside = sample < SAMPLES
    share: tl.constexpr = 1.0 / SAMPLES
    i = tl.load(order + sample // LENGTH, mask=inside, other=0) * LENGTH + sample % LENGTH
    column = tl.arange(0, OUTS_UP)[None, :]
    real = column - LOGITS
    is_logit = inside[:, None] & (column < LOGITS)
    is_real = inside[:, None] & (real >= 0) & (real < REALS)
    y = tl.load(logits + sample[:, None] * LOGITS_ROW + column, mask=is_logit, other=0.0)
    y += tl.load(mean + sample[:, None] * REALS_ROW + real, mask=is_real, other=0.0)
    log_prob, entropy, by_y, entropy_by_y, log_prob_by_log_std = distribution(
        y, actions, actions, log_std, i, inside, 0, HEADS, STARTS, REALS, LOGITS, OUTS_UP, False
    )
    by_log_prob, loss, divergence, clipped = policy_terms(
        log_prob, log_probs, advantages, weights, advantage_norm, clip_range, i, inside, share, WEIGHTED
    )
    by_entropy = tl.where(inside, -ENTROPY * share, 0.0)
    dy = by_log_prob[:, None] * by_y + by_entropy[:, None] * entropy_by_y
    tl.store(by_logits + sample[:, None] * LOGITS + column, dy, mask=is_logit)
    tl.store(by_mean + sample[:, None] * REALS + real, dy, mask=is_real)
    if REALS:
        by_log_std = tl.sum(by_log_prob[:, None] * log_prob_by_log_std + by_entropy[:, None], 0)
        tl.store(spreads + block * OUTS_UP + tl.arange(0, OUTS_UP), by_log_std)
    given = tl.load(value + sample, mask=inside, other=0.0)
    slope, error = value_terms(given, values, returns, i, inside, VALUE * share, CLIP_VALUES, VALUE_RANGE)
    tl.store(by_value + sample, slope, mask=inside)
    tl.store(sums + block * FIGURES, loss)
    tl.store(sums + block * FIGURES + 1, error)
    tl.store(sums + block * FIGURES + 2, tl.sum(tl.where(inside, entropy, 0.0)))
    tl.store(sums + block * FIGURES + 3, divergence)
    tl.store(sums + block * FIGURES + 4, clipped)


@triton.jit
def _reduce(
    sums, spreads, loss, means, by_log_std,
    SAMPLES: tl.constexpr, BLOCKS: tl.constexpr, REALS: tl.constexpr, LOGITS: tl.constexpr, OUTS_UP: tl.constexpr,
    ENTROPY: tl.constexpr, VALUE: tl.constexpr, AT_ONCE: tl.constexpr, FIGURES: tl.constexpr,
):  # fmt: skip
    """Reduce the programs' partial sums, in order."""
    figure, column = tl.arange(0, FIGURES), tl.arange(0, OUTS_UP)
    total, spread = tl.zeros((FIGURES,), tl.float32), tl.zeros((OUTS_UP,), tl.float32)
    for begin in range(0, BLOCKS, AT_ONCE):
        block = begin + tl.arange(0, AT_ONCE)[:, None]
        here = (block < BLOCKS) & (figure < 5)[None, :]
        total += tl.sum(tl.load(sums + block * FIGURES + figure[None, :], mask=here, other=0.0), 0)
        if REALS:
            spread += tl.sum(tl.load(spreads + block * OUTS_UP + column[None, :], mask=block < BLOCKS, other=0.0), 0)
    total = total / SAMPLES
    tl.store(means + figure, total, mask=figure < 5)
    # A term with coefficient 0 may be infinite.
    terms = tl.where(figure == 0, total, 0.0) + tl.where(figure == 1, VALUE * total, 0.0)
    if ENTROPY != 0.0:
        terms -= tl.where(figure == 2, ENTROPY * total, 0.0)
    tl.store(loss, tl.sum(terms))
    if REALS:
        tl.store(by_log_std + column - LOGITS, spread, mask=(column >= LOGITS) & (column < LOGITS + REALS))


class _Loss(torch.autograd.Function):
    """Network outputs → the loss, and the minibatch's metrics [5]."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, mean: Tensor, log_std: Tensor, value: Tensor, kernels: FusedLoss, *more: Any
    ) -> tuple[Tensor, Tensor]:
        loss, metrics, *gradients = kernels.launch(logits, mean, log_std, value, *more)
        ctx.save_for_backward(*gradients)
        ctx.mark_non_differentiable(metrics)
        return loss, metrics

    @staticmethod
    def backward(ctx: Any, by_loss: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        return (*(by_loss * gradient for gradient in ctx.saved_tensors), *(None,) * 4)


def unsupported(nvec: tuple[int, ...], reals: int) -> str | None:
    """Why the kernel does not support such actions; None if it does."""
    if sum(nvec) + reals > _MAX_OUTPUTS or len(nvec) > _MAX_HEADS:
        return f"kernels take up to {_MAX_OUTPUTS} outputs and {_MAX_HEADS} discrete actions"
    return None


class FusedLoss:
    """The loss of sequences of `length` steps of a batch, for actions of categories `nvec` and `reals` Gaussians."""

    def __init__(
        self, nvec: tuple[int, ...], reals: int, length: int, clip_range: Tensor, coefficients: Coefficients
    ) -> None:
        device = clip_range.device
        self._length, self._clip_range, self._coefficients = length, clip_range, coefficients
        self._unused, self._identity = torch.zeros(1, device=device), torch.tensor([0.0, 1.0], device=device)
        outs_up = max(16, triton.next_power_of_2(sum(nvec) + reals))
        self._samples = max(16, min(64, _OUTPUTS_AT_ONCE // outs_up))  # per program
        self._sizes = {
            "REALS": reals,
            "LOGITS": sum(nvec),
            "OUTS_UP": outs_up,
            "ENTROPY": coefficients.ent_coef,
            "VALUE": coefficients.vf_coef,
            "FIGURES": FIGURES,
        }
        self._constants = {
            **self._sizes,
            "LENGTH": length,
            "HEADS": nvec,
            "STARTS": tuple(sum(nvec[:head]) for head in range(len(nvec))),
            "CLIP_VALUES": coefficients.clip_range_vf is not None,
            "VALUE_RANGE": coefficients.clip_range_vf or 0.0,
            "BM": self._samples,
        }

    def __call__(
        self, outputs: tuple[Tensor, Tensor, Tensor, Tensor], batch: Batch, part: Tensor, whole: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The loss of the sequences `part`, and metrics; advantages are normalised over the sequences `whole`.

        `outputs` are the network's for `part`: logits, means, log_std and values.
        """
        loss, metrics = _Loss.apply(*outputs, self, batch, part, self.advantage_norm(batch, whole))
        return loss, metrics

    def advantage_norm(self, batch: Batch, order: Tensor) -> Tensor:
        """Mean and inverse standard deviation of these sequences' advantages; 0 and 1 if they are not normalised."""
        if not self._coefficients.normalize_advantage:
            return self._identity
        norm, length = torch.empty_like(self._identity), self._length
        samples = len(order) * length
        block = min(_ADVANTAGES_AT_ONCE, triton.next_power_of_2(samples))
        _normalise[(1,)](
            batch.advantages, order, norm, SAMPLES=samples, LENGTH=length, BLOCK=block,
            ADVANTAGE_EPS=self._coefficients.advantage_eps, num_warps=max(4, min(32, block // 512)),
        )  # fmt: skip
        return norm

    def launch(
        self, logits: Tensor, mean: Tensor, log_std: Tensor, value: Tensor, batch: Batch, order: Tensor, norm: Tensor
    ) -> list[Tensor]:
        """Loss, metrics, and the gradients with respect to the network's outputs."""
        fields = batch.actions, batch.log_probs, batch.values, batch.advantages, batch.returns
        assert all(tensor.is_contiguous() for tensor in (value, *fields))
        samples = value.numel()
        blocks = triton.cdiv(samples, self._samples)
        gradients = [torch.empty(given.shape, device=given.device) for given in (logits, mean, log_std, value)]
        sums, spreads = value.new_empty(blocks, FIGURES), value.new_empty(blocks, self._sizes["OUTS_UP"])
        loss, metrics = value.new_empty(()), value.new_empty(5)
        by_logits, by_mean, by_log_std, by_value = gradients
        _slopes[(blocks,)](
            logits, mean, log_std, value, *fields,
            self._unused if batch.weights is None else batch.weights,
            order, norm, self._clip_range, by_logits, by_mean, by_value, spreads, sums,
            LOGITS_ROW=logits.stride(-2), REALS_ROW=mean.stride(-2), SAMPLES=samples,
            WEIGHTED=batch.weights is not None, **self._constants,
        )  # fmt: skip
        at_once = min(triton.next_power_of_2(blocks), 4096 // self._sizes["OUTS_UP"])
        totals = {"SAMPLES": samples, "BLOCKS": blocks, "AT_ONCE": at_once}
        _reduce[(1,)](sums, spreads, loss, metrics, by_log_std, **totals, **self._sizes)
        return [loss, metrics, *gradients]
