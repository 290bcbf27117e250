"""A small network in NumPy, for a CPU: there torch takes longer to begin an operation on few numbers than to do it.

The arrays are views of the torch modules' own parameters and of their gradients, so both always see the same numbers,
as long as nobody binds those anew (FlatParameters does, so it comes first).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from unidle.nn.actor_critic import ActorCritic
from unidle.nn.encoder import CLIP
from unidle.nn.optim.flat_parameters import FlatParameters
from unidle.spaces.distributions import KERNEL_DISTRIBUTIONS

_MOST_NUMBERS = 1 << 18  # that come out of a layer; with more, several threads of torch may be quicker
_MOST_HEADS = 8  # each is a few operations of its own here, and all are one with torch
# Multiplications up to which OpenBLAS, the one in NumPy's wheels, keeps a product to one thread (with a vector: below
# 9,216). Above, torch's is as quick, and it keeps to the threads that it was given: the cores are the environments'.
_MOST_OF_MATRICES, _MOST_WITH_A_VECTOR = 1 << 18, 9000
_ALIGNMENT = 64  # bytes, of torch's own tensors


def is_small(policy: ActorCritic, obs: int) -> bool:
    """Whether `policy` is of a kind that is known here, and quicker so with that many rows at a time."""
    trunks = [trunk for trunk in (policy.actor_trunk, policy.critic_trunk) if trunk is not None]
    return (
        policy.core is None
        and policy.encoder.is_plain
        and policy.distribution.name in KERNEL_DISTRIBUTIONS
        and policy.distribution.heads <= _MOST_HEADS
        and all(len(trunk) and type(trunk[1]) in _ACTIVATIONS for trunk in trunks)
        and obs * max(layer.out_features for layer in trunks[0] if isinstance(layer, nn.Linear)) <= _MOST_NUMBERS
    )


def product(left: np.ndarray, right: np.ndarray, out: np.ndarray | None = None) -> np.ndarray:
    """The matrix product left · right."""
    obs, columns = len(left), right.shape[1]
    most = _MOST_WITH_A_VECTOR if obs == 1 or columns == 1 else _MOST_OF_MATRICES
    if obs * len(right) * columns <= most:
        return np.matmul(left, right, out=out)
    result = torch.empty(obs, columns) if out is None else torch.from_numpy(out)
    torch.mm(_aligned(left), _aligned(right), out=result)
    return result.numpy()


def _aligned(array: np.ndarray) -> torch.Tensor:
    """The same numbers where torch would have put them: on some machines the last bits of its products depend on it."""
    tensor = torch.from_numpy(array)
    return tensor.clone() if tensor.data_ptr() % _ALIGNMENT else tensor


@dataclass
class Layer:
    """x [n, ins] → x · weightᵀ + bias [n, outs]."""

    weight: np.ndarray  # [outs, ins]
    bias: np.ndarray  # [outs]
    grads: tuple[np.ndarray, np.ndarray] | None  # of both, if anybody learns here

    @staticmethod
    def of(linear: nn.Linear, parameters: FlatParameters | None = None) -> Layer:
        """The same layer as `linear`; with `parameters`, which must hold it, it can be learned."""
        weight, bias = linear.weight.detach().numpy(), linear.bias.detach().numpy()
        if parameters is None:
            return Layer(weight, bias, None)
        return Layer(weight, bias, (parameters.grad_of(linear.weight).numpy(), parameters.grad_of(linear.bias).numpy()))

    def __call__(self, x: np.ndarray) -> np.ndarray:
        """What comes out where x goes in."""
        y = product(x, self.weight.T)
        y += self.bias
        return y

    def back(self, x: np.ndarray, by_y: np.ndarray) -> None:
        """Put the layer's gradients in place, where x went in and `by_y` is the gradient by what came out."""
        assert self.grads is not None
        product(by_y.T, x, self.grads[0])
        np.add.reduce(by_y, 0, out=self.grads[1])


@dataclass
class _Activation:
    """Both work in place."""

    apply: Callable[[np.ndarray], object]  # z becomes y = f(z)
    back: Callable[[np.ndarray, np.ndarray], None]  # of (gradient by y, y) the first becomes the gradient by z


def _back_through_tanh(gradient: np.ndarray, y: np.ndarray) -> None:
    slope = y * y
    np.subtract(1.0, slope, out=slope)
    gradient *= slope


def _back_through_relu(gradient: np.ndarray, y: np.ndarray) -> None:
    gradient *= y > 0.0


_ACTIVATIONS: dict[type[nn.Module], _Activation] = {
    nn.Tanh: _Activation(lambda z: np.tanh(z, out=z), _back_through_tanh),
    nn.ReLU: _Activation(lambda z: np.maximum(z, 0.0, out=z), _back_through_relu),
}


@dataclass
class Trunk:
    """Layers with an activation after each."""

    layers: Sequence[Layer]
    activation: _Activation

    @staticmethod
    def of(mlp: nn.Sequential, parameters: FlatParameters | None = None) -> Trunk:
        """The same layers as those of `mlp`, which has some (see `is_small`)."""
        layers = [Layer.of(module, parameters) for module in mlp if isinstance(module, nn.Linear)]
        return Trunk(layers, _ACTIVATIONS[type(mlp[1])])

    def __call__(self, x: np.ndarray) -> list[np.ndarray]:
        """What goes into each layer, and at last what comes out."""
        passed = [x]
        for layer in self.layers:
            passed.append(layer(passed[-1]))
            self.activation.apply(passed[-1])
        return passed

    def back(self, passed: list[np.ndarray], gradient: np.ndarray) -> None:
        """Put the layers' gradients in place, given that by what came out."""
        for number in reversed(range(len(self.layers))):
            layer = self.layers[number]
            self.activation.back(gradient, passed[number + 1])
            layer.back(passed[number], gradient)
            if number:
                gradient = product(gradient, layer.weight)


class Inputs:
    """Rows [n, obs_bytes] → what goes into the first layers [n, ins], and what may not be done [n, logits] or None."""

    def __init__(self, policy: ActorCritic) -> None:
        """`policy`'s encoder must be a plain one."""
        self._ins, self._norm = policy.encoder.n_numbers, policy.encoder.norm
        start, width = policy.obs_layout.mask_offset, policy.obs_layout.mask_width
        self._mask = slice(start, start + width) if width else None

    def __call__(self, obs: np.ndarray) -> tuple[np.ndarray, np.ndarray | None]:
        """`obs` must be contiguous."""
        x = obs.view(np.float32)[:, : self._ins]
        if self._norm is not None:
            x = (x - self._norm.shift.numpy()) * self._norm.scale.numpy()
            np.clip(x, -CLIP, CLIP, out=x)
        return x, None if self._mask is None else obs[:, self._mask] == 0
