"""Custom networks, named `custom_networks:name` in settings."""

from __future__ import annotations

import torch
from gymnasium import spaces


def wide(observation_space: spaces.Space, action_space: spaces.Space) -> torch.nn.Module:
    """Maps the two observations of `Choice` to five features."""
    return torch.nn.Sequential(torch.nn.Linear(observation_space.shape[0], 5), torch.nn.ReLU())


class OutOfMemoryNetwork(torch.nn.Module):
    """Can act, but runs out of memory with gradients, like a network too large for the GPU."""

    def __init__(self, observation_space: spaces.Space, action_space: spaces.Space) -> None:
        super().__init__()
        self._layer = torch.nn.Linear(observation_space.shape[0], 4)

    def forward(self, obs: torch.Tensor) -> torch.Tensor:
        if torch.is_grad_enabled():
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has 1.00 GiB free.")
        return self._layer(obs)
