"""Actor and critic of PPO."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import torch
from gymnasium import spaces
from torch import Tensor, nn

from unidle.config import PPORecipe, Recipe
from unidle.distributed.ranks import Ranks
from unidle.errors import UsageError
from unidle.nn.encoder import CustomEncoder, Encoder
from unidle.nn.mlp import mlp, orthogonal
from unidle.nn.recurrent import RecurrentCore
from unidle.spaces.actions import ActionLayout
from unidle.spaces.distributions import ActionDistribution, Parameters, StateDependent, action_distribution
from unidle.spaces.observations import ObservationLayout

NetworkFactory = Callable[[spaces.Space, spaces.Space], nn.Module]


def make_encoder(
    obs_layout: ObservationLayout, action_layout: ActionLayout, recipe: Recipe, network: NetworkFactory | None
) -> Encoder:
    """The built-in encoder of observations, or one around the user's `network`."""
    if network is None:
        return Encoder(obs_layout, recipe.normalize_obs, recipe.encoder)
    return CustomEncoder(obs_layout, recipe.normalize_obs, network(obs_layout.space, action_layout.space))


def action_mask(obs: Tensor, layout: ObservationLayout) -> Tensor | None:
    """The action masks [n, Σ nvec] in observations [n, obs_bytes]; None if there are none."""
    start, width = layout.mask_offset, layout.mask_width
    return obs[..., start : start + width] if width else None


def require_reals_for_sde(layout: ActionLayout) -> None:
    """UsageError if there is no continuous action that state-dependent exploration could add noise to."""
    if not layout.reals:
        raise UsageError("`use_sde` needs continuous actions, but all actions here are discrete; remove it.")


class ActorCritic(nn.Module):
    """Packed observations → parameters of the action distribution, and the value.

    Actor and critic share the encoder and the recurrent core, unless they get different parts of a Dict observation
    (asymmetric actor-critic): then the critic has its own. The recurrent state is the actor's followed by the critic's.
    """

    n_tasks = 1  # one head for all observations

    def __init__(
        self,
        obs_layout: ObservationLayout,
        action_layout: ActionLayout,
        recipe: PPORecipe,
        network: NetworkFactory | None = None,
    ) -> None:
        super().__init__()
        self.obs_layout = obs_layout
        self.in_bf16 = recipe.precision == "bf16"
        actor_part, critic_part = _groups(obs_layout, recipe)
        self.encoder = make_encoder(actor_part, action_layout, recipe, network)
        self.critic_encoder: Encoder | None = None
        if critic_part.leaves != actor_part.leaves:
            if recipe.share_trunk:
                raise UsageError("`share_trunk` needs equal `actor_obs` and `critic_obs`; remove it.")
            self.critic_encoder = make_encoder(critic_part, action_layout, recipe, network)
        n_features = self.encoder.n_features
        n_critic_features = n_features if self.critic_encoder is None else self.critic_encoder.n_features
        self.core: RecurrentCore | None = None
        self.critic_core: RecurrentCore | None = None
        if recipe.recurrent != "none":
            self.core = RecurrentCore(recipe.recurrent, n_features, recipe.recurrent_size)
            if self.critic_encoder is not None:
                self.critic_core = RecurrentCore(recipe.recurrent, n_critic_features, recipe.recurrent_size)
            n_features = n_critic_features = self.core.size
        arch, critic_arch = recipe.net_arch, recipe.critic_widths
        new_mlp = functools.partial(mlp, activation=recipe.activation, orthogonal_init=recipe.ortho_init)
        self.actor_trunk = new_mlp(n_features, arch)
        self.critic_trunk = None if recipe.share_trunk else new_mlp(n_critic_features, critic_arch)
        n_latent = arch[-1] if arch else n_features
        if recipe.use_sde:
            require_reals_for_sde(action_layout)
            real = StateDependent(n_latent, recipe.sde_sample_freq, use_expln=recipe.use_expln)
            self.distribution = ActionDistribution(action_layout, real)
        else:
            self.distribution = action_distribution(action_layout, recipe.action_distribution)
        self.actor_head = nn.Linear(n_latent, self.distribution.n_outputs)
        # A small gain, so that the initial policy is nearly uniform for all observations.
        if recipe.ortho_init:
            orthogonal(self.actor_head, 0.01)
        self.critic_head = nn.Linear(critic_arch[-1] if critic_arch else n_critic_features, 1)
        if recipe.ortho_init:
            orthogonal(self.critic_head, 1.0)
        self.log_std = nn.Parameter(torch.full((self.distribution.n_free,), recipe.log_std_init))

    @property
    def actor_state_size(self) -> int:
        """Entries of the actor's recurrent state per environment; 0 without recurrence."""
        return self.core.state_size if self.core else 0

    @property
    def state_size(self) -> int:
        """Entries of the recurrent state per environment, the actor's and the critic's."""
        return self.actor_state_size + (self.critic_core.state_size if self.critic_core else 0)

    @property
    def masked(self) -> bool:
        """Whether observations come with an action mask."""
        return self.obs_layout.mask_width > 0

    def update_norm(self, obs: Tensor, ranks: Ranks | None = None) -> None:
        """Update the running statistics with the observations of one iteration, on all `ranks`."""
        for encoder in (self.encoder, self.critic_encoder):
            if encoder is not None:
                encoder.update_norm(obs, ranks)

    def _run(self, module: nn.Module, inputs: Tensor) -> Tensor:
        """`module(inputs)`, with matrix products in bfloat16 if the recipe asks for it and there is a GPU."""
        if not (self.in_bf16 and inputs.is_cuda):
            output: Tensor = module(inputs)
            return output
        with torch.autocast("cuda", torch.bfloat16, cache_enabled=False):  # so that CUDA graphs record the casts
            output = module(inputs)
        return output.float()

    # The heads run in float32: in bfloat16, a value of 300 would be rounded to a multiple of 2.

    def _params(self, latent: Tensor, mask: Tensor | None) -> Parameters:
        return self.distribution.params(self.actor_head(latent), self.log_std, mask, latent)

    def _value(self, features: Tensor, actor_latent: Tensor | None = None) -> Tensor:
        if self.critic_trunk is not None:
            latent = self._run(self.critic_trunk, features)
        else:
            latent = actor_latent if actor_latent is not None else self._run(self.actor_trunk, features)
        value: Tensor = self.critic_head(latent).squeeze(-1)
        return value

    def act(self, obs: Tensor, state: Tensor | None = None) -> tuple[Parameters, Tensor | None]:
        """One step of the actor: observations [n, obs_bytes], recurrent state [n, S] → params, next state."""
        features, mask = self._run(self.encoder, obs), action_mask(obs, self.obs_layout)
        if self.critic_core is None:
            return self.act_on(features, mask, state)
        assert state is not None
        assert self.critic_encoder is not None
        actor_state, critic_state = state.split((self.actor_state_size, self.critic_core.state_size), -1)
        params, next_actor_state = self.act_on(features, mask, actor_state)
        assert next_actor_state is not None
        next_critic_state = self.critic_core.step(self._run(self.critic_encoder, obs), critic_state)
        return params, torch.cat((next_actor_state, next_critic_state), -1)

    def act_on(self, features: Tensor, mask: Tensor | None, state: Tensor | None) -> tuple[Parameters, Tensor | None]:
        """One step of the actor on encoded observations; `state` is the actor's part."""
        if self.core is not None:
            assert state is not None
            state = self.core.step(features, state)
            features = state[:, : self.core.size]
        return self._params(self._run(self.actor_trunk, features), mask), state

    def value(self, obs: Tensor, state: Tensor | None = None) -> Tensor:
        """The critic: observations [n, obs_bytes] in recurrent state [n, S] → values [n]."""
        features = self._run(self.encoder if self.critic_encoder is None else self.critic_encoder, obs)
        core = self.core if self.critic_core is None else self.critic_core
        if core is not None:
            assert state is not None
            features = core.step(features, state[:, -core.state_size :])[:, : core.size]
        return self._value(features)

    def forward(
        self, obs: Tensor, starts: Tensor | None = None, state: Tensor | None = None
    ) -> tuple[Parameters, Tensor]:
        """Sequences: observations [n, L, ..], episode starts [n, L], state [n, S] → params, values [n, L]."""
        features = self._run(self.encoder, obs)
        if self.core is not None:
            assert starts is not None
            assert state is not None
            features = self.core(features, starts, state[:, : self.actor_state_size])
        critic_features = features
        if self.critic_encoder is not None:
            critic_features = self._run(self.critic_encoder, obs)
            if self.critic_core is not None:
                assert starts is not None
                assert state is not None
                critic_features = self.critic_core(critic_features, starts, state[:, self.actor_state_size :])
        if self.critic_trunk is None or not features.is_cuda:
            latent = self._run(self.actor_trunk, features)
            return self._params(latent, action_mask(obs, self.obs_layout)), self._value(critic_features, latent)
        # The two trunks run on two streams, in the backward pass too: a layer's gradient alone does not fill a GPU.
        current = torch.cuda.current_stream()
        second = _second_stream(features.device, current.cuda_stream)
        second.wait_stream(current)
        with torch.cuda.stream(second):
            value = self._value(critic_features)
        params = self._params(self._run(self.actor_trunk, features), action_mask(obs, self.obs_layout))
        current.wait_stream(second)
        return params, value


def _groups(layout: ObservationLayout, recipe: PPORecipe) -> tuple[ObservationLayout, ObservationLayout]:
    """The parts of the observation that the actor and the critic get."""
    actor = layout if recipe.actor_obs is None else layout.part(recipe.actor_obs, "actor_obs")
    critic = layout if recipe.critic_obs is None else layout.part(recipe.critic_obs, "critic_obs")
    return actor, critic


@functools.cache
def _second_stream(device: torch.device, current: int) -> torch.cuda.Stream:
    """A stream to use beside the stream `current`.

    One each: memory that is freed on one of the two may still be in use on the other. Reusing it is safe only because
    they wait for each other.
    """
    return torch.cuda.Stream(device)


def n_parameters(module: nn.Module) -> int:
    """Number of learned parameters."""
    return sum(math.prod(p.shape) for p in module.parameters())
