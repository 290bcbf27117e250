"""Recurrent layers: GRU and LSTM over sequences in which new episodes may start."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn


class RecurrentCore(nn.Module):
    """A GRU or LSTM cell whose state is one tensor [n, state_size], set to zero where an episode starts."""

    def __init__(self, kind: Literal["gru", "lstm"], n_inputs: int, size: int) -> None:
        super().__init__()
        self.size = size
        self.is_lstm = kind == "lstm"
        self.state_size = 2 * size if self.is_lstm else size
        self.cell = nn.LSTMCell(n_inputs, size) if self.is_lstm else nn.GRUCell(n_inputs, size)
        for name, weight in self.cell.named_parameters():
            nn.init.orthogonal_(weight) if "weight" in name else nn.init.zeros_(weight)

    def step(self, features: Tensor, state: Tensor) -> Tensor:
        """Features [n, F], state [n, S] → next state [n, S], whose first `size` entries are the output."""
        if self.is_lstm:
            return torch.cat(self.cell(features, tuple(state.split(self.size, -1))), -1)
        after: Tensor = self.cell(features, state)
        return after

    def forward(self, features: Tensor, starts: Tensor, state: Tensor) -> Tensor:
        """Sequences [n, L, F] with episode starts [n, L] from `state` [n, S] → outputs [n, L, size]."""
        keep = 1.0 - starts.to(features.dtype)
        outputs = []
        for t in range(features.shape[1]):
            state = self.step(features[:, t], state * keep[:, t, None])
            outputs.append(state[:, : self.size])
        return torch.stack(outputs, 1)
