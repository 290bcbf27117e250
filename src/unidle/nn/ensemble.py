"""Several networks of the same shape as one module: each layer of all of them is one batched matrix product."""

from __future__ import annotations

import itertools
import math

import torch
from torch import Tensor, nn

from unidle.nn.mlp import ACTIVATIONS


class Ensemble(nn.Module):
    """E multi-layer perceptrons on the same inputs: [B, inputs] → [E, B, outputs]."""

    def __init__(self, members: int, n_inputs: int, widths: tuple[int, ...], n_outputs: int, activation: str) -> None:
        super().__init__()
        self.activation = ACTIVATIONS[activation]()
        sizes = (n_inputs, *widths, n_outputs)
        self.weights = nn.ParameterList()
        self.biases = nn.ParameterList()
        for inputs, outputs in itertools.pairwise(sizes):
            bound = 1 / math.sqrt(inputs)  # torch's default for linear layers
            self.weights.append(torch.empty(members, inputs, outputs).uniform_(-bound, bound))
            self.biases.append(torch.empty(members, 1, outputs).uniform_(-bound, bound))

    def init_he(self, head_bound: float) -> None:
        """Initialise with He uniform weights and zero biases; weights and biases of the last layer in ±`head_bound`."""
        for weight, bias in zip(self.weights, self.biases):
            bound = math.sqrt(6 / weight.shape[1])
            nn.init.uniform_(weight, -bound, bound)
            nn.init.zeros_(bias)
        for last in (self.weights[-1], self.biases[-1]):
            nn.init.uniform_(last, -head_bound, head_bound)

    def forward(self, inputs: Tensor, members: int | None = None) -> Tensor:
        """Outputs of all members, or of the first `members`."""
        values = inputs.expand(members or len(self.weights[0]), *inputs.shape)
        for layer, (weight, bias) in enumerate(zip(self.weights, self.biases)):
            if layer:
                values = self.activation(values)
            if members is not None:
                weight, bias = weight[:members], bias[:members]
            values = torch.baddbmm(bias, values, weight)
        return values
