"""A minibatch of PPO for a small network in three kernels (Triton): gradient, sum, step.

With two hidden layers of up to 64 units, a minibatch through autograd is some 200 kernels of a few microseconds each,
and the activations go through memory many times. Here one kernel does it all: gather, both networks forwards, the loss,
and backwards. A block of threads keeps all weights of one network, takes some rows of the minibatch through it and
back, and adds up their gradient; nothing but the gradient is written. Every block has its own place for it, and these
are summed up in order, so the result is the same every time. Then comes Adam's step.

The formulas are those of ppo.py, differentiated by hand; `tests/algos/test_ppo_kernels.py` compares both.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from unidle.algos.fused_loss import policy_terms, value_terms
from unidle.algos.fused_step import FIGURES, count_minibatch
from unidle.kernels.triton.adam import take_step
from unidle.kernels.triton.small_mlp import (
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

if TYPE_CHECKING:
    from unidle.algos.ppo import PPO, Batch

_BLOCKS = 132  # per network, at most: as many as an H100 or H200 has multiprocessors
_ROWS = 64  # of a minibatch that a block takes at a time
_WARPS = 4
_CHUNK = 64  # parameters that a block sums up and steps


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
    """Compute one block's share of the gradient of one network."""
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
    order,  # [SAMPLES] int64: which samples are the minibatch
    advantage_norm,  # mean of its advantages, and one over their deviation
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
def _sum_up(
    gradients, sums, grad, squares, logged, stopped, steps, minibatches, totals,
    FLAT: tl.constexpr, SAMPLES: tl.constexpr, BLOCKS: tl.constexpr, FIGURES: tl.constexpr, CHUNK: tl.constexpr,
    COUNT: tl.constexpr, STOPS: tl.constexpr, MOST_KL: tl.constexpr,
):  # fmt: skip
    """Add up all blocks' shares, in order: of the gradient, of its squared length, and of what is logged.

    With COUNT also count the minibatch, unless the policy has moved too far by now.
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
    """Learns from minibatches of an algorithm's batch, in three kernels each."""

    def __init__(self, algo: PPO, shape: SmallMlp) -> None:
        """`shape` is that of the algorithm's policy."""
        recipe, flat = algo.recipe, algo.parameters.flat
        assert isinstance(recipe.batch_size, int)
        self._algo = algo
        blocks = min(_BLOCKS, triton.cdiv(recipe.batch_size, _ROWS))
        self._constants = {
            **shape.constants(),
            "SAMPLES": recipe.batch_size,
            "FLAT": flat.numel(),
            "CLIP_VALUES": recipe.clip_range_vf is not None,
            "VALUE_RANGE": recipe.clip_range_vf or 0.0,
            "ENTROPY": recipe.ent_coef,
            "VALUE": recipe.vf_coef,
            "BLOCKS": blocks,
            "BM": _ROWS,
            "FIGURES": FIGURES,
        }

        def zeros(*sizes: int) -> Tensor:
            return torch.zeros(sizes, device=flat.device)

        # Padding between parameters is never written and stays 0.
        self._gradients, self._sums = zeros(blocks, flat.numel()), zeros(blocks, FIGURES)
        self._chunks = triton.cdiv(flat.numel(), _CHUNK)
        self._squares, self._logged, self._nothing = zeros(self._chunks), zeros(FIGURES), zeros(1)
        self._plain = torch.tensor([0.0, 1.0], device=flat.device)

    @torch.no_grad()
    def learn(self, batch: Batch, orders: Tensor) -> None:
        """Take a step along the gradient of each of the minibatches `orders` [minibatches, samples] of `batch`."""
        algo = self._algo
        for order, advantage_norm in zip(orders, self._advantage_norms(batch, orders)):
            self._compute(batch, order, advantage_norm, count=True)
            stops = algo.stopped, algo.sums[5:]
            take_step(algo.adam, self._squares, algo.recipe.max_grad_norm, block=_CHUNK, stops=stops)

    @torch.no_grad()
    def gradient(self, batch: Batch, order: Tensor) -> Tensor:
        """Put the gradient of the samples `order` of `batch` in place; returns the means of what is logged [5]."""
        (advantage_norm,) = self._advantage_norms(batch, order.unsqueeze(0))
        self._compute(batch, order, advantage_norm, count=False)
        return self._logged[:5].clone()

    def _advantage_norms(self, batch: Batch, orders: Tensor) -> list[Tensor]:
        """For each minibatch the mean of its advantages, and one over their deviation."""
        if not self._algo.recipe.normalize_advantage:
            return [self._plain] * len(orders)
        deviation, mean = torch.std_mean(batch.advantages.view(-1)[orders], 1)
        return list(torch.stack((mean, 1.0 / (deviation + 1e-8)), 1))

    def _compute(self, batch: Batch, order: Tensor, advantage_norm: Tensor, *, count: bool) -> None:
        algo, constants, nothing = self._algo, self._constants, self._nothing
        policy, recipe, norm = algo.policy, algo.recipe, algo.policy.encoder.norm
        obs = batch.obs.view(-1, batch.obs.shape[-1])
        _minibatch_gradient[constants["BLOCKS"], 2](
            obs.view(torch.float32),
            obs[:, policy.obs_layout.mask_offset :] if policy.masked else obs,
            batch.actions,
            batch.log_probs,
            batch.values,
            batch.advantages,
            batch.returns,
            nothing if batch.weights is None else batch.weights,
            order,
            advantage_norm,
            algo.clip_range,
            nothing if norm is None else norm.shift,
            nothing if norm is None else norm.scale,
            algo.parameters.flat,
            self._gradients,
            self._sums,
            WEIGHTED=batch.weights is not None,
            **constants,
            num_warps=_WARPS,
            num_stages=1,
        )
        _sum_up[(self._chunks,)](
            self._gradients,
            self._sums,
            algo.parameters.grad,
            self._squares,
            self._logged,
            algo.stopped,
            algo.adam.steps,
            algo.minibatches,
            algo.sums,
            **{name: constants[name] for name in ("FLAT", "SAMPLES", "BLOCKS", "FIGURES")},
            CHUNK=_CHUNK,
            COUNT=count,
            STOPS=recipe.target_kl is not None,
            MOST_KL=1.5 * (recipe.target_kl or 0.0),
            num_warps=4,
        )
