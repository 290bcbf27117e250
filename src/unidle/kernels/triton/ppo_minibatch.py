"""One minibatch of PPO for a small MLP in three kernels: gradient, reduction, step.

With two hidden layers of up to 64 units, a minibatch through autograd is about 200 kernels of a few microseconds each,
and the activations go through memory many times. Here one kernel does it all: gather, forward pass of both networks,
loss, backward pass. A block of threads holds all weights of one network, runs tiles of samples forwards and backwards
through it, and accumulates their gradient; only the gradient is written. Each block writes its own partial sum, and
these are reduced in a fixed order, so the result is deterministic. Adam's step follows.

The formulas are those of `algos.ppo`, differentiated by hand.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from unidle.kernels.ppo_types import Batch, Coefficients, Counters
from unidle.kernels.triton.adam import AdamState, take_step
from unidle.kernels.triton.ppo_loss import policy_terms, value_terms
from unidle.kernels.triton.ppo_step import METRICS_P2, count_minibatch, stop_constants
from unidle.kernels.triton.small_mlp import (
    MlpTensors,
    SmallMlp,
    activated,
    activation_backward,
    distribution,
    inputs,
    layer,
    layer_bias,
    layer_weights,
    product,
)

_BLOCKS = 132  # per network, at most: an H100 or H200 has as many multiprocessors
_BLOCK_ROWS = 64  # samples that a block takes at a time
_WARPS = 4
_CHUNK = 64  # parameters that a block reduces and steps


@triton.jit
def _network_gradient(
    obs, masks, actions, log_probs, values, advantages, returns, weights, order, advantage_norm, clip_range,
    norm_shift, norm_scale, parameters, gradients, sums,
    ACTOR: tl.constexpr, OFFSETS: tl.constexpr, LOG_STD_OFFSET: tl.constexpr, SAMPLES: tl.constexpr, FLAT: tl.constexpr,
    OBS_WORDS: tl.constexpr, INS: tl.constexpr, INS_P2: tl.constexpr, UNITS: tl.constexpr, OUTS: tl.constexpr,
    OUTS_P2: tl.constexpr, NVEC: tl.constexpr, HEAD_OFFSETS: tl.constexpr, REALS: tl.constexpr, LOGITS: tl.constexpr,
    MASKED: tl.constexpr, WEIGHTED: tl.constexpr, NORMALISE: tl.constexpr, OBS_CLIP: tl.constexpr,
    CLIP_VF: tl.constexpr,
    CLIP_RANGE_VF: tl.constexpr, ENT_COEF: tl.constexpr, VF_COEF: tl.constexpr,
    ACTIVATION: tl.constexpr, PRECISION: tl.constexpr, BLOCKS: tl.constexpr, BM: tl.constexpr, METRICS_P2: tl.constexpr,
):  # fmt: skip
    """Compute one block's part of the gradient of one network."""
    block = tl.program_id(0)
    w1 = layer_weights(parameters, OFFSETS[0], UNITS, INS, UNITS, INS_P2)
    b1 = layer_bias(parameters, OFFSETS[1], UNITS, UNITS)
    w2 = layer_weights(parameters, OFFSETS[2], UNITS, UNITS, UNITS, UNITS)
    b2 = layer_bias(parameters, OFFSETS[3], UNITS, UNITS)
    w3 = layer_weights(parameters, OFFSETS[4], OUTS, UNITS, OUTS_P2, UNITS)
    b3 = layer_bias(parameters, OFFSETS[5], OUTS, OUTS_P2)
    dw1, db1 = tl.zeros((UNITS, INS_P2), tl.float32), tl.zeros((UNITS,), tl.float32)
    dw2, db2 = tl.zeros((UNITS, UNITS), tl.float32), tl.zeros((UNITS,), tl.float32)
    dw3, db3 = tl.zeros((OUTS_P2, UNITS), tl.float32), tl.zeros((OUTS_P2,), tl.float32)
    d_log_std = tl.zeros((OUTS_P2,), tl.float32)
    loss_sum, entropy_sum, kl_sum, clipped_sum = 0.0, 0.0, 0.0, 0.0
    output = tl.arange(0, OUTS_P2)
    share: tl.constexpr = 1.0 / SAMPLES
    for start in range(block * BM, SAMPLES, BLOCKS * BM):
        sample = start + tl.arange(0, BM)
        inside = sample < SAMPLES
        i = tl.load(order + sample, mask=inside, other=0)
        x = inputs(obs, i, inside, norm_shift, norm_scale, OBS_WORDS, INS, INS_P2, NORMALISE, OBS_CLIP)
        h1 = activated(layer(x, w1, b1, PRECISION), ACTIVATION)
        h2 = activated(layer(h1, w2, b2, PRECISION), ACTIVATION)
        y = layer(h2, w3, b3, PRECISION)
        if ACTOR:
            log_prob, entropy, dlogp_dy, dentropy_dy, dlogp_dlog_std = distribution(
                y,
                actions,
                masks,
                parameters + LOG_STD_OFFSET,
                i,
                inside,
                4 * OBS_WORDS,
                NVEC,
                HEAD_OFFSETS,
                REALS,
                LOGITS,
                OUTS_P2,
                MASKED,
            )
            d_log_prob, loss, kl, clipped = policy_terms(
                log_prob, log_probs, advantages, weights, advantage_norm, clip_range, i, inside, share, WEIGHTED
            )
            d_entropy = tl.where(inside, -ENT_COEF * share, 0.0)
            dy = d_log_prob[:, None] * dlogp_dy + d_entropy[:, None] * dentropy_dy
            if REALS:
                d_log_std += tl.sum(d_log_prob[:, None] * dlogp_dlog_std + d_entropy[:, None], 0)
            loss_sum += loss
            entropy_sum += tl.sum(tl.where(inside, entropy, 0.0))
            kl_sum += kl
            clipped_sum += clipped
        else:
            value = tl.sum(tl.where(output[None, :] == 0, y, 0.0), 1)
            d_value, loss = value_terms(value, values, returns, i, inside, VF_COEF * share, CLIP_VF, CLIP_RANGE_VF)
            dy = tl.where(output[None, :] == 0, d_value[:, None], 0.0)
            loss_sum += loss
        dw3 += product(tl.trans(dy), h2, PRECISION)
        db3 += tl.sum(dy, 0)
        d2 = activation_backward(product(dy, w3, PRECISION), h2, ACTIVATION)
        dw2 += product(tl.trans(d2), h1, PRECISION)
        db2 += tl.sum(d2, 0)
        d1 = activation_backward(product(d2, w2, PRECISION), h1, ACTIVATION)
        dw1 += product(tl.trans(d1), x, PRECISION)
        db1 += tl.sum(d1, 0)
    out = gradients + block * FLAT
    unit, ins = tl.arange(0, UNITS), tl.arange(0, INS_P2)
    tl.store(out + OFFSETS[0] + unit[:, None] * INS + ins[None, :], dw1, mask=ins[None, :] < INS)
    tl.store(out + OFFSETS[1] + unit, db1)
    tl.store(out + OFFSETS[2] + unit[:, None] * UNITS + unit[None, :], dw2)
    tl.store(out + OFFSETS[3] + unit, db2)
    tl.store(out + OFFSETS[4] + output[:, None] * UNITS + unit[None, :], dw3, mask=output[:, None] < OUTS)
    tl.store(out + OFFSETS[5] + output, db3, mask=output < OUTS)
    if ACTOR:
        real = output - LOGITS
        tl.store(out + LOG_STD_OFFSET + real, d_log_std, mask=(real >= 0) & (real < REALS))
        tl.store(sums + block * METRICS_P2, loss_sum)
        tl.store(sums + block * METRICS_P2 + 2, entropy_sum)
        tl.store(sums + block * METRICS_P2 + 3, kl_sum)
        tl.store(sums + block * METRICS_P2 + 4, clipped_sum)
    else:
        tl.store(sums + block * METRICS_P2 + 1, loss_sum)


@triton.jit
def _minibatch_gradient(
    obs,  # [S, OBS_WORDS] float32 words
    masks,  # the same memory as bytes, starting at the first mask
    actions,  # [S, heads + reals]
    log_probs, values, advantages, returns, weights,  # [S]
    order,  # [SAMPLES] int64: the minibatch's samples
    advantage_norm,  # mean of its advantages, and the inverse of their standard deviation
    clip_range, norm_shift, norm_scale,
    parameters,  # [FLAT]
    gradients,  # [BLOCKS, FLAT]
    sums,  # [BLOCKS, METRICS_P2]: policy loss, value loss, entropy, KL, clipped
    ACTOR_OFFSETS: tl.constexpr, CRITIC_OFFSETS: tl.constexpr,  # weights and bias of each layer in `parameters`
    LOG_STD_OFFSET: tl.constexpr, SAMPLES: tl.constexpr, FLAT: tl.constexpr,
    OBS_WORDS: tl.constexpr, INS: tl.constexpr, INS_P2: tl.constexpr, UNITS: tl.constexpr, OUTS: tl.constexpr,
    OUTS_P2: tl.constexpr, NVEC: tl.constexpr, HEAD_OFFSETS: tl.constexpr, REALS: tl.constexpr, LOGITS: tl.constexpr,
    MASKED: tl.constexpr, WEIGHTED: tl.constexpr, NORMALISE: tl.constexpr, OBS_CLIP: tl.constexpr,
    CLIP_VF: tl.constexpr,
    CLIP_RANGE_VF: tl.constexpr, ENT_COEF: tl.constexpr, VF_COEF: tl.constexpr,
    ACTIVATION: tl.constexpr, PRECISION: tl.constexpr, BLOCKS: tl.constexpr, BM: tl.constexpr, METRICS_P2: tl.constexpr,
):  # fmt: skip
    if tl.program_id(1) == 0:
        _network_gradient(
            obs, masks, actions, log_probs, values, advantages, returns, weights, order, advantage_norm, clip_range,
            norm_shift, norm_scale, parameters, gradients, sums,
            True, ACTOR_OFFSETS, LOG_STD_OFFSET, SAMPLES, FLAT, OBS_WORDS, INS, INS_P2, UNITS, OUTS, OUTS_P2,
            NVEC, HEAD_OFFSETS, REALS, LOGITS, MASKED, WEIGHTED, NORMALISE, OBS_CLIP, CLIP_VF, CLIP_RANGE_VF, ENT_COEF,
            VF_COEF, ACTIVATION, PRECISION, BLOCKS, BM, METRICS_P2,
        )  # fmt: skip
    else:
        _network_gradient(
            obs, masks, actions, log_probs, values, advantages, returns, weights, order, advantage_norm, clip_range,
            norm_shift, norm_scale, parameters, gradients, sums,
            False, CRITIC_OFFSETS, LOG_STD_OFFSET, SAMPLES, FLAT, OBS_WORDS, INS, INS_P2, UNITS, 1, 16,
            NVEC, HEAD_OFFSETS, REALS, LOGITS, MASKED, WEIGHTED, NORMALISE, OBS_CLIP, CLIP_VF, CLIP_RANGE_VF, ENT_COEF,
            VF_COEF, ACTIVATION, PRECISION, BLOCKS, BM, METRICS_P2,
        )  # fmt: skip


@triton.jit
def _reduce(
    gradients, sums, grad, squares, metrics, stopped, steps, minibatches, metric_sums,
    FLAT: tl.constexpr, SAMPLES: tl.constexpr, BLOCKS: tl.constexpr, METRICS_P2: tl.constexpr, CHUNK: tl.constexpr,
    COUNT: tl.constexpr, HAS_MAX_KL: tl.constexpr, MAX_KL: tl.constexpr,
):  # fmt: skip
    """Reduce the blocks' parts of the gradient and the metrics, in order, and sum the gradient's squares.

    With COUNT also count the minibatch, unless the KL divergence ended the iteration.
    """
    offs = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    total = tl.zeros((CHUNK,), tl.float32)
    for start in range(0, BLOCKS, 64):
        block = start + tl.arange(0, 64)[:, None]
        valid = (block < BLOCKS) & (offs < FLAT)[None, :]
        total += tl.sum(tl.load(gradients + block * FLAT + offs[None, :], mask=valid, other=0.0), 0)
    tl.store(grad + offs, total, mask=offs < FLAT)
    tl.store(squares + tl.program_id(0), tl.sum(total * total))
    if tl.program_id(0) == 0:
        metric = tl.arange(0, METRICS_P2)
        means = tl.zeros((METRICS_P2,), tl.float32)
        for start in range(0, BLOCKS, 16):
            block = start + tl.arange(0, 16)[:, None]
            means += tl.sum(tl.load(sums + block * METRICS_P2 + metric[None, :], mask=block < BLOCKS, other=0.0), 0)
        means = means / SAMPLES
        tl.store(metrics + metric, means)
        if COUNT:
            count_minibatch(means, stopped, steps, minibatches, metric_sums, METRICS_P2, HAS_MAX_KL, MAX_KL)


class FusedMinibatch:
    """Learns from minibatches of `batch_size` samples, with three kernels each."""

    def __init__(
        self,
        mlp: SmallMlp,
        tensors: MlpTensors,
        adam: AdamState,
        counters: Counters,
        coefficients: Coefficients,
        clip_range: Tensor,
        batch_size: int,
    ) -> None:
        """`adam` optimises the parameters in `tensors`."""
        self._mlp, self._tensors, self._adam = mlp, tensors, adam
        self._counters, self._coefficients, self._clip_range = counters, coefficients, clip_range
        blocks = min(_BLOCKS, triton.cdiv(batch_size, _BLOCK_ROWS))
        size, device = adam.flat.numel(), adam.flat.device
        self._constants = {
            **mlp.constants(),
            "SAMPLES": batch_size,
            "FLAT": size,
            "CLIP_VF": coefficients.clip_range_vf is not None,
            "CLIP_RANGE_VF": coefficients.clip_range_vf or 0.0,
            "ENT_COEF": coefficients.ent_coef,
            "VF_COEF": coefficients.vf_coef,
            "BLOCKS": blocks,
            "BM": _BLOCK_ROWS,
            "METRICS_P2": METRICS_P2,
        }

        def zeros(*sizes: int) -> Tensor:
            return torch.zeros(sizes, device=device)

        # Padding between parameters is never written and stays 0.
        self._gradients, self._sums = zeros(blocks, size), zeros(blocks, METRICS_P2)
        self._chunks = triton.cdiv(size, _CHUNK)
        self._squares, self._metrics, self._unused = zeros(self._chunks), zeros(METRICS_P2), zeros(1)
        self._identity = torch.tensor([0.0, 1.0], device=device)

    @torch.no_grad()
    def learn(self, batch: Batch, orders: Tensor) -> None:
        """Take one step for each minibatch `orders` [minibatches, samples] of `batch`."""
        kl_stop = self._counters.stopped, self._counters.sums[:, 5:]
        for order, advantage_norm in zip(orders, self._advantage_norms(batch, orders)):
            self._compute(batch, order, advantage_norm, count=True)
            take_step(self._adam, self._squares, self._coefficients.max_grad_norm, block=_CHUNK, kl_stop=kl_stop)

    @torch.no_grad()
    def gradient(self, batch: Batch, order: Tensor) -> Tensor:
        """Compute the gradient of the samples `order` of `batch` in place; returns the metrics [5]."""
        (advantage_norm,) = self._advantage_norms(batch, order.unsqueeze(0))
        self._compute(batch, order, advantage_norm, count=False)
        return self._metrics[:5].clone()

    def _advantage_norms(self, batch: Batch, orders: Tensor) -> list[Tensor]:
        """Mean and inverse standard deviation of each minibatch's advantages."""
        if not self._coefficients.normalize_advantage:
            return [self._identity] * len(orders)
        deviation, mean = torch.std_mean(batch.advantages.view(-1)[orders], 1)
        return list(torch.stack((mean, 1.0 / (deviation + self._coefficients.advantage_eps)), 1))

    def _compute(self, batch: Batch, order: Tensor, advantage_norm: Tensor, *, count: bool) -> None:
        constants, counters, adam = self._constants, self._counters, self._adam
        obs = batch.obs.view(-1, batch.obs.shape[-1])
        _minibatch_gradient[constants["BLOCKS"], 2](
            obs.view(torch.float32),
            obs if self._mlp.mask_offset is None else obs[:, self._mlp.mask_offset :],
            batch.actions,
            batch.log_probs,
            batch.values,
            batch.advantages,
            batch.returns,
            self._unused if batch.weights is None else batch.weights,
            order,
            advantage_norm,
            self._clip_range,
            self._tensors.norm_shift,
            self._tensors.norm_scale,
            self._tensors.parameters,
            self._gradients,
            self._sums,
            WEIGHTED=batch.weights is not None,
            **constants,
            num_warps=_WARPS,
            num_stages=1,
        )
        _reduce[(self._chunks,)](
            self._gradients,
            self._sums,
            adam.grad,
            self._squares,
            self._metrics,
            counters.stopped,
            adam.steps,
            counters.minibatches,
            counters.sums,
            **{name: constants[name] for name in ("FLAT", "SAMPLES", "BLOCKS", "METRICS_P2")},
            CHUNK=_CHUNK,
            COUNT=count,
            **stop_constants(self._coefficients),
            num_warps=4,
        )
