"""Multi-layer perceptrons, with orthogonal initialisation by default."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor, nn

from unidle.kernels.dispatch import Dispatch, compare, warn

_Layer = TypeVar("_Layer", nn.Linear, nn.Conv2d)
FusedLayer = Callable[[Tensor, Tensor, Tensor], Tensor]  # inputs [n, ins], weight, bias → outputs
_TEST_SHAPES = ((21, (7, 3)), (15, (5, 3)), (5, (5,)))  # size and shape of inputs, weight and bias to verify with
ACTIVATIONS: dict[str, type[nn.Module]] = {
    "tanh": nn.Tanh,
    "relu": nn.ReLU,
    "elu": nn.ELU,
    "silu": nn.SiLU,
    "gelu": nn.GELU,
}


def orthogonal(layer: _Layer, gain: float = math.sqrt(2)) -> _Layer:
    """Initialise `layer` with orthogonal weights of this gain and zero bias."""
    nn.init.orthogonal_(layer.weight, gain)
    if layer.bias is not None:
        nn.init.zeros_(layer.bias)
    return layer


@functools.cache
def _fused_layers() -> dict[type[nn.Module], FusedLayer]:
    """Activation → linear layer fused with it, on a GPU; empty if they do not work here."""
    # They need Triton, which torch does not include on every platform, and a C compiler.
    return Dispatch(warn).choose("Linear layers", {}, _triton_layers, _verify_layers)


def _triton_layers() -> dict[type[nn.Module], FusedLayer]:
    from unidle.kernels.triton.linear_activation import linear_relu, linear_tanh

    return {nn.Tanh: linear_tanh, nn.ReLU: linear_relu}


def _verify_layers(layers: dict[type[nn.Module], FusedLayer]) -> None:
    """RuntimeError unless values and gradients agree with torch's."""
    with torch.enable_grad(), torch.autocast("cuda", enabled=False):
        inputs = [torch.linspace(-1, 1, n, device="cuda").view(*shape).requires_grad_() for n, shape in _TEST_SHAPES]
        for activation, layer in layers.items():
            found, expected = layer(*inputs), activation()(nn.functional.linear(*inputs))
            compare("layers", found, expected)
            for ours, theirs in zip(*(torch.autograd.grad(y.square().sum(), inputs) for y in (found, expected))):
                compare("gradients of layers", ours, theirs)


def uses_triton_layers() -> bool:
    """Whether linear layers run on unidle's Triton kernels on this GPU."""
    return bool(_fused_layers())


class Mlp(nn.Sequential):
    """Linear layers with an activation after each."""

    def forward(self, values: Tensor) -> Tensor:
        """[.., inputs] → [.., outputs]"""
        needs_grad = values.is_cuda and torch.is_grad_enabled()  # only the backward pass is fused
        layer = _fused_layers().get(type(self[1])) if len(self) and needs_grad else None
        flat = values.reshape(-1, values.shape[-1])  # with more dimensions, torch takes a slower path
        if layer is None:
            flat = super().forward(flat)
        else:
            for linear in self:
                if isinstance(linear, nn.Linear):
                    flat = layer(flat, linear.weight, linear.bias)
        return flat.view(*values.shape[:-1], flat.shape[-1])


def mlp(n_inputs: int, widths: tuple[int, ...], activation: str, *, orthogonal_init: bool = True) -> Mlp:
    """Linear layers of these widths with an activation after each; orthogonal or torch's default initialisation."""
    layers: list[nn.Module] = []
    for width in widths:
        linear = nn.Linear(n_inputs, width)
        layers += [orthogonal(linear) if orthogonal_init else linear, ACTIVATIONS[activation]()]
        n_inputs = width
    return Mlp(*layers)
