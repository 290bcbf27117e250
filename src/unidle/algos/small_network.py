"""A small network inside a kernel (Triton): what the kernels that act, evaluate and learn have in common.

A block of threads keeps all weights of a network and takes some rows through it; activations never leave the chip.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import nn

from unidle.nn.actor_critic import ActorCritic

ACTIVATIONS: dict[type[nn.Module], str] = {nn.Tanh: "tanh", nn.ReLU: "relu"}
_UNITS = (16, 32, 64)  # more, and the weights do not fit beside their gradient
_MOST_INPUTS, _MOST_OUTPUTS, _MOST_HEADS = 64, 32, 8


def shape_of(policy: ActorCritic) -> dict[str, Any] | None:
    """What a kernel must know of `policy`, whose parameters are one flat tensor; None if it has no such network.

    It has: one vector of numbers as observation, and separate actor and critic of two equal hidden layers.
    """
    distribution, encoder = policy.distribution, policy.encoder
    if policy.critic_trunk is None or policy.core is not None or not encoder.is_plain:
        return None
    trunks = (policy.actor_trunk, policy.critic_trunk)
    kinds = {type(module) for trunk in trunks for module in trunk if not isinstance(module, nn.Linear)}
    linears: list[list[Any]] = [
        [*(module for module in trunk if isinstance(module, nn.Linear)), head]
        for trunk, head in zip(trunks, (policy.actor_head, policy.critic_head))
    ]
    units = linears[0][0].out_features
    outputs = distribution.n_logits + distribution.reals
    if (
        [module.out_features for module in linears[0][:-1]] != [units, units]
        or units not in _UNITS
        or len(kinds) != 1
        or not kinds <= ACTIVATIONS.keys()
        or encoder.n_numbers > _MOST_INPUTS
        or outputs > _MOST_OUTPUTS
        or distribution.heads > _MOST_HEADS
    ):
        return None
    places = [tuple(p.storage_offset() for module in net for p in (module.weight, module.bias)) for net in linears]
    precision = "tf32" if torch.get_float32_matmul_precision() == "high" else "ieee"
    return {
        "ACTOR_PLACES": places[0],
        "CRITIC_PLACES": places[1],
        "LOG_STD": policy.log_std.storage_offset() if distribution.reals else 0,
        "ROW": policy.obs_layout.obs_bytes // 4,
        "INS": encoder.n_numbers,
        "INS_UP": max(16, triton.next_power_of_2(encoder.n_numbers)),
        "UNITS": units,
        "OUTS": outputs,
        "OUTS_UP": max(16, triton.next_power_of_2(outputs)),
        "HEADS": distribution.nvec,
        "STARTS": tuple(sum(distribution.nvec[:head]) for head in range(distribution.heads)),
        "REALS": distribution.reals,
        "LOGITS": distribution.n_logits,
        "MASKED": policy.masked,
        "NORMALISE": encoder.norm is not None,
        "ACTIVATION": ACTIVATIONS[kinds.pop()],
        "PRECISION": "bf16" if policy.in_bf16 else precision,
    }


# -- inside a kernel ---------------------------------------------------------------------------------------------------


@triton.jit
def activated(z, ACTIVATION: tl.constexpr):
    """Give f(z)."""
    # Not libdevice's tanh, which takes several times as long; to 1e-7 of the range the same.
    return tl.maximum(z, 0.0) if ACTIVATION == "relu" else 1.0 - 2.0 / (tl.exp(2.0 * z) + 1.0)


@triton.jit
def through_activation(gradient, y, ACTIVATION: tl.constexpr):
    """The gradient by z, of that by y = f(z)."""
    return tl.where(y > 0, gradient, 0.0) if ACTIVATION == "relu" else gradient * (1.0 - y * y)


@triton.jit
def layer_weights(parameters, at, OUTS: tl.constexpr, INS: tl.constexpr, OUTS_UP: tl.constexpr, INS_UP: tl.constexpr):
    """A layer's weights [OUTS_UP, INS_UP], zero outside [OUTS, INS]."""
    row, column = tl.arange(0, OUTS_UP)[:, None], tl.arange(0, INS_UP)[None, :]
    return tl.load(parameters + at + row * INS + column, mask=(row < OUTS) & (column < INS), other=0.0)


@triton.jit
def layer_bias(parameters, at, OUTS: tl.constexpr, OUTS_UP: tl.constexpr):
    """A layer's bias [OUTS_UP], zero from OUTS on."""
    column = tl.arange(0, OUTS_UP)
    return tl.load(parameters + at + column, mask=column < OUTS, other=0.0)


@triton.jit
def inputs(
    obs, i, inside, norm_shift, norm_scale, ROW: tl.constexpr, INS: tl.constexpr, INS_UP: tl.constexpr,
    NORMALISE: tl.constexpr,
):  # fmt: skip
    """Observations [.., INS_UP] of samples i, as the encoder gives them."""
    column = tl.arange(0, INS_UP)
    x = tl.load(obs + i[:, None] * ROW + column[None, :], mask=inside[:, None] & (column[None, :] < INS), other=0.0)
    return normalised(x, norm_shift, norm_scale, INS, INS_UP, NORMALISE)


@triton.jit
def normalised(x, norm_shift, norm_scale, INS: tl.constexpr, INS_UP: tl.constexpr, NORMALISE: tl.constexpr):
    """Observations x [.., INS_UP] as the encoder gives them."""
    if NORMALISE:
        column = tl.arange(0, INS_UP)
        x -= tl.load(norm_shift + column, mask=column < INS, other=0.0)[None, :]
        x *= tl.load(norm_scale + column, mask=column < INS, other=0.0)[None, :]
        x = tl.minimum(tl.maximum(x, -10.0), 10.0)
    return x


@triton.jit
def product(left, right, PRECISION: tl.constexpr):
    """The matrix product left · right, summed in float32."""
    if PRECISION == "bf16":
        left, right = left.to(tl.bfloat16), right.to(tl.bfloat16)
    return tl.dot(left, right, input_precision="ieee" if PRECISION == "bf16" else PRECISION)


@triton.jit
def layer(x, w, b, PRECISION: tl.constexpr):
    """Of x [M, INS]: x · wᵀ [OUTS, INS] + b."""
    return product(x, tl.trans(w), PRECISION) + b[None, :]


@triton.jit
def network(
    x, parameters, PLACES: tl.constexpr, INS: tl.constexpr, INS_UP: tl.constexpr, UNITS: tl.constexpr,
    OUTS: tl.constexpr, OUTS_UP: tl.constexpr, ACTIVATION: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Outputs [M, OUTS_UP] for inputs x [M, INS_UP]."""
    w1 = layer_weights(parameters, PLACES[0], UNITS, INS, UNITS, INS_UP)
    w2 = layer_weights(parameters, PLACES[2], UNITS, UNITS, UNITS, UNITS)
    w3 = layer_weights(parameters, PLACES[4], OUTS, UNITS, OUTS_UP, UNITS)
    h = activated(layer(x, w1, layer_bias(parameters, PLACES[1], UNITS, UNITS), PRECISION), ACTIVATION)
    h = activated(layer(h, w2, layer_bias(parameters, PLACES[3], UNITS, UNITS), PRECISION), ACTIVATION)
    return layer(h, w3, layer_bias(parameters, PLACES[5], OUTS, OUTS_UP), PRECISION)


@triton.jit
def distribution(
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
