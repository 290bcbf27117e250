"""Members of an ensemble as separate networks."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


def member_network(ensemble: Any, member: int, activation: type[nn.Module]) -> nn.Sequential:
    """One member of an ensemble as an `nn.Sequential` in float64."""
    layers: list[nn.Module] = []
    for weight, bias in zip(ensemble.weights, ensemble.biases):
        linear = nn.Linear(*weight.shape[1:], dtype=torch.float64)
        linear.weight.data.copy_(weight[member].T)
        linear.bias.data.copy_(bias[member, 0])
        layers += [linear, activation()]
    return nn.Sequential(*layers[:-1])
