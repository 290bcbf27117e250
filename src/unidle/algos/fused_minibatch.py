"""PPO's gradient for a small network as one kernel: gather, both networks forwards, the loss, and backwards (Triton).

With two hidden layers of up to 64 units, a minibatch through autograd is some 200 kernels of a few microseconds each,
and the activations go through memory many times. Here a block of threads keeps all weights of one network, takes some
rows of the minibatch through it and back, and adds up their gradient; nothing but the gradient is written. Every block
has its own place for it, and these are summed up in order, so the result is the same every time.

The formulas are those of ppo.py, differentiated by hand; `tests/algos/test_fused_minibatch.py` compares both.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor, nn

from unidle.config import Recipe
from unidle.nn.flat import FlatParameters
from unidle.nn.policy import Policy

_ACTIVATIONS: dict[type[nn.Module], str] = {nn.Tanh: "tanh", nn.ReLU: "relu"}
_UNITS = (16, 32, 64)  # more, and the weights do not fit beside their gradient
_MOST_INPUTS, _MOST_OUTPUTS, _MOST_HEADS = 64, 32, 8
_BLOCKS = 132  # per network, at most: as many as an H100 or H200 has multiprocessors
_ROWS = 64  # of a minibatch that a block takes at a time
_SUMS = 8  # places for sums per block, of which metrics take five


@triton.jit
def _activated(z, ACTIVATION: tl.constexpr):
    # Not libdevice's tanh, which takes several times as long; to 1e-7 of the range the same.
    return tl.maximum(z, 0.0) if ACTIVATION == "relu" else 1.0 - 2.0 / (tl.exp(2.0 * z) + 1.0)


@triton.jit
def _through_activation(gradient, y, ACTIVATION: tl.constexpr):
    return tl.where(y > 0, gradient, 0.0) if ACTIVATION == "relu" else gradient * (1.0 - y * y)


@triton.jit
def _weights(parameters, at, OUTS: tl.constexpr, INS: tl.constexpr, OUTS_UP: tl.constexpr, INS_UP: tl.constexpr):
    """A layer's weights [OUTS_UP, INS_UP], zero outside [OUTS, INS]."""
    row, column = tl.arange(0, OUTS_UP)[:, None], tl.arange(0, INS_UP)[None, :]
    return tl.load(parameters + at + row * INS + column, mask=(row < OUTS) & (column < INS), other=0.0)


@triton.jit
def _bias(parameters, at, OUTS: tl.constexpr, OUTS_UP: tl.constexpr):
    column = tl.arange(0, OUTS_UP)
    return tl.load(parameters + at + column, mask=column < OUTS, other=0.0)


@triton.jit
def _inputs(
    rows, i, inside, norm_shift, norm_scale, ROW: tl.constexpr, INS: tl.constexpr, INS_UP: tl.constexpr,
    NORMALISE: tl.constexpr,
):  # fmt: skip
    """Observations [.., INS_UP] of samples i, as the encoder gives them."""
    column = tl.arange(0, INS_UP)
    x = tl.load(rows + i[:, None] * ROW + column[None, :], mask=inside[:, None] & (column[None, :] < INS), other=0.0)
    if NORMALISE:
        x -= tl.load(norm_shift + column, mask=column < INS, other=0.0)[None, :]
        x *= tl.load(norm_scale + column, mask=column < INS, other=0.0)[None, :]
        x = tl.minimum(tl.maximum(x, -10.0), 10.0)
    return x


@triton.jit
def _layer(x, w, b, PRECISION: tl.constexpr):
    """Of x [M, INS]: x · wᵀ [OUTS, INS] + b."""
    return tl.dot(x, tl.trans(w), input_precision=PRECISION) + b[None, :]


@triton.jit
def _distribution(
    y, actions, masks, log_std, i, inside,
    ROW_BYTES: tl.constexpr, HEADS: tl.constexpr, STARTS: tl.constexpr, REALS: tl.constexpr, LOGITS: tl.constexpr,
    OUTS_UP: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Of samples i, whose outputs are y: log-probability of their actions, entropy, and the gradients of both.

    The gradient of the log-probability by y, and by log_std [columns of the reals]; that of the entropy by y (by
    log_std it is 1).
    """
    column = tl.arange(0, OUTS_UP)[None, :]
    log_prob = tl.zeros((y.shape[0],), tl.float32)
    entropy = tl.zeros((y.shape[0],), tl.float32)
    by_y = tl.zeros((y.shape[0], OUTS_UP), tl.float32)
    entropy_by_y = tl.zeros((y.shape[0], OUTS_UP), tl.float32)
    by_log_std = tl.zeros((y.shape[0], OUTS_UP), tl.float32)
    width: tl.constexpr = len(HEADS) + REALS
    if MASKED:
        allowed = tl.load(masks + i[:, None] * ROW_BYTES + column, mask=inside[:, None] & (column < LOGITS), other=1)
        y = tl.where(allowed == 0, -1e8, y)
    for head in tl.static_range(len(HEADS)):
        of_head = (column >= STARTS[head]) & (column < STARTS[head] + HEADS[head])
        scores = tl.where(of_head, y, -1e30)
        scores -= tl.max(scores, 1)[:, None]
        mass = tl.exp(scores)
        total = tl.sum(mass, 1)[:, None]
        log_mass = tl.where(of_head, scores - tl.log(total), 0.0)
        mass = mass / total
        choice = tl.load(actions + i * width + head, mask=inside, other=0.0).to(tl.int32)
        chosen = ((column - STARTS[head]) == choice[:, None]) & of_head
        log_prob += tl.sum(tl.where(chosen, log_mass, 0.0), 1)
        uncertain = -tl.sum(mass * log_mass, 1)
        entropy += uncertain
        by_y += tl.where(of_head, chosen.to(tl.float32) - mass, 0.0)
        entropy_by_y -= tl.where(of_head, mass * (log_mass + uncertain[:, None]), 0.0)
    if REALS:
        real = column - LOGITS
        is_real = (real >= 0) & (real < REALS)
        spread = tl.load(log_std + real, mask=is_real, other=0.0)
        at = actions + i[:, None] * width + len(HEADS) + real
        action = tl.load(at, mask=inside[:, None] & is_real, other=0.0)
        z = tl.where(is_real, (action - y) * tl.exp(-spread), 0.0)
        # 0.5 log 2π
        log_prob -= tl.sum(tl.where(is_real, 0.5 * z * z + spread + 0.9189385332046727, 0.0), 1)
        entropy += tl.sum(tl.where(is_real, spread + 1.4189385332046727, 0.0), 1)
        by_y += tl.where(is_real, z * tl.exp(-spread), 0.0)
        by_log_std += tl.where(is_real, z * z - 1.0, 0.0)
    return log_prob, entropy, by_y, entropy_by_y, by_log_std


@triton.jit
def _network_gradient(
    rows, masks, actions, log_probs, values, advantages, returns, weights, order, advantage_norm, clip_range,
    norm_shift, norm_scale, parameters, gradients, sums,
    ACTOR: tl.constexpr, PLACES: tl.constexpr, LOG_STD: tl.constexpr, SAMPLES: tl.constexpr, FLAT: tl.constexpr,
    ROW: tl.constexpr, INS: tl.constexpr, INS_UP: tl.constexpr, UNITS: tl.constexpr, OUTS: tl.constexpr,
    OUTS_UP: tl.constexpr, HEADS: tl.constexpr, STARTS: tl.constexpr, REALS: tl.constexpr, LOGITS: tl.constexpr,
    MASKED: tl.constexpr, WEIGHTED: tl.constexpr, NORMALISE: tl.constexpr, CLIP_VALUES: tl.constexpr,
    VALUE_RANGE: tl.constexpr, ENTROPY: tl.constexpr, VALUE: tl.constexpr,
    ACTIVATION: tl.constexpr, PRECISION: tl.constexpr, BLOCKS: tl.constexpr, BM: tl.constexpr, SUMS: tl.constexpr,
):  # fmt: skip
    """Compute one block's share of the gradient of one network."""
    block = tl.program_id(0)
    w1 = _weights(parameters, PLACES[0], UNITS, INS, UNITS, INS_UP)
    b1 = _bias(parameters, PLACES[1], UNITS, UNITS)
    w2 = _weights(parameters, PLACES[2], UNITS, UNITS, UNITS, UNITS)
    b2 = _bias(parameters, PLACES[3], UNITS, UNITS)
    w3 = _weights(parameters, PLACES[4], OUTS, UNITS, OUTS_UP, UNITS)
    b3 = _bias(parameters, PLACES[5], OUTS, OUTS_UP)
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
        x = _inputs(rows, i, inside, norm_shift, norm_scale, ROW, INS, INS_UP, NORMALISE)
        h1 = _activated(_layer(x, w1, b1, PRECISION), ACTIVATION)
        h2 = _activated(_layer(h1, w2, b2, PRECISION), ACTIVATION)
        y = _layer(h2, w3, b3, PRECISION)
        if ACTOR:
            log_prob, entropy, by_y, entropy_by_y, by_log_std = _distribution(
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
            advantage = tl.load(advantages + i, mask=inside, other=0.0)
            advantage = (advantage - tl.load(advantage_norm)) * tl.load(advantage_norm + 1)
            log_ratio = log_prob - tl.load(log_probs + i, mask=inside, other=0.0)
            log_ratio = tl.where(inside, log_ratio, 0.0)
            ratio = tl.exp(log_ratio)
            clip = tl.load(clip_range)
            clipped = tl.minimum(tl.maximum(ratio, 1.0 - clip), 1.0 + clip)
            weight = tl.load(weights + i, mask=inside, other=0.0) if WEIGHTED else inside.to(tl.float32)
            kept = ~(ratio * advantage > clipped * advantage)  # so that what is not a number stays in, to be seen
            by_log_prob = tl.where(kept, -weight * advantage * ratio, 0.0) * share
            by_log_prob = tl.where(inside, by_log_prob, 0.0)
            by_entropy = tl.where(inside, -ENTROPY * share, 0.0)
            dy = by_log_prob[:, None] * by_y + by_entropy[:, None] * entropy_by_y
            if REALS:
                d_log_std += tl.sum(by_log_prob[:, None] * by_log_std + by_entropy[:, None], 0)
            surrogate = tl.minimum(ratio * advantage, clipped * advantage)
            first += tl.sum(tl.where(inside, -weight * surrogate, 0.0))
            second += tl.sum(tl.where(inside, entropy, 0.0))
            third += tl.sum(ratio - 1.0 - log_ratio)
            fourth += tl.sum((tl.abs(ratio - 1.0) > clip).to(tl.float32))
        else:
            value = tl.sum(tl.where(output[None, :] == 0, y, 0.0), 1)
            target = tl.load(returns + i, mask=inside, other=0.0)
            error = value - target
            slope = inside
            if CLIP_VALUES:
                old = tl.load(values + i, mask=inside, other=0.0)
                moved = tl.minimum(tl.maximum(value - old, -VALUE_RANGE), VALUE_RANGE)
                slope = inside & (tl.abs(value - old) <= VALUE_RANGE)
                error = old + moved - target
            error = tl.where(inside, error, 0.0)
            by_value = tl.where(slope, 2.0 * VALUE * share * error, 0.0)
            dy = tl.where(output[None, :] == 0, by_value[:, None], 0.0)
            first += tl.sum(error * error)
        dw3 += tl.dot(tl.trans(dy), h2, input_precision=PRECISION)
        db3 += tl.sum(dy, 0)
        d2 = _through_activation(tl.dot(dy, w3, input_precision=PRECISION), h2, ACTIVATION)
        dw2 += tl.dot(tl.trans(d2), h1, input_precision=PRECISION)
        db2 += tl.sum(d2, 0)
        d1 = _through_activation(tl.dot(d2, w2, input_precision=PRECISION), h1, ACTIVATION)
        dw1 += tl.dot(tl.trans(d1), x, input_precision=PRECISION)
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
        tl.store(sums + block * SUMS, first)
        tl.store(sums + block * SUMS + 2, second)
        tl.store(sums + block * SUMS + 3, third)
        tl.store(sums + block * SUMS + 4, fourth)
    else:
        tl.store(sums + block * SUMS + 1, first)


@triton.jit
def _minibatch_gradient(
    rows,  # [S, ROW] float32 words
    masks,  # the same memory as bytes, from the first mask on
    actions,  # [S, heads + reals]
    log_probs, values, advantages, returns, weights,  # [S]
    order,  # [SAMPLES] int64: which samples are the minibatch
    advantage_norm,  # mean of its advantages, and one over their deviation
    clip_range, norm_shift, norm_scale,
    parameters,  # [FLAT]
    gradients,  # [BLOCKS, FLAT]
    sums,  # [BLOCKS, SUMS]: policy loss, value loss, entropy, KL, clipped
    ACTOR_PLACES: tl.constexpr, CRITIC_PLACES: tl.constexpr,  # weights and bias of each layer in `parameters`
    LOG_STD: tl.constexpr, SAMPLES: tl.constexpr, FLAT: tl.constexpr,
    ROW: tl.constexpr, INS: tl.constexpr, INS_UP: tl.constexpr, UNITS: tl.constexpr, OUTS: tl.constexpr,
    OUTS_UP: tl.constexpr, HEADS: tl.constexpr, STARTS: tl.constexpr, REALS: tl.constexpr, LOGITS: tl.constexpr,
    MASKED: tl.constexpr, WEIGHTED: tl.constexpr, NORMALISE: tl.constexpr, CLIP_VALUES: tl.constexpr,
    VALUE_RANGE: tl.constexpr, ENTROPY: tl.constexpr, VALUE: tl.constexpr,
    ACTIVATION: tl.constexpr, PRECISION: tl.constexpr, BLOCKS: tl.constexpr, BM: tl.constexpr, SUMS: tl.constexpr,
):  # fmt: skip
    if tl.program_id(1) == 0:
        _network_gradient(
            rows, masks, actions, log_probs, values, advantages, returns, weights, order, advantage_norm, clip_range,
            norm_shift, norm_scale, parameters, gradients, sums,
            True, ACTOR_PLACES, LOG_STD, SAMPLES, FLAT, ROW, INS, INS_UP, UNITS, OUTS, OUTS_UP,
            HEADS, STARTS, REALS, LOGITS, MASKED, WEIGHTED, NORMALISE, CLIP_VALUES, VALUE_RANGE, ENTROPY, VALUE,
            ACTIVATION, PRECISION, BLOCKS, BM, SUMS,
        )  # fmt: skip
    else:
        _network_gradient(
            rows, masks, actions, log_probs, values, advantages, returns, weights, order, advantage_norm, clip_range,
            norm_shift, norm_scale, parameters, gradients, sums,
            False, CRITIC_PLACES, LOG_STD, SAMPLES, FLAT, ROW, INS, INS_UP, UNITS, 1, 16,
            HEADS, STARTS, REALS, LOGITS, MASKED, WEIGHTED, NORMALISE, CLIP_VALUES, VALUE_RANGE, ENTROPY, VALUE,
            ACTIVATION, PRECISION, BLOCKS, BM, SUMS,
        )  # fmt: skip


class FusedMinibatch:
    """Puts a minibatch's gradient where autograd would; `of` says None where a policy is not of the kind."""

    def __init__(
        self,
        policy: Policy,
        parameters: FlatParameters,
        clip_range: Tensor,
        constants: dict[str, Any],
        *,
        normalize_advantage: bool,
    ) -> None:
        self._policy, self._parameters, self._clip_range, self._constants = policy, parameters, clip_range, constants
        self._normalize = normalize_advantage
        flat = parameters.flat
        # Padding between parameters is never written and stays 0.
        self._gradients = torch.zeros(constants["BLOCKS"], flat.numel(), device=flat.device)
        self._sums = torch.zeros(constants["BLOCKS"], _SUMS, device=flat.device)
        self._nothing = torch.zeros(1, device=flat.device)
        self._plain = torch.tensor([0.0, 1.0], device=flat.device)

    @staticmethod
    def of(policy: Policy, parameters: FlatParameters, recipe: Recipe, clip_range: Tensor) -> FusedMinibatch | None:
        """For these parameters of `policy`; None if the kernel has no such network."""
        distribution, trunks = policy.distribution, (policy.actor_trunk, policy.critic_trunk)
        arch = recipe.network_arch
        kinds = {type(layer) for trunk in trunks if trunk for layer in trunk if not isinstance(layer, nn.Linear)}
        outputs = distribution.n_logits + distribution.reals
        if (
            policy.critic_trunk is None
            or policy.core is not None
            or not policy.encoder.is_plain
            or len(arch) != 2
            or arch[0] != arch[1]
            or arch[0] not in _UNITS
            or not kinds <= _ACTIVATIONS.keys()
            or policy.encoder.n_numbers > _MOST_INPUTS
            or outputs > _MOST_OUTPUTS
            or distribution.heads > _MOST_HEADS
        ):
            return None
        assert isinstance(recipe.batch_size, int)
        linears: list[list[Any]] = [
            [layer for layer in trunk if isinstance(layer, nn.Linear)] + [head]
            for trunk, head in ((policy.actor_trunk, policy.actor_head), (policy.critic_trunk, policy.critic_head))
        ]
        places = [tuple(p.storage_offset() for layer in net for p in (layer.weight, layer.bias)) for net in linears]
        rows = policy.rows
        constants = {
            "ACTOR_PLACES": places[0],
            "CRITIC_PLACES": places[1],
            "LOG_STD": policy.log_std.storage_offset() if distribution.reals else 0,
            "SAMPLES": recipe.batch_size,
            "FLAT": parameters.flat.numel(),
            "ROW": rows.row_bytes // 4,
            "INS": policy.encoder.n_numbers,
            "INS_UP": max(16, triton.next_power_of_2(policy.encoder.n_numbers)),
            "UNITS": arch[0],
            "OUTS": outputs,
            "OUTS_UP": max(16, triton.next_power_of_2(outputs)),
            "HEADS": distribution.nvec,
            "STARTS": tuple(sum(distribution.nvec[:head]) for head in range(distribution.heads)),
            "REALS": distribution.reals,
            "LOGITS": distribution.n_logits,
            "MASKED": policy.masked,
            "NORMALISE": policy.encoder.norm is not None,
            "CLIP_VALUES": recipe.clip_range_vf is not None,
            "VALUE_RANGE": recipe.clip_range_vf or 0.0,
            "ENTROPY": recipe.ent_coef,
            "VALUE": recipe.vf_coef,
            "ACTIVATION": _ACTIVATIONS[kinds.pop()],
            "PRECISION": "tf32" if torch.get_float32_matmul_precision() == "high" else "ieee",
            "BLOCKS": min(_BLOCKS, triton.cdiv(recipe.batch_size, _ROWS)),
            "BM": _ROWS,
            "SUMS": _SUMS,
        }
        normalize = recipe.normalize_advantage
        return FusedMinibatch(policy, parameters, clip_range, constants, normalize_advantage=normalize)

    @torch.no_grad()
    def gradient(self, batch: Any, order: Tensor) -> Tensor:
        """Put the gradient of the samples `order` of `batch` in place; returns the means of what is logged [5]."""
        norm, nothing = self._policy.encoder.norm, self._nothing
        advantage_norm = self._plain
        if self._normalize:
            deviation, mean = torch.std_mean(batch.advantages.view(-1)[order])
            advantage_norm = torch.stack((mean, 1.0 / (deviation + 1e-8)))
        rows = batch.rows.view(-1, batch.rows.shape[-1])
        _minibatch_gradient[self._constants["BLOCKS"], 2](
            rows.view(torch.float32),
            rows[:, self._policy.rows.mask_offset :] if self._policy.masked else rows,
            batch.actions,
            batch.log_probs,
            batch.values,
            batch.advantages,
            batch.returns,
            nothing if batch.weights is None else batch.weights,
            order,
            advantage_norm,
            self._clip_range,
            nothing if norm is None else norm.shift,
            nothing if norm is None else norm.scale,
            self._parameters.flat,
            self._gradients,
            self._sums,
            WEIGHTED=batch.weights is not None,
            **self._constants,
            num_warps=4,
            num_stages=1,
        )
        torch.sum(self._gradients, 0, out=self._parameters.grad)
        return self._sums.sum(0)[:5] / self._constants["SAMPLES"]
