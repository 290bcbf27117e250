"""A small MLP in NumPy, for a CPU, where torch's overhead per operation exceeds the work on small tensors.

The arrays are views of the torch modules' parameters and gradients (see `nn.numpy_views`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

_MAX_OUTPUTS = 1 << 18  # of a layer over all rows; with more, several threads of torch may be faster
_MAX_HEADS = 8  # each costs a few operations here, while torch computes all of them at once
# Multiplications up to which OpenBLAS (which is in NumPy's wheels) computes a product in one thread (with a vector:
# below 9,216). Above, torch is as fast and respects its thread limit: the other cores belong to the environments.
_MAX_MATRIX_PRODUCT, _MAX_VECTOR_PRODUCT = 1 << 18, 9000
_ALIGNMENT = 64  # bytes, of tensors that torch allocates
_MAX_NUMPY_SIZE = 1 << 13  # numbers; on larger arrays torch's loops are so much faster that its overhead is worth it


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


def product(left: np.ndarray, right: np.ndarray, out: np.ndarray | None = None) -> np.ndarray:
    """The matrix product left · right."""
    rows, columns = len(left), right.shape[1]
    is_small = rows * columns <= _MAX_NUMPY_SIZE
    if len(right) == 1 and is_small:
        return np.multiply(left, right, out=out)
    limit = _MAX_VECTOR_PRODUCT if rows == 1 or columns == 1 else _MAX_MATRIX_PRODUCT
    in_numpy = len(right) > 1 and rows * len(right) * columns <= limit
    if out is None and not (in_numpy and is_small):
        out = torch.empty(rows, columns).numpy()  # aligned, so that the next product need not copy it
    if in_numpy:
        return np.matmul(left, right, out=out)
    assert out is not None
    if len(right) == 1:  # NumPy's matmul takes ten times as long
        torch.mul(torch.from_numpy(left), torch.from_numpy(right), out=torch.from_numpy(out))
    else:
        torch.mm(_aligned(left), _aligned(right), out=torch.from_numpy(out))
    return out


def _aligned(array: np.ndarray) -> torch.Tensor:
    """`array` as a tensor with torch's alignment: on some machines the last bits of its products depend on it."""
    tensor = torch.from_numpy(array)
    return tensor.clone() if tensor.data_ptr() % _ALIGNMENT else tensor


@dataclass
class Layer:
    """x [n, ins] → x · weightᵀ + bias [n, outs]."""

    weight: np.ndarray  # [outs, ins]
    bias: np.ndarray  # [outs]
    grads: tuple[np.ndarray, np.ndarray] | None  # of weight and bias; None: the layer is not trained

    def __call__(self, x: np.ndarray) -> np.ndarray:
        """The outputs for x."""
        y = product(x, self.weight.T)
        if y.size > _MAX_NUMPY_SIZE:
            torch.from_numpy(y).add_(torch.from_numpy(self.bias))
        else:
            y += self.bias
        return y

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
    if z.size > _MAX_NUMPY_SIZE:
        torch.from_numpy(z).relu_()
    else:
        np.maximum(z, 0.0, out=z)


def _relu_backward(gradient: np.ndarray, y: np.ndarray) -> None:
    if gradient.size > _MAX_NUMPY_SIZE:
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
