"""A small MLP in NumPy, for a CPU, where torch's overhead per operation exceeds the work on small tensors.

The arrays are views of the torch modules' parameters and gradients (see `nn.numpy_views`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from unidle.kernels.numpy.product import MAX_NUMPY_SIZE, linear, product

_MAX_OUTPUTS = 1 << 18  # of a layer over all rows; with more, several threads of torch may be faster
_MAX_HEADS = 8  # each costs a few operations here, while torch computes all of them at once


def unsupported(widths: Sequence[int], activation: str, n_heads: int, rows: int) -> str | None:
    """Why NumPy does not support these hidden layers on batches of `rows`; None if it does."""
    if not widths:
        return "the network has no hidden layer"
    if activation not in _ACTIVATIONS:
        return f"activation {activation}: NumPy supports tanh and relu"
    if n_heads > _MAX_HEADS:
        return f"{n_heads} discrete actions: NumPy supports up to {_MAX_HEADS}"
    if rows * max(widths) > _MAX_OUTPUTS:
        return f"{rows} rows of {max(widths)} units: torch is faster"
    return None


@dataclass
class Layer:
    """x [n, ins] → x · weightᵀ + bias [n, outs]."""

    weight: np.ndarray  # [outs, ins]
    bias: np.ndarray  # [outs]
    grads: tuple[np.ndarray, np.ndarray] | None  # of weight and bias; None: the layer is not trained

    def __call__(self, x: np.ndarray) -> np.ndarray:
        """The outputs for x."""
        return linear(x, self.weight, self.bias)

    def backward(self, x: np.ndarray, dy: np.ndarray) -> None:
        """Write the layer's gradients, given its input x and the gradient with respect to its outputs."""
        assert self.grads is not None
        product(dy.T, x, self.grads[0])
        np.add.reduce(dy, 0, out=self.grads[1])


@dataclass
class _Activation:
    """A function and its backward pass, both in place."""

    apply: Callable[[np.ndarray], object]  # z becomes y = f(z)
    backward: Callable[[np.ndarray, np.ndarray], None]  # (dy, y): dy becomes dz


def _tanh_backward(gradient: np.ndarray, y: np.ndarray) -> None:
    slope = y * y
    np.subtract(1.0, slope, out=slope)
    gradient *= slope


def _relu(z: np.ndarray) -> None:
    if z.size > MAX_NUMPY_SIZE:
        torch.from_numpy(z).relu_()
    else:
        np.maximum(z, 0.0, out=z)


def _relu_backward(gradient: np.ndarray, y: np.ndarray) -> None:
    if gradient.size > MAX_NUMPY_SIZE:
        dy = torch.from_numpy(gradient)
        torch.ops.aten.threshold_backward.grad_input(dy, torch.from_numpy(y), 0.0, grad_input=dy)
    else:
        gradient *= y > 0.0


_ACTIVATIONS: dict[str, _Activation] = {
    "tanh": _Activation(lambda z: np.tanh(z, out=z), _tanh_backward),
    "relu": _Activation(_relu, _relu_backward),
}


@dataclass
class Trunk:
    """Layers with an activation after each."""

    layers: Sequence[Layer]
    activation: str

    def __call__(self, x: np.ndarray) -> list[np.ndarray]:
        """The input of each layer, and the last one's output."""
        activations = [x]
        for layer in self.layers:
            activations.append(layer(activations[-1]))
            _ACTIVATIONS[self.activation].apply(activations[-1])
        return activations

    def backward(self, activations: list[np.ndarray], gradient: np.ndarray) -> None:
        """Write the layers' gradients, given the gradient with respect to the output."""
        for i in reversed(range(len(self.layers))):
            layer = self.layers[i]
            _ACTIVATIONS[self.activation].backward(gradient, activations[i + 1])
            layer.backward(activations[i], gradient)
            if i:
                gradient = product(gradient, layer.weight)

    def input_gradient(self, activations: list[np.ndarray], gradient: np.ndarray, inputs: slice) -> np.ndarray:
        """The gradient with respect to these columns of the input, given that with respect to the output."""
        for layer, y in zip(reversed(self.layers), reversed(activations)):
            _ACTIVATIONS[self.activation].backward(gradient, y)
            gradient = product(gradient, layer.weight[:, inputs] if layer is self.layers[0] else layer.weight)
        return gradient


@dataclass
class Network:
    """A trunk, and a head without an activation."""

    trunk: Trunk
    head: Layer

    def __call__(self, x: np.ndarray) -> tuple[list[np.ndarray], np.ndarray]:
        """The trunk's activations, and the outputs [n, outs]."""
        activations = self.trunk(x)
        return activations, self.head(activations[-1])

    def backward(self, activations: list[np.ndarray], d_y: np.ndarray) -> None:
        """Write the layers' gradients, given the gradient with respect to the outputs."""
        self.head.backward(activations[-1], d_y)
        self.trunk.backward(activations, product(d_y, self.head.weight))

    def input_gradient(self, activations: list[np.ndarray], d_y: np.ndarray, inputs: slice) -> np.ndarray:
        """The gradient with respect to these columns of the input."""
        return self.trunk.input_gradient(activations, product(d_y, self.head.weight), inputs)


@dataclass
class Inputs:
    """Packed observations [n, obs_bytes] → inputs of the first layers [n, ins], and masked actions [n, logits]."""

    n_inputs: int
    norm: tuple[np.ndarray, np.ndarray, float] | None  # shift, scale and clip; None: observations are not normalised
    mask: slice | None  # bytes of the action mask

    def __call__(self, obs: np.ndarray) -> tuple[np.ndarray, np.ndarray | None]:
        """`obs` must be contiguous; None: every action is allowed. An empty mask allows all."""
        x = obs.view(np.float32)[:, : self.n_inputs]
        if self.norm is not None:
            shift, scale, clip = self.norm
            x = (x - shift) * scale
            np.clip(x, -clip, clip, out=x)
        if self.mask is None:
            return x, None
        masked_out = obs[:, self.mask] == 0
        masked_out &= ~masked_out.all(1, keepdims=True)
        return x, masked_out


@dataclass
class Actor:
    """Inputs, trunk and head of an actor, for discrete actions with `nvec` categories and Gaussians with `log_std`."""

    inputs: Inputs
    trunk: Trunk
    head: Layer
    nvec: tuple[int, ...]
    log_std: np.ndarray  # [reals]

    @property
    def n_logits(self) -> int:
        """Outputs that are logits; the rest are means."""
        return sum(self.nvec)


@dataclass
class ActorCritic:
    """An actor and its critic, for training."""

    actor: Actor
    critic_trunk: Trunk | None  # None: the actor's
    critic_head: Layer
    log_std_grad: np.ndarray  # [reals]
