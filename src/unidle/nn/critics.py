"""Q functions: an ensemble of critics as one batched network."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from unidle.nn.encoder import Encoder
from unidle.nn.ensemble import Ensemble
from unidle.nn.sac_policy import select_task_outputs


class Critics(nn.Module):
    """Q(s, a) [E, B] of continuous actions, or Q(s, ·) [E, B, categories]. The encoder is a copy of the actor's."""

    def __init__(
        self,
        encoder: Encoder,
        n_critics: int,
        arch: tuple[int, ...],
        activation: str,
        *,
        reals: int,
        categories: int = 0,
        n_tasks: int = 1,
    ) -> None:
        """Actions have either `reals` or `categories`; the other is 0. Each task has its own output head."""
        super().__init__()
        self.encoder: Encoder = copy.deepcopy(encoder)
        self._n_tasks, self._takes_actions = n_tasks, reals > 0
        outputs = n_tasks * max(1, categories)
        self.ensemble = Ensemble(n_critics, encoder.n_features + reals, arch, outputs, activation)

    def inputs(self, obs: Tensor, actions: Tensor | None) -> tuple[Tensor, Tensor]:
        """Features of packed observations [B, obs_bytes], and the networks' inputs: features and actions."""
        features = self.encoder(obs)
        if not self._takes_actions:
            return features, features
        assert actions is not None
        return features, torch.cat((features, actions), -1)

    def forward(self, obs: Tensor, actions: Tensor | None) -> Tensor:
        """Q of `actions` [B, reals], or of all categories (then `actions` is ignored)."""
        features, inputs = self.inputs(obs, actions)
        values = select_task_outputs(self.ensemble(inputs), features, self._n_tasks)
        return values.squeeze(-1) if self._takes_actions else values

    def first(self, obs: Tensor, actions: Tensor) -> Tensor:
        """Q [B] of the first critic only, for continuous actions and a single task."""
        _, inputs = self.inputs(obs, actions)
        return self.ensemble(inputs, members=1).flatten()
