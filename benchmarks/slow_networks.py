"""Networks for planted jobs, `slow_networks:Name`: see docs/networks.md."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class HostSync(nn.Module):
    """Synchronises with the host in every forward pass, so the GPU idles and CUDA graphs cannot be captured."""

    def __init__(self, observation_space: Any, action_space: Any) -> None:
        super().__init__()
        self._layer = nn.Linear(observation_space.shape[0], 64)

    def forward(self, obs: Tensor) -> Tensor:
        features = torch.tanh(self._layer(obs))
        largest = features.detach().abs().max().item()
        return features / max(1.0, largest)


class Subsample(nn.Module):
    """Uses only 64 numbers of a large observation: almost no computation."""

    def __init__(self, observation_space: Any, action_space: Any) -> None:
        super().__init__()
        self._stride = observation_space.shape[0] // 64

    def forward(self, obs: Tensor) -> Tensor:
        return obs[:, :: self._stride].float() / 255
