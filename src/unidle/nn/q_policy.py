"""The policy of DQN: ε-greedy over Q values."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from unidle.config import DQNRecipe
from unidle.errors import UsageError
from unidle.nn.actor_critic import NetworkFactory, action_mask, make_encoder
from unidle.nn.encoder import Encoder
from unidle.nn.mlp import mlp
from unidle.spaces.actions import ActionLayout
from unidle.spaces.distributions import EpsilonGreedy, Params
from unidle.spaces.observations import ObservationLayout


class QPolicy(nn.Module):
    """Packed observations → the Q value of every category of every head, in `Params.logits`.

    Dueling networks (Wang et al. 2016): Q = V + A − mean A, in each head.
    """

    state_size = actor_state_size = 0  # not recurrent
    n_tasks = 1  # one head for all observations

    def __init__(
        self,
        obs_layout: ObservationLayout,
        action_layout: ActionLayout,
        recipe: DQNRecipe,
        network: NetworkFactory | None = None,
    ) -> None:
        super().__init__()
        if action_layout.reals:
            raise UsageError("DQN needs discrete actions, not a Box; use --algo sac or --discretize.")
        self.obs_layout = obs_layout
        self.distribution = EpsilonGreedy(action_layout)
        self.encoder: Encoder = make_encoder(obs_layout, action_layout, recipe, network)
        self.trunk = mlp(self.encoder.n_features, recipe.net_arch, recipe.activation, orthogonal_init=False)
        latent = recipe.net_arch[-1] if recipe.net_arch else self.encoder.n_features
        self.head = nn.Linear(latent, self.distribution.n_logits)
        self.value_head = nn.Linear(latent, action_layout.heads) if recipe.dueling else None
        head_of_category = torch.repeat_interleave(torch.arange(action_layout.heads), torch.tensor(action_layout.nvec))
        self.register_buffer("_head_of_category", head_of_category, persistent=False)  # [Σ nvec]
        is_category = torch.arange(self.distribution.max_categories) < torch.tensor(action_layout.nvec).unsqueeze(-1)
        self.register_buffer("_is_category", is_category, persistent=False)  # [heads, max_categories]

    _head_of_category: Tensor
    _is_category: Tensor

    @property
    def masked(self) -> bool:
        """Whether observations come with an action mask."""
        return self.obs_layout.mask_width > 0

    def act(self, obs: Tensor, state: Tensor | None = None) -> tuple[Params, Tensor | None]:
        """Observations [n, obs_bytes] → Q values; `state` is returned unchanged."""
        return self.act_on(self.encoder(obs), action_mask(obs, self.obs_layout), state)

    def act_on(self, features: Tensor, mask: Tensor | None, state: Tensor | None) -> tuple[Params, Tensor | None]:
        """Like `act`, on encoded observations."""
        latent = self.trunk(features)
        values = self.head(latent)
        if self.value_head is not None:
            # Not index_add, whose order (and so its rounding) varies on a GPU.
            table = self.distribution.padded_logits(values).masked_fill(~self._is_category, 0.0)
            mean = table.sum(-1) / self._is_category.sum(-1)
            values = values + (self.value_head(latent) - mean)[..., self._head_of_category]
        if mask is not None:
            values = self.distribution.masked(values, mask)
        return Params(values, values[..., :0], values.new_zeros(0)), state

    def values(self, obs: Tensor) -> Tensor:
        """Q [n, heads, max_categories] of every category; log 0 for padding and masked categories."""
        return self.distribution.padded_logits(self.act(obs)[0].logits)
