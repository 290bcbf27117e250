"""Actor and critic over one encoder."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import torch
from gymnasium import spaces
from torch import Tensor, nn

from unidle.config import Recipe
from unidle.nn.encoder import CustomEncoder, Encoder
from unidle.nn.mlp import mlp, orthogonal
from unidle.nn.recurrent import RecurrentCore
from unidle.spaces.actions import ActionLayout
from unidle.spaces.distributions import Parameters, action_distribution
from unidle.spaces.observations import ObservationLayout

NetworkFactory = Callable[[spaces.Space, spaces.Space], nn.Module]


def encoder_of(
    obs_layout: ObservationLayout, action_layout: ActionLayout, recipe: Recipe, network: NetworkFactory | None
) -> Encoder:
    """What makes features of observations: ours, or the user's `network`."""
    if network is None:
        return Encoder(obs_layout, recipe.normalize_obs)
    return CustomEncoder(obs_layout, recipe.normalize_obs, network(obs_layout.space, action_layout.space))


def mask_of(obs: Tensor, layout: ObservationLayout) -> Tensor | None:
    """What may be done in rows [n, obs_bytes]; None if environments do not say.

    Some do not say it of an episode's last observation, in which nobody acts: then everything may.
    """
    if not layout.mask_width:
        return None
    mask = obs[..., layout.mask_offset : layout.mask_offset + layout.mask_width].bool()
    return mask | ~mask.any(-1, keepdim=True)


class ActorCritic(nn.Module):
    """Rows of observations → what to do (`Parameters`) and what it is worth (value)."""

    def __init__(
        self,
        obs_layout: ObservationLayout,
        action_layout: ActionLayout,
        recipe: Recipe,
        network: NetworkFactory | None = None,
    ) -> None:
        super().__init__()
        self.obs_layout = obs_layout
        self.in_bf16 = recipe.precision == "bf16"
        self.distribution = action_distribution(action_layout, recipe.action_distribution)
        self.encoder = encoder_of(obs_layout, action_layout, recipe, network)
        n_features = self.encoder.n_features
        self.core: RecurrentCore | None = None
        if recipe.recurrent != "none":
            self.core = RecurrentCore(recipe.recurrent, n_features, recipe.recurrent_size)
            n_features = self.core.size
        arch, activation = recipe.net_arch, recipe.activation
        self.actor_trunk = mlp(n_features, arch, activation)
        self.critic_trunk = None if recipe.share_trunk else mlp(n_features, arch, activation)
        n_latent = arch[-1] if arch else n_features
        # A small gain: the first policy is nearly uniform, whatever the observation.
        self.actor_head = orthogonal(nn.Linear(n_latent, self.distribution.n_outputs), 0.01)
        self.critic_head = orthogonal(nn.Linear(n_latent, 1), 1.0)
        self.log_std = nn.Parameter(torch.full((self.distribution.n_free,), recipe.log_std_init))

    @property
    def state_size(self) -> int:
        """Entries of the recurrent state per environment; 0 without recurrence."""
        return self.core.state_size if self.core else 0

    @property
    def masked(self) -> bool:
        """Whether observations come with a mask of the actions."""
        return self.obs_layout.mask_width > 0

    def _mask(self, obs: Tensor) -> Tensor | None:
        start, width = self.obs_layout.mask_offset, self.obs_layout.mask_width
        return obs[..., start : start + width] if width else None

    def _run(self, module: nn.Module, inputs: Tensor) -> Tensor:
        """What `module` gives, its products in bfloat16 if the recipe says so and there is a GPU."""
        if not (self.in_bf16 and inputs.is_cuda):
            output: Tensor = module(inputs)
            return output
        with torch.autocast("cuda", torch.bfloat16, cache_enabled=False):  # a graph records the casts
            output = module(inputs)
        return output.float()

    # What the heads give is never rounded: a value of 300 would become a multiple of 2.

    def _params(self, latent: Tensor, mask: Tensor | None) -> Parameters:
        return self.distribution.params(self.actor_head(latent), self.log_std, mask)

    def _value(self, features: Tensor, actor_latent: Tensor | None = None) -> Tensor:
        if self.critic_trunk is not None:
            latent = self._run(self.critic_trunk, features)
        else:
            latent = actor_latent if actor_latent is not None else self._run(self.actor_trunk, features)
        value: Tensor = self.critic_head(latent).squeeze(-1)
        return value

    def act(self, obs: Tensor, state: Tensor | None = None) -> tuple[Parameters, Tensor | None]:
        """The actor alone, one step: rows [n, obs_bytes], recurrent state [n, S] → params, state after."""
        return self.act_on(self._run(self.encoder, obs), self._mask(obs), state)

    def act_on(self, features: Tensor, mask: Tensor | None, state: Tensor | None) -> tuple[Parameters, Tensor | None]:
        """The actor alone, one step, on features that are already encoded."""
        if self.core is not None:
            assert state is not None
            state = self.core.step(features, state)
            features = state[:, : self.core.size]
        return self._params(self._run(self.actor_trunk, features), mask), state

    def value(self, obs: Tensor, state: Tensor | None = None) -> Tensor:
        """The critic alone: rows [n, obs_bytes] (seen in recurrent state [n, S]) → [n]."""
        features = self._run(self.encoder, obs)
        if self.core is not None:
            assert state is not None
            features = self.core.step(features, state)[:, : self.core.size]
        return self._value(features)

    def forward(
        self, obs: Tensor, starts: Tensor | None = None, state: Tensor | None = None
    ) -> tuple[Parameters, Tensor]:
        """Actor and critic over sequences: rows [n, L, ..], starts [n, L], state [n, S] → params, value [n, L]."""
        features = self._run(self.encoder, obs)
        if self.core is not None:
            assert starts is not None
            assert state is not None
            features = self.core(features, starts, state)
        if self.critic_trunk is None or not features.is_cuda:
            latent = self._run(self.actor_trunk, features)
            return self._params(latent, self._mask(obs)), self._value(features, latent)
        # Two trunks on two streams, forwards and backwards: a layer's gradient alone does not fill a GPU.
        here, there = torch.cuda.current_stream(), _second_stream(features.device)
        there.wait_stream(here)
        with torch.cuda.stream(there):
            value = self._value(features)
        params = self._params(self._run(self.actor_trunk, features), self._mask(obs))
        here.wait_stream(there)
        return params, value


@functools.cache
def _second_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


def n_parameters(module: nn.Module) -> int:
    """How many numbers are learned."""
    return sum(math.prod(p.shape) for p in module.parameters())
