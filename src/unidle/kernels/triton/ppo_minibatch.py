"""One minibatch of PPO for a small MLP in three kernels: gradient, reduction, step.

With two hidden layers of up to 64 units, a minibatch through autograd is about 200 kernels of a few microseconds each,
and the activations go through memory many times. Here one kernel does it all: gather, both networks forward, the loss,
and backward. A block of threads holds all weights of one network, runs a tile of samples through it and back, and
accumulates their gradient; only the gradient is written. Each block writes to its own place and the places are reduced
in order, so the result is deterministic. Adam's step follows.

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
from unidle.kernels.triton.ppo_step import FIGURES, count_minibatch, stop_constants
from unidle.kernels.triton.small_mlp import (
    MlpTensors,
    SmallMlp,
    activated,
    distribution,
    inputs,
    layer,
    layer_bias,
    layer_weights,
    product,
    through_activation,
)

_BLOCKS = 132  # per network, at most: an H100 or H200 has as many multiprocessors
_ROWS = 64  # samples that a block takes at a time
_WARPS = 4
_CHUNK = 64  # parameters that a block reduces and steps


@triton.jit
def _network_gradient(
    obs, masks, actions, log_probs, values, advantages, returns, weights, order, advantage_norm, clip_range,
    norm_shift, norm_scale, parameters, gradients, sums,
    ACTOR: tl.constexpr, PLACES: tl.constexpr, LOG_STD: tl.constexpr, SAMPLES: tl.constexpr, FLAT: tl.constexpr,
    ROW: tl.constexpr, INS: tl.constexpr, INS_UP: tl.constexpr, UNITS: tl.constexpr, OUTS: tl.constexpr,
    OUTS_UP: tl.constexpr, HEADS: tl.constexpr, STARTS: tl.constexpr, REALS: tl.constexpr, LOGITS: tl.constexpr,
    MASKED: tl.constexpr, WEIGHTED: tl.constexpr, NORMALISE: tl.constexpr, OBS_CLIP: tl.constexpr,
    CLIP_VALUES: tl.constexpr,
    VALUE_RANGE: tl.constexpr, ENTROPY: tl.constexpr, VALUE: tl.constexpr,
    ACTIVATION: tl.constexpr, PRECISION: tl.constexpr, BLOCKS: tl.constexpr, BM: tl.constexpr, FIGURES: tl.constexpr,
):  # fmt: skip
    """Compute one block's part of the gradient of one network."""
    block = tl.program_id(0)
    w1 = layer_weights(parameters, PLACES[0], UNITS, INS, UNITS, INS_UP)
    b1 = layer_bias(parameters, PLACES[1], UNITS, UNITS)
    w2 = layer_weights(parameters, PLACES[2], UNITS, UNITS, UNITS, UNITS)
    b2 = layer_bias(parameters, PLACES[3], UNITS, UNITS)
    w3 = layer_weights(parameters, PLACES[4], OUTS, UNITS, OUTS_UP, UNITS)
    b3 = layer_bias(parameters, PLACES[5], OUTS, OUTS_UP)
    dw1, db1 = tl.zeros((UNITS, INS_UP), tl.float32), tl.zeros((UNITS,), tl.float32)
    dw2, db2 = tl.zeros((UNITS, UNITS), tl.float32), tl.zeros((UNITS,), tl.float32)
    dw3, db3 = tl.zeros((OUTS_UP, UNITS), tl.float32), tl.zeros((OUTS_UP,), tl.float32)
    d_log_std = tl.zeros((OUTS_UP,), tl.float32)
    first, second, third, fourth = 0.0, 0.0, 0.0, 0.0
    output = tl.arange(0, OUTS_UP)
    share: tl.constexpr = 1.0 / SAMPLES
    for begin in range(block * BM, SAMPLES, BLOCKS * BM):
        sample = begin + tl.arange(0, BM)
        inside = sample < SAMPLES
        i = tl.load(order + sample, mask=inside, other=0)
        x = inputs(obs, i, inside, norm_shift, norm_scale, ROW, INS, INS_UP, NORMALISE, OBS_CLIP)
        h1 = activated(layer(x, w1, b1, PRECISION), ACTIVATION)
        h2 = activated(layer(h1, w2, b2, PRECISION), ACTIVATION)
        y = layer(h2, w3, b3, PRECISION)
        if ACTOR:
            log_prob, entropy, by_y, entropy_by_y, by_log_std = distribution(
                y,
                actions,
                masks,
                parameters + LOG_STD,
                i,
                inside,
                4 * ROW,
                HEADS,
                STARTS,
                REALS,
                LOGITS,
                OUTS_UP,
                MASKED,
            )
            by_log_prob, loss, divergence, clipped = policy_terms(
                log_prob, log_probs, advantages, weights, advantage_norm, clip_range, i, inside, share, WEIGHTED
            )
            by_entropy = tl.where(inside, -ENTROPY * share, 0.0)
            dy = by_log_prob[:, None] * by_y + by_entropy[:, None] * entropy_by_y
            if REALS:
                d_log_std += tl.sum(by_log_prob[:, None] * by_log_std + by_entropy[:, None], 0)
            first += loss
            second += tl.sum(tl.where(inside, entropy, 0.0))
            third += divergence
            fourth += clipped
        else:
            value = tl.sum(tl.where(output[None, :] == 0, y, 0.0), 1)
            by_value, loss = value_terms(value, values, returns, i, inside, VALUE * share, CLIP_VALUES, VALUE_RANGE)
            dy = tl.where(output[None, :] == 0, by_value[:, None], 0.0)
            first += loss
        dw3 += product(tl.trans(dy), h2, PRECISION)
        db3 += tl.sum(dy, 0)
        d2 = through_activation(product(dy, w3, PRECISION), h2, ACTIVATION)
        dw2 += product(tl.trans(d2), h1, PRECISION)
        db2 += tl.sum(d2, 0)
        d1 = through_activation(product(d2, w2, PRECISION), h1, ACTIVATION)
        dw1 += product(tl.trans(d1), x, PRECISION)
        db1 += tl.sum(d1, 0)
    own = gradients + block * FLAT
    unit, ins = tl.arange(0, UNITS), tl.arange(0, INS_UP)
    tl.store(own + PLACES[0] + unit[:, None] * INS + ins[None, :], dw1, mask=ins[None, :] < INS)
    tl.store(own + PLACES[1] + unit, db1)
    tl.store(own + PLACES[2] + unit[:, None] * UNITS + unit[None, :], dw2)
    tl.store(own + PLACES[3] + unit, db2)
    tl.store(own + PLACES[4] + output[:, None] * UNITS + unit[None, :], dw3, mask=output[:, None] < OUTS)
    tl.store(own + PLACES[5] + output, db3, mask=output < OUTS)
    if ACTOR:
        real = output - LOGITS
        tl.store(own + LOG_STD + real, d_log_std, mask=(real >= 0) & (real < REALS))
        tl.store(sums + block * FIGURES, first)
        tl.store(sums + block * FIGURES + 2, second)
        tl.store(sums + block * FIGURES + 3, third)
        tl.store(sums + block * FIGURES + 4, fourth)
    else:
        tl.store(sums + block * FIGURES + 1, first)


@triton.jit
def _minibatch_gradient(
    obs,  # [S, ROW] float32 words
    masks,  # the same memory as bytes, from the first mask on
    actions,  # [S, heads + reals]
    log_probs, values, advantages, returns, weights,  # [S]
    order,  # [SAMPLES] int64: the minibatch's samples
    advantage_norm,  # mean of its advantages, and the inverse of their standard deviation
    clip_range, norm_shift, norm_scale,
    parameters,  # [FLAT]
    gradients,  # [BLOCKS, FLAT]
    sums,  # [BLOCKS, FIGURES]: policy loss, value loss, entropy, KL, clipped
    ACTOR_PLACES: tl.constexpr, CRITIC_PLACES: tl.constexpr,  # weights and bias of each layer in `parameters`
    LOG_STD: tl.constexpr, SAMPLES: tl.constexpr, FLAT: tl.constexpr,
    ROW: tl.constexpr, INS: tl.constexpr, INS_UP: tl.constexpr, UNITS: tl.constexpr, OUTS: tl.constexpr,
    OUTS_UP: tl.constexpr, HEADS: tl.constexpr, STARTS: tl.constexpr, REALS: tl.constexpr, LOGITS: tl.constexpr,
    MASKED: tl.constexpr, WEIGHTED: tl.constexpr, NORMALISE: tl.constexpr, OBS_CLIP: tl.constexpr,
    CLIP_VALUES: tl.constexpr,
    VALUE_RANGE: tl.constexpr, ENTROPY: tl.constexpr, VALUE: tl.constexpr,
    ACTIVATION: tl.constexpr, PRECISION: tl.constexpr, BLOCKS: tl.constexpr, BM: tl.constexpr, FIGURES: tl.constexpr,
):  # fmt: skip
    if tl.program_id(1) == 0:
        _network_gradient(
            obs, masks, actions, log_probs, values, advantages, returns, weights, order, advantage_norm, clip_range,
            norm_shift, norm_scale, parameters, gradients, sums,
            True, ACTOR_PLACES, LOG_STD, SAMPLES, FLAT, ROW, INS, INS_UP, UNITS, OUTS, OUTS_UP,
            HEADS, STARTS, REALS, LOGITS, MASKED, WEIGHTED, NORMALISE, OBS_CLIP, CLIP_VALUES, VALUE_RANGE, ENTROPY,
            VALUE, ACTIVATION, PRECISION, BLOCKS, BM, FIGURES,
        )  # fmt: skip
    else:
        _network_gradient(
            obs, masks, actions, log_probs, values, advantages, returns, weights, order, advantage_norm, clip_range,
            norm_shift, norm_scale, parameters, gradients, sums,
            False, CRITIC_PLACES, LOG_STD, SAMPLES, FLAT, ROW, INS, INS_UP, UNITS, 1, 16,
            HEADS, STARTS, REALS, LOGITS, MASKED, WEIGHTED, NORMALISE, OBS_CLIP, CLIP_VALUES, VALUE_RANGE, ENTROPY,
            VALUE, ACTIVATION, PRECISION, BLOCKS, BM, FIGURES,
        )  # fmt: skip


@triton.jit
def _reduce(
    gradients, sums, grad, squares, logged, stopped, steps, minibatches, totals,
    FLAT: tl.constexpr, SAMPLES: tl.constexpr, BLOCKS: tl.constexpr, FIGURES: tl.constexpr, CHUNK: tl.constexpr,
    COUNT: tl.constexpr, STOPS: tl.constexpr, MOST_KL: tl.constexpr,
):  # fmt: skip
    """Reduce the blocks' parts of the gradient and the metrics, in order, and sum the gradient's squares.

    With COUNT also count the minibatch, unless the KL divergence ended the iteration.
    """
    at = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    total = tl.zeros((CHUNK,), tl.float32)
    for begin in range(0, BLOCKS, 64):
        block = begin + tl.arange(0, 64)[:, None]
        some = tl.load(gradients + block * FLAT + at[None, :], mask=(block < BLOCKS) & (at < FLAT)[None, :], other=0.0)
        total += tl.sum(some, 0)
    tl.store(grad + at, total, mask=at < FLAT)
    tl.store(squares + tl.program_id(0), tl.sum(total * total))
    if tl.program_id(0) == 0:
        figure = tl.arange(0, FIGURES)
        means = tl.zeros((FIGURES,), tl.float32)
        for begin in range(0, BLOCKS, 16):
            block = begin + tl.arange(0, 16)[:, None]
            means += tl.sum(tl.load(sums + block * FIGURES + figure[None, :], mask=block < BLOCKS, other=0.0), 0)
        means = means / SAMPLES
        tl.store(logged + figure, means)
        if COUNT:
            count_minibatch(means, stopped, steps, minibatches, totals, FIGURES, STOPS, MOST_KL)


class FusedMinibatch:
    """Learns from minibatches of `batch_size` samples, in three kernels each."""

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
        blocks = min(_BLOCKS, triton.cdiv(batch_size, _ROWS))
        size, device = adam.flat.numel(), adam.flat.device
        self._constants = {
            **mlp.constants(),
            "SAMPLES": batch_size,
            "FLAT": size,
            "CLIP_VALUES": coefficients.clip_range_vf is not None,
            "VALUE_RANGE": coefficients.clip_range_vf or 0.0,
            "ENTROPY": coefficients.ent_coef,
            "VALUE": coefficients.vf_coef,
            "BLOCKS": blocks,
            "BM": _ROWS,
            "FIGURES": FIGURES,
        }

        def zeros(*sizes: int) -> Tensor:
            return torch.zeros(sizes, device=device)

        # Padding between parameters is never written and stays 0.
        self._gradients, self._sums = zeros(blocks, size), zeros(blocks, FIGURES)
        self._chunks = triton.cdiv(size, _CHUNK)
        self._squares, self._metrics, self._unused = zeros(self._chunks), zeros(FIGURES), zeros(1)
        self._identity = torch.tensor([0.0, 1.0], device=device)

    @torch.no_grad()
    def learn(self, batch: Batch, orders: Tensor) -> None:
        """Take one step for each minibatch `orders` [minibatches, samples] of `batch`."""
        stops = self._counters.stopped, self._counters.sums[5:]
        for order, advantage_norm in zip(orders, self._advantage_norms(batch, orders)):
            self._compute(batch, order, advantage_norm, count=True)
            take_step(self._adam, self._squares, self._coefficients.max_grad_norm, block=_CHUNK, stops=stops)

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
            **{name: constants[name] for name in ("FLAT", "SAMPLES", "BLOCKS", "FIGURES")},
            CHUNK=_CHUNK,
            COUNT=count,
            **stop_constants(self._coefficients),
            num_warps=4,
        )
