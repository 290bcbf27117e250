"""TD3's policy: a deterministic actor with tanh output, and Gaussian exploration noise."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from unidle.config import TD3Recipe
from unidle.errors import UsageError
from unidle.nn.actor_critic import NetworkFactory, make_encoder
from unidle.nn.encoder import Encoder
from unidle.nn.mlp import mlp
from unidle.spaces.actions import ActionLayout
from unidle.spaces.distributions import ActionDistribution, Gaussian, Params
from unidle.spaces.observations import ObservationLayout


class _Deterministic(Gaussian):
    """tanh of the network's output, without a learned standard deviation."""

    name = "deterministic"  # not supported by kernels
    n_outputs, n_free = 1, 0

    def params(
        self, logits: Tensor, outputs: tuple[Tensor, ...], free: tuple[Tensor, ...], latent: Tensor | None = None
    ) -> Params:
        """The mean is the action."""
        (output,) = outputs
        return Params(logits, torch.tanh(output), output.new_zeros(0))


class NoisyActions(ActionDistribution):
    """The actor's action plus N(0, `exploration_noise`), clipped to [-1, 1]; uniform while `at_random` is 1."""

    def __init__(self, layout: ActionLayout, exploration_noise: float) -> None:
        super().__init__(layout, _Deterministic())
        self.exploration_noise = exploration_noise
        self.register_buffer("at_random", torch.zeros(()))

    at_random: Tensor

    def sample(self, params: Params, noise: Tensor) -> Tensor:
        """The noisy action; `noise` [.., reals] is standard normal."""
        noisy = (params.mean + self.exploration_noise * noise).clamp(-1.0, 1.0)
        return torch.where(self.at_random > 0, torch.erf(noise / math.sqrt(2)), noisy)  # erf of a normal: uniform


class TD3Policy(nn.Module):
    """Packed observations → actions in [-1, 1], as `Params.mean`."""

    state_size = actor_state_size = 0  # not recurrent
    n_tasks = 1  # one head for all observations
    masked = False  # masks are for discrete actions

    def __init__(
        self,
        obs_layout: ObservationLayout,
        action_layout: ActionLayout,
        recipe: TD3Recipe,
        network: NetworkFactory | None = None,
    ) -> None:
        super().__init__()
        if action_layout.heads:
            raise UsageError("TD3 takes Box actions only; use --algo dqn for discrete actions, or --algo ppo.")
        self.obs_layout = obs_layout
        self.distribution = NoisyActions(action_layout.within(recipe.action_limit), recipe.exploration_noise)
        self.encoder: Encoder = make_encoder(obs_layout, action_layout, recipe, network)
        self.actor_trunk = mlp(self.encoder.n_features, recipe.net_arch, recipe.activation, orthogonal_init=False)
        latent = recipe.net_arch[-1] if recipe.net_arch else self.encoder.n_features
        self.actor_head = nn.Linear(latent, self.distribution.n_outputs)

    def actions(self, obs: Tensor) -> Tensor:
        """π(s) [n, reals] of packed observations [n, obs_bytes]."""
        return self.act(obs)[0].mean

    def act(self, obs: Tensor, state: Tensor | None = None) -> tuple[Params, Tensor | None]:
        """Packed observations [n, obs_bytes] → params; `state` is returned unchanged."""
        return self.act_on(self.encoder(obs), None, state)

    def act_on(self, features: Tensor, mask: Tensor | None, state: Tensor | None) -> tuple[Params, Tensor | None]:
        """Like `act`, on encoded observations."""
        outputs = self.actor_head(self.actor_trunk(features))
        params: Params = self.distribution.params(outputs, outputs[:0], mask)
        return params, state
