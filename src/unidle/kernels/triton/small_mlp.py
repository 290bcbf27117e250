"""A small actor-critic inside a kernel: device functions shared by the kernels that act, evaluate and learn.

One block of threads holds all weights of a network and runs a tile of observations through it; activations never leave
the chip.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import triton
import triton.language as tl
from torch import Tensor, nn

from unidle.spaces.distributions import LOG_SQRT_2PI, LOG_ZERO

ACTIVATIONS: dict[type[nn.Module], str] = {nn.Tanh: "tanh", nn.ReLU: "relu"}
_UNITS = (16, 32, 64)  # with more, the weights and their gradient do not fit on the chip together
_MAX_INPUTS, _MAX_OUTPUTS, _MAX_HEADS = 64, 32, 8
_LOG_SQRT_2PI, _LOG_ZERO = tl.constexpr(LOG_SQRT_2PI), tl.constexpr(LOG_ZERO)


@dataclass(frozen=True)
class SmallMlp:
    """Separate actor and critic MLPs of two equal hidden layers, their parameters in one flat tensor."""

    actor_offsets: tuple[int, ...]  # of each layer's weight and bias in the flat tensor
    critic_offsets: tuple[int, ...]
    log_std_offset: int
    obs_bytes: int  # of a packed observation
    mask_offset: int | None  # bytes into it; None: actions are not masked
    inputs: int
    hidden: tuple[int, ...]
    activation: str
    nvec: tuple[int, ...]  # categories of each discrete action
    reals: int  # continuous actions
    obs_clip: float | None  # bound on normalised observations; None: they are not normalised
    precision: str  # of products: ieee, tf32, bf16

    @property
    def outputs(self) -> int:
        """Outputs of the actor."""
        return sum(self.nvec) + self.reals

    def unsupported(self) -> str | None:
        """Why the kernels do not support this network; None if they do."""
        if len(self.hidden) != 2 or self.hidden[0] != self.hidden[1] or self.hidden[0] not in _UNITS:
            return f"hidden layers {self.hidden}: kernels take two of equal width, one of {_UNITS}"
        if self.activation not in ACTIVATIONS.values():
            return f"activation {self.activation}: kernels take tanh and relu"
        if self.inputs > _MAX_INPUTS:
            return f"{self.inputs} inputs: kernels take up to {_MAX_INPUTS}"
        if self.outputs > _MAX_OUTPUTS or len(self.nvec) > _MAX_HEADS:
            return f"kernels take up to {_MAX_OUTPUTS} outputs and {_MAX_HEADS} discrete actions"
        return None

    def constants(self) -> dict[str, Any]:
        """Compile-time constants of the kernels."""
        return {
            "ACTOR_OFFSETS": self.actor_offsets,
            "CRITIC_OFFSETS": self.critic_offsets,
            "LOG_STD_OFFSET": self.log_std_offset,
            "OBS_WORDS": self.obs_bytes // 4,
            "INS": self.inputs,
            "INS_P2": max(16, triton.next_power_of_2(self.inputs)),
            "UNITS": self.hidden[0],
            "OUTS": self.outputs,
            "OUTS_P2": max(16, triton.next_power_of_2(self.outputs)),
            "NVEC": self.nvec,
            "HEAD_OFFSETS": tuple(sum(self.nvec[:head]) for head in range(len(self.nvec))),
            "REALS": self.reals,
            "LOGITS": sum(self.nvec),
            "MASKED": self.mask_offset is not None,
            "NORMALISE": self.obs_clip is not None,
            "OBS_CLIP": self.obs_clip or 0.0,
            "ACTIVATION": self.activation,
            "PRECISION": self.precision,
        }


@dataclass(frozen=True)
class MlpTensors:
    """The tensors of a `SmallMlp`; they are only changed in place."""

    parameters: Tensor  # starts where the flat tensor starts
    norm_shift: Tensor  # [inputs]; not read unless observations are normalised
    norm_scale: Tensor  # [inputs]


# -- inside a kernel ---------------------------------------------------------------------------------------------------


@triton.jit
def activated(z, ACTIVATION: tl.constexpr):
    """f(z)"""
    # Not libdevice's tanh, which takes several times as long; they agree to 1e-7.
    return tl.maximum(z, 0.0) if ACTIVATION == "relu" else 1.0 - 2.0 / (tl.exp(2.0 * z) + 1.0)


@triton.jit
def activation_backward(gradient, y, ACTIVATION: tl.constexpr):
    """The gradient with respect to z, given that with respect to y = f(z)."""
    return tl.where(y > 0, gradient, 0.0) if ACTIVATION == "relu" else gradient * (1.0 - y * y)


@triton.jit
def layer_weights(
    parameters, offset, OUTS: tl.constexpr, INS: tl.constexpr, OUTS_P2: tl.constexpr, INS_P2: tl.constexpr
):
    """A layer's weights [OUTS_P2, INS_P2], zero outside [OUTS, INS]."""
    row, column = tl.arange(0, OUTS_P2)[:, None], tl.arange(0, INS_P2)[None, :]
    return tl.load(parameters + offset + row * INS + column, mask=(row < OUTS) & (column < INS), other=0.0)


@triton.jit
def layer_bias(parameters, offset, OUTS: tl.constexpr, OUTS_P2: tl.constexpr):
    """A layer's bias [OUTS_P2], zero outside [OUTS]."""
    column = tl.arange(0, OUTS_P2)
    return tl.load(parameters + offset + column, mask=column < OUTS, other=0.0)


@triton.jit
def inputs(
    obs, i, inside, norm_shift, norm_scale, OBS_WORDS: tl.constexpr, INS: tl.constexpr, INS_P2: tl.constexpr,
    NORMALISE: tl.constexpr, OBS_CLIP: tl.constexpr,
):  # fmt: skip
    """Load the observations of samples i, normalised [.., INS_P2]."""
    column = tl.arange(0, INS_P2)
    valid = inside[:, None] & (column[None, :] < INS)
    x = tl.load(obs + i[:, None] * OBS_WORDS + column[None, :], mask=valid, other=0.0)
    return normalised(x, norm_shift, norm_scale, INS, INS_P2, NORMALISE, OBS_CLIP)


@triton.jit
def normalised(
    x, norm_shift, norm_scale, INS: tl.constexpr, INS_P2: tl.constexpr, NORMALISE: tl.constexpr, OBS_CLIP: tl.constexpr
):
    """Normalise observations x [.., INS_P2], if NORMALISE."""
    if NORMALISE:
        column = tl.arange(0, INS_P2)
        x -= tl.load(norm_shift + column, mask=column < INS, other=0.0)[None, :]
        x *= tl.load(norm_scale + column, mask=column < INS, other=0.0)[None, :]
        x = tl.minimum(tl.maximum(x, -OBS_CLIP), OBS_CLIP)
    return x


@triton.jit
def product(left, right, PRECISION: tl.constexpr):
    """The matrix product left · right, accumulated in float32."""
    if PRECISION == "bf16":
        left, right = left.to(tl.bfloat16), right.to(tl.bfloat16)
    return tl.dot(left, right, input_precision="ieee" if PRECISION == "bf16" else PRECISION)


@triton.jit
def layer(x, w, b, PRECISION: tl.constexpr):
    """Linear layer: x [M, INS] · wᵀ [OUTS, INS] + b."""
    return product(x, tl.trans(w), PRECISION) + b[None, :]


@triton.jit
def network(
    x, parameters, OFFSETS: tl.constexpr, INS: tl.constexpr, INS_P2: tl.constexpr, UNITS: tl.constexpr,
    OUTS: tl.constexpr, OUTS_P2: tl.constexpr, ACTIVATION: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Outputs [M, OUTS_P2] for inputs x [M, INS_P2]."""
    w1 = layer_weights(parameters, OFFSETS[0], UNITS, INS, UNITS, INS_P2)
    w2 = layer_weights(parameters, OFFSETS[2], UNITS, UNITS, UNITS, UNITS)
    w3 = layer_weights(parameters, OFFSETS[4], OUTS, UNITS, OUTS_P2, UNITS)
    h = activated(layer(x, w1, layer_bias(parameters, OFFSETS[1], UNITS, UNITS), PRECISION), ACTIVATION)
    h = activated(layer(h, w2, layer_bias(parameters, OFFSETS[3], UNITS, UNITS), PRECISION), ACTIVATION)
    return layer(h, w3, layer_bias(parameters, OFFSETS[5], OUTS, OUTS_P2), PRECISION)


@triton.jit
def distribution(
    y, actions, masks, log_std, i, inside,
    OBS_BYTES: tl.constexpr, NVEC: tl.constexpr, HEAD_OFFSETS: tl.constexpr, REALS: tl.constexpr, LOGITS: tl.constexpr,
    OUTS_P2: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Log-probability of the actions of samples i, whose network outputs are y, the entropy, and gradients.

    The gradients are of the log-probability with respect to y, of the entropy with respect to y (with respect to
    log_std it is 1), and of the log-probability with respect to log_std, in the columns of the reals.
    """
    column = tl.arange(0, OUTS_P2)[None, :]
    log_prob = tl.zeros((y.shape[0],), tl.float32)
    entropy = tl.zeros((y.shape[0],), tl.float32)
    dlogp_dy = tl.zeros((y.shape[0], OUTS_P2), tl.float32)
    dentropy_dy = tl.zeros((y.shape[0], OUTS_P2), tl.float32)
    dlogp_dlog_std = tl.zeros((y.shape[0], OUTS_P2), tl.float32)
    width: tl.constexpr = len(NVEC) + REALS
    if MASKED:
        allowed = tl.load(masks + i[:, None] * OBS_BYTES + column, mask=inside[:, None] & (column < LOGITS), other=1)
        n_allowed = tl.sum(tl.where(column < LOGITS, allowed.to(tl.int32), 0), 1)[:, None]
        y = tl.where((allowed == 0) & (n_allowed > 0), _LOG_ZERO, y)  # an empty mask allows all
    for head in tl.static_range(len(NVEC)):
        in_head = (column >= HEAD_OFFSETS[head]) & (column < HEAD_OFFSETS[head] + NVEC[head])
        head_logits = tl.where(in_head, y, -1e30)
        head_logits -= tl.max(head_logits, 1)[:, None]
        p = tl.exp(head_logits)
        total = tl.sum(p, 1)[:, None]
        log_p = tl.where(in_head, head_logits - tl.log(total), 0.0)
        p = p / total
        taken = tl.load(actions + i * width + head, mask=inside, other=0.0).to(tl.int32)
        chosen = ((column - HEAD_OFFSETS[head]) == taken[:, None]) & in_head
        log_prob += tl.sum(tl.where(chosen, log_p, 0.0), 1)
        head_entropy = -tl.sum(p * log_p, 1)
        entropy += head_entropy
        dlogp_dy += tl.where(in_head, chosen.to(tl.float32) - p, 0.0)
        dentropy_dy -= tl.where(in_head, p * (log_p + head_entropy[:, None]), 0.0)
    if REALS:
        real = column - LOGITS
        is_real = (real >= 0) & (real < REALS)
        log_sigma = tl.load(log_std + real, mask=is_real, other=0.0)
        pointers = actions + i[:, None] * width + len(NVEC) + real
        action = tl.load(pointers, mask=inside[:, None] & is_real, other=0.0)
        z = tl.where(is_real, (action - y) * tl.exp(-log_sigma), 0.0)
        log_prob -= tl.sum(tl.where(is_real, 0.5 * z * z + log_sigma + _LOG_SQRT_2PI, 0.0), 1)
        entropy += tl.sum(tl.where(is_real, log_sigma + (0.5 + _LOG_SQRT_2PI), 0.0), 1)
        dlogp_dy += tl.where(is_real, z * tl.exp(-log_sigma), 0.0)
        dlogp_dlog_std += tl.where(is_real, z * z - 1.0, 0.0)
    return log_prob, entropy, dlogp_dy, dentropy_dy, dlogp_dlog_std
