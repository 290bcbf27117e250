"""A small MLP in NumPy, for a CPU, where torch's overhead per operation exceeds the work on small tensors.

The arrays are views of the torch modules' parameters and gradients (see `nn.numpy_views`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

_MAX_OUTPUTS = 1 << 18  # of a layer over all rows; with more, several threads of torch may be faster
_MAX_HEADS = 8  # each costs a few operations here, while torch does all in one
# Multiplications up to which OpenBLAS, the one in NumPy's wheels, keeps a product to one thread (with a vector: below
# 9,216). Above, torch's is as fast and respects its thread limit: the other cores belong to the environments.
_MAX_MATRIX_PRODUCT, _MAX_VECTOR_PRODUCT = 1 << 18, 9000
_ALIGNMENT = 64  # bytes, of tensors that torch allocates


def unsupported(widths: Sequence[int], activation: str, n_heads: int, rows: int) -> str | None:
    """Why NumPy does not support a network of these hidden layers with `rows` rows at a time; None if it does."""
    if not widths:
        return "the network has no hidden layer"
    if activation not in _ACTIVATIONS:
        return f"activation {activation}: NumPy has tanh and relu"
    if n_heads > _MAX_HEADS:
        return f"{n_heads} discrete actions: NumPy takes up to {_MAX_HEADS}"
    if rows * max(widths) > _MAX_OUTPUTS:
        return f"{rows} rows of {max(widths)} units: torch is faster"
    return None


def product(left: np.ndarray, right: np.ndarray, out: np.ndarray | None = None) -> np.ndarray:
    """The matrix product left · right."""
    rows, columns = len(left), right.shape[1]
    limit = _MAX_VECTOR_PRODUCT if rows == 1 or columns == 1 else _MAX_MATRIX_PRODUCT
    if rows * len(right) * columns <= limit:
        return np.matmul(left, right, out=out)
    result = torch.empty(rows, columns) if out is None else torch.from_numpy(out)
    torch.mm(_aligned(left), _aligned(right), out=result)
    return result.numpy()


def _aligned(array: np.ndarray) -> torch.Tensor:
    """`array` with torch's alignment: on some machines the last bits of its products depend on it."""
    tensor = torch.from_numpy(array)
    return tensor.clone() if tensor.data_ptr() % _ALIGNMENT else tensor


@dataclass
class Layer:
    """x [n, ins] → x · weightᵀ + bias [n, outs]."""

    weight: np.ndarray  # [outs, ins]
    bias: np.ndarray  # [outs]
    grads: tuple[np.ndarray, np.ndarray] | None  # of both; None: the layer is not trained

    def __call__(self, x: np.ndarray) -> np.ndarray:
        """The outputs for x."""
        y = product(x, self.weight.T)
        y += self.bias
        return y

    def back(self, x: np.ndarray, by_y: np.ndarray) -> None:
        """Write the layer's gradients, given its input x and the gradient with respect to its outputs."""
        assert self.grads is not None
        product(by_y.T, x, self.grads[0])
        np.add.reduce(by_y, 0, out=self.grads[1])


@dataclass
class _Activation:
    """A function and its backward pass, both in place."""

    apply: Callable[[np.ndarray], object]  # z becomes y = f(z)
    back: Callable[[np.ndarray, np.ndarray], None]  # (gradient by y, y): the first becomes the gradient by z


def _back_through_tanh(gradient: np.ndarray, y: np.ndarray) -> None:
    slope = y * y
    np.subtract(1.0, slope, out=slope)
    gradient *= slope


def _back_through_relu(gradient: np.ndarray, y: np.ndarray) -> None:
    gradient *= y > 0.0


_ACTIVATIONS: dict[str, _Activation] = {
    "tanh": _Activation(lambda z: np.tanh(z, out=z), _back_through_tanh),
    "relu": _Activation(lambda z: np.maximum(z, 0.0, out=z), _back_through_relu),
}


@dataclass
class Trunk:
    """Layers with an activation after each."""

    layers: Sequence[Layer]
    activation: str

    def __call__(self, x: np.ndarray) -> list[np.ndarray]:
        """The input of each layer, and the last one's output."""
        passed = [x]
        for layer in self.layers:
            passed.append(layer(passed[-1]))
            _ACTIVATIONS[self.activation].apply(passed[-1])
        return passed

    def back(self, passed: list[np.ndarray], gradient: np.ndarray) -> None:
        """Write the layers' gradients, given that with respect to the output."""
        for number in reversed(range(len(self.layers))):
            layer = self.layers[number]
            _ACTIVATIONS[self.activation].back(gradient, passed[number + 1])
            layer.back(passed[number], gradient)
            if number:
                gradient = product(gradient, layer.weight)


@dataclass
class Inputs:
    """Packed observations [n, obs_bytes] → inputs of the first layers [n, ins], and forbidden actions [n, logits]."""

    n_inputs: int
    norm: tuple[np.ndarray, np.ndarray, float] | None  # shift, scale and clip; None: observations are not normalised
    mask: slice | None  # bytes of the action mask

    def __call__(self, obs: np.ndarray) -> tuple[np.ndarray, np.ndarray | None]:
        """`obs` must be contiguous; None: every action is allowed."""
        x = obs.view(np.float32)[:, : self.n_inputs]
        if self.norm is not None:
            shift, scale, clip = self.norm
            x = (x - shift) * scale
            np.clip(x, -clip, clip, out=x)
        return x, None if self.mask is None else obs[:, self.mask] == 0


@dataclass
class Actor:
    """Inputs, trunk and head of an actor, for actions of categories `nvec` and Gaussians of `log_std`."""

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
