"""PPO's loss of a minibatch and its gradient with respect to the network's outputs, in three kernels.

Through autograd the loss is about a hundred kernels that take longer to launch than to run. Here one kernel normalises
a minibatch's advantages, one computes loss and gradient, reading the samples in place instead of gathering them first,
and one reduces; the backward pass multiplies each gradient by that of the loss. The network itself, whatever it is,
stays with autograd.

The formulas are those of `algos.ppo`, differentiated by hand.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from unidle.kernels.ppo_types import Batch, Coefficients
from unidle.kernels.triton.ppo_step import METRICS_P2
from unidle.kernels.triton.small_mlp import distribution

_MAX_OUTPUTS, _MAX_HEADS = 128, 8
_MAX_OUTPUTS_PER_PROGRAM, _MAX_ADVANTAGES_BLOCK = 2048, 16384
_PROPAGATE_NAN: tl.constexpr = tl.constexpr(tl.PropagateNan.ALL)


@triton.jit
def policy_terms(
    log_prob, log_probs, advantages, weights, advantage_norm, clip_range, i, inside,
    SHARE: tl.constexpr, WEIGHTED: tl.constexpr,
):  # fmt: skip
    """Gradient of the policy loss with respect to the log-probabilities of samples i; sums of loss, KL and clipped.

    SHARE is one sample's weight in the minibatch's mean: 1 / samples.
    """
    advantage = tl.load(advantages + i, mask=inside, other=0.0)
    advantage = (advantage - tl.load(advantage_norm)) * tl.load(advantage_norm + 1)
    log_ratio = log_prob - tl.load(log_probs + i, mask=inside, other=0.0)
    log_ratio = tl.where(inside, log_ratio, 0.0)
    ratio = tl.exp(log_ratio)
    clip = tl.load(clip_range)
    clipped = tl.minimum(tl.maximum(ratio, 1.0 - clip, _PROPAGATE_NAN), 1.0 + clip, _PROPAGATE_NAN)
    weight = tl.load(weights + i, mask=inside, other=0.0) if WEIGHTED else inside.to(tl.float32)
    has_gradient = ~(ratio * advantage > clipped * advantage)  # written so that NaN propagates
    d_log_prob = tl.where(has_gradient, -weight * advantage * ratio, 0.0) * SHARE
    surrogate = tl.minimum(ratio * advantage, clipped * advantage, _PROPAGATE_NAN)
    return (
        tl.where(inside, d_log_prob, 0.0),
        tl.sum(tl.where(inside, -weight * surrogate, 0.0)),
        tl.sum(ratio - 1.0 - log_ratio),
        tl.sum((tl.abs(ratio - 1.0) > clip).to(tl.float32)),
    )


@triton.jit
def value_terms(
    value, values, returns, i, inside, SHARE: tl.constexpr, CLIP_VF: tl.constexpr, CLIP_RANGE_VF: tl.constexpr
):
    """Gradient of the value loss with respect to the values of samples i, and the sum of their squared errors."""
    target = tl.load(returns + i, mask=inside, other=0.0)
    error = value - target
    has_gradient = inside
    if CLIP_VF:
        old = tl.load(values + i, mask=inside, other=0.0)
        change = tl.minimum(tl.maximum(value - old, -CLIP_RANGE_VF, _PROPAGATE_NAN), CLIP_RANGE_VF, _PROPAGATE_NAN)
        has_gradient = inside & (tl.abs(value - old) <= CLIP_RANGE_VF)
        error = old + change - target
    error = tl.where(inside, error, 0.0)
    return tl.where(has_gradient, 2.0 * SHARE * error, 0.0), tl.sum(error * error)


@triton.jit
def _normalise(
    advantages, order, norm,
    SAMPLES: tl.constexpr, LENGTH: tl.constexpr, BLOCK: tl.constexpr, ADVANTAGE_EPS: tl.constexpr,
):  # fmt: skip
    """Mean of a minibatch's advantages, and the inverse of their standard deviation."""
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, SAMPLES, BLOCK):
        sample = start + tl.arange(0, BLOCK)
        i = tl.load(order + sample // LENGTH, mask=sample < SAMPLES, other=0) * LENGTH + sample % LENGTH
        total += tl.load(advantages + i, mask=sample < SAMPLES, other=0.0)
    mean = tl.sum(total) / SAMPLES
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, SAMPLES, BLOCK):
        sample = start + tl.arange(0, BLOCK)
        i = tl.load(order + sample // LENGTH, mask=sample < SAMPLES, other=0) * LENGTH + sample % LENGTH
        difference = tl.load(advantages + i, mask=sample < SAMPLES, other=0.0) - mean
        total += tl.where(sample < SAMPLES, difference * difference, 0.0)
    std = tl.sqrt(tl.sum(total) / (SAMPLES - 1))
    tl.store(norm, mean)
    tl.store(norm + 1, 1.0 / (std + ADVANTAGE_EPS))


@triton.jit
def _loss_gradient(
    logits, mean, log_std, value,  # network outputs: [SAMPLES, LOGITS], [SAMPLES, REALS], [REALS], [SAMPLES]
    actions, log_probs, values, advantages, returns, weights,  # of the whole rollout
    order,  # int64: the minibatch's sequences
    advantage_norm, clip_range,
    d_logits, d_mean, d_value,  # the same shapes
    d_log_std_parts,  # [programs, OUTS_P2]: each program's part of the gradient with respect to log_std
    sums,  # [programs, METRICS_P2]: policy loss, value loss, entropy, KL, clipped
    LOGITS_STRIDE: tl.constexpr, REALS_STRIDE: tl.constexpr,
    SAMPLES: tl.constexpr, LENGTH: tl.constexpr, NVEC: tl.constexpr, HEAD_OFFSETS: tl.constexpr, REALS: tl.constexpr,
    LOGITS: tl.constexpr, OUTS_P2: tl.constexpr, WEIGHTED: tl.constexpr, CLIP_VF: tl.constexpr,
    CLIP_RANGE_VF: tl.constexpr, ENT_COEF: tl.constexpr, VF_COEF: tl.constexpr, BM: tl.constexpr,
    METRICS_P2: tl.constexpr,
):  # fmt: skip
    """Compute the gradient of the loss, and each program's sums of its terms."""
    block = tl.program_id(0)
    sample = block * BM + tl.arange(0, BM)
    inside = sample < SAMPLES
    share: tl.constexpr = 1.0 / SAMPLES
    i = tl.load(order + sample // LENGTH, mask=inside, other=0) * LENGTH + sample % LENGTH
    column = tl.arange(0, OUTS_P2)[None, :]
    real = column - LOGITS
    is_logit = inside[:, None] & (column < LOGITS)
    is_real = inside[:, None] & (real >= 0) & (real < REALS)
    y = tl.load(logits + sample[:, None] * LOGITS_STRIDE + column, mask=is_logit, other=0.0)
    y += tl.load(mean + sample[:, None] * REALS_STRIDE + real, mask=is_real, other=0.0)
    log_prob, entropy, dlogp_dy, dentropy_dy, dlogp_dlog_std = distribution(
        y, actions, actions, log_std, i, inside, 0, NVEC, HEAD_OFFSETS, REALS, LOGITS, OUTS_P2, False
    )
    d_log_prob, loss, kl, clipped = policy_terms(
        log_prob, log_probs, advantages, weights, advantage_norm, clip_range, i, inside, share, WEIGHTED
    )
    d_entropy = tl.where(inside, -ENT_COEF * share, 0.0)
    dy = d_log_prob[:, None] * dlogp_dy + d_entropy[:, None] * dentropy_dy
    tl.store(d_logits + sample[:, None] * LOGITS + column, dy, mask=is_logit)
    tl.store(d_mean + sample[:, None] * REALS + real, dy, mask=is_real)
    if REALS:
        d_log_std = tl.sum(d_log_prob[:, None] * dlogp_dlog_std + d_entropy[:, None], 0)
        tl.store(d_log_std_parts + block * OUTS_P2 + tl.arange(0, OUTS_P2), d_log_std)
    v = tl.load(value + sample, mask=inside, other=0.0)
    dv, value_loss = value_terms(v, values, returns, i, inside, VF_COEF * share, CLIP_VF, CLIP_RANGE_VF)
    tl.store(d_value + sample, dv, mask=inside)
    tl.store(sums + block * METRICS_P2, loss)
    tl.store(sums + block * METRICS_P2 + 1, value_loss)
    tl.store(sums + block * METRICS_P2 + 2, tl.sum(tl.where(inside, entropy, 0.0)))
    tl.store(sums + block * METRICS_P2 + 3, kl)
    tl.store(sums + block * METRICS_P2 + 4, clipped)


@triton.jit
def _reduce(
    sums, d_log_std_parts, loss, means, d_log_std,
    SAMPLES: tl.constexpr, BLOCKS: tl.constexpr, REALS: tl.constexpr, LOGITS: tl.constexpr, OUTS_P2: tl.constexpr,
    ENT_COEF: tl.constexpr, VF_COEF: tl.constexpr, BLOCKS_PER_LOAD: tl.constexpr, METRICS_P2: tl.constexpr,
):  # fmt: skip
    """Reduce the programs' partial sums, in order."""
    metric, column = tl.arange(0, METRICS_P2), tl.arange(0, OUTS_P2)
    total, d_log_std_sum = tl.zeros((METRICS_P2,), tl.float32), tl.zeros((OUTS_P2,), tl.float32)
    for start in range(0, BLOCKS, BLOCKS_PER_LOAD):
        block = start + tl.arange(0, BLOCKS_PER_LOAD)[:, None]
        valid = (block < BLOCKS) & (metric < 5)[None, :]
        total += tl.sum(tl.load(sums + block * METRICS_P2 + metric[None, :], mask=valid, other=0.0), 0)
        if REALS:
            offs = block * OUTS_P2 + column[None, :]
            d_log_std_sum += tl.sum(tl.load(d_log_std_parts + offs, mask=block < BLOCKS, other=0.0), 0)
    total = total / SAMPLES
    tl.store(means + metric, total, mask=metric < 5)
    # A term with a coefficient of 0 may be infinite.
    terms = tl.where(metric == 0, total, 0.0) + tl.where(metric == 1, VF_COEF * total, 0.0)
    if ENT_COEF != 0.0:
        terms -= tl.where(metric == 2, ENT_COEF * total, 0.0)
    tl.store(loss, tl.sum(terms))
    if REALS:
        tl.store(d_log_std + column - LOGITS, d_log_std_sum, mask=(column >= LOGITS) & (column < LOGITS + REALS))


class _Loss(torch.autograd.Function):
    """Network outputs → the loss, and the minibatch's metrics [5]."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, mean: Tensor, log_std: Tensor, value: Tensor, kernels: FusedLoss, *rest: Any
    ) -> tuple[Tensor, Tensor]:
        loss, metrics, *gradients = kernels.launch(logits, mean, log_std, value, *rest)
        ctx.save_for_backward(*gradients)
        ctx.mark_non_differentiable(metrics)
        return loss, metrics

    @staticmethod
    def backward(ctx: Any, d_loss: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        return (*(d_loss * gradient for gradient in ctx.saved_tensors), *(None,) * 4)


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
        outs_p2 = max(16, triton.next_power_of_2(sum(nvec) + reals))
        self._samples = max(16, min(64, _MAX_OUTPUTS_PER_PROGRAM // outs_p2))  # per program
        self._sizes = {
            "REALS": reals,
            "LOGITS": sum(nvec),
            "OUTS_P2": outs_p2,
            "ENT_COEF": coefficients.ent_coef,
            "VF_COEF": coefficients.vf_coef,
            "METRICS_P2": METRICS_P2,
        }
        self._constants = {
            **self._sizes,
            "LENGTH": length,
            "NVEC": nvec,
            "HEAD_OFFSETS": tuple(sum(nvec[:head]) for head in range(len(nvec))),
            "CLIP_VF": coefficients.clip_range_vf is not None,
            "CLIP_RANGE_VF": coefficients.clip_range_vf or 0.0,
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
        block = min(_MAX_ADVANTAGES_BLOCK, triton.next_power_of_2(samples))
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
        gradients = [torch.empty(output.shape, device=output.device) for output in (logits, mean, log_std, value)]
        sums, d_log_std_parts = value.new_empty(blocks, METRICS_P2), value.new_empty(blocks, self._sizes["OUTS_P2"])
        loss, metrics = value.new_empty(()), value.new_empty(5)
        d_logits, d_mean, d_log_std, d_value = gradients
        _loss_gradient[(blocks,)](
            logits, mean, log_std, value, *fields,
            self._unused if batch.weights is None else batch.weights,
            order, norm, self._clip_range, d_logits, d_mean, d_value, d_log_std_parts, sums,
            LOGITS_STRIDE=logits.stride(-2), REALS_STRIDE=mean.stride(-2), SAMPLES=samples,
            WEIGHTED=batch.weights is not None, **self._constants,
        )  # fmt: skip
        blocks_per_load = min(triton.next_power_of_2(blocks), 4096 // self._sizes["OUTS_P2"])
        totals = {"SAMPLES": samples, "BLOCKS": blocks, "BLOCKS_PER_LOAD": blocks_per_load}
        _reduce[(1,)](sums, d_log_std_parts, loss, metrics, d_log_std, **totals, **self._sizes)
        return [loss, metrics, *gradients]
