"""Networks such as a user writes, named `own_networks:name`."""

from __future__ import annotations

import torch
from gymnasium import spaces


def wide(observation_space: spaces.Space, action_space: spaces.Space) -> torch.nn.Module:
    """Five features of the two numbers that `Choice` shows."""
    return torch.nn.Sequential(torch.nn.Linear(observation_space.shape[0], 5), torch.nn.ReLU())


class Insatiable(torch.nn.Module):
    """Acts, and finds no room to learn, as a network does that is too large for a GPU."""

    def __init__(self, observation_space: spaces.Space, action_space: spaces.Space) -> None:
        super().__init__()
        self._layer = torch.nn.Linear(observation_space.shape[0], 4)

    def forward(self, seen: torch.Tensor) -> torch.Tensor:
        if torch.is_grad_enabled():
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has 1.00 GiB free.")
        return self._layer(seen)
