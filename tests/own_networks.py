"""Networks such as a user writes, named `own_networks:name`."""

from __future__ import annotations

import torch
from gymnasium import spaces


def wide(observation_space: spaces.Space, action_space: spaces.Space) -> torch.nn.Module:
    """Five features of the two numbers that `Choice` shows."""
    return torch.nn.Sequential(torch.nn.Linear(observation_space.shape[0], 5), torch.nn.ReLU())
