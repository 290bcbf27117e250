"""MLPs: layers, activations and initial weights."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from unidle.nn.mlp import ACTIVATIONS, mlp, orthogonal


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_mlp_has_activation_after_each_layer(activation: str) -> None:
    net = mlp(3, (5, 7), activation)
    kinds = [type(layer) for layer in net]
    assert kinds == [nn.Linear, ACTIVATIONS[activation], nn.Linear, ACTIVATIONS[activation]]
    assert net(torch.zeros(2, 4, 3)).shape == (2, 4, 7)


def test_mlp_without_layers_is_identity() -> None:
    values = torch.randn(2, 3)
    assert torch.equal(mlp(3, (), "tanh")(values), values)


@pytest.mark.parametrize(("inputs", "outputs"), [(8, 8), (8, 3), (3, 8)])
def test_orthogonal_scales_weights_by_gain_and_zeroes_biases(inputs: int, outputs: int) -> None:
    layer = orthogonal(nn.Linear(inputs, outputs), gain=1.5)
    weight = layer.weight if outputs <= inputs else layer.weight.T
    torch.testing.assert_close(weight @ weight.T, 1.5**2 * torch.eye(min(inputs, outputs)), atol=1e-5, rtol=0)
    assert (layer.bias == 0).all()


def test_initial_hidden_layers_have_gain_sqrt_2() -> None:
    linear = mlp(6, (6,), "tanh")[0].weight
    torch.testing.assert_close(linear @ linear.T, 2 * torch.eye(6), atol=1e-5, rtol=0)
