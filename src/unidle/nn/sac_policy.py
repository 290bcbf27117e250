"""The policy of SAC: a tanh-squashed Gaussian, or a categorical choice."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from unidle.config import SACRecipe
from unidle.errors import UsageError
from unidle.nn.actor_critic import NetworkFactory, action_mask, make_encoder, require_reals_for_sde
from unidle.nn.encoder import Encoder
from unidle.nn.mlp import mlp
from unidle.spaces.actions import ActionLayout
from unidle.spaces.distributions import Params, SquashedActions, SquashedStateDependent
from unidle.spaces.observations import ObservationLayout

_HE_HEAD = 1e-3  # bound of the head's initial weights and biases with weight_init: he


def task_of(features: Tensor, n_tasks: int) -> Tensor:
    """[..] the task, which is one-hot in the last `n_tasks` features [.., n]."""
    return features[..., -n_tasks:].argmax(-1)


def select_task_outputs(values: Tensor, features: Tensor, n_tasks: int) -> Tensor:
    """Select the outputs of each observation's task: [.., n_tasks × outputs] → [.., outputs]."""
    if n_tasks == 1:
        return values
    values = values.unflatten(-1, (n_tasks, -1))
    task = task_of(features, n_tasks)[..., None, None]
    return values.gather(-2, task.expand(*values.shape[:-2], 1, values.shape[-1])).squeeze(-2)


class SACPolicy(nn.Module):
    """Packed observations → `Params` of the action. With several tasks, each has its own head."""

    state_size = actor_state_size = 0  # not recurrent

    def __init__(
        self,
        obs_layout: ObservationLayout,
        action_layout: ActionLayout,
        recipe: SACRecipe,
        network: NetworkFactory | None = None,
    ) -> None:
        super().__init__()
        if action_layout.heads > 1 or (action_layout.heads and action_layout.reals):
            raise UsageError("SAC needs a Box or Discrete action space; for others use --algo ppo.")
        self.obs_layout = obs_layout
        self.encoder: Encoder = make_encoder(obs_layout, action_layout, recipe, network)
        self.actor_trunk = mlp(self.encoder.n_features, recipe.net_arch, recipe.activation, orthogonal_init=False)
        latent = recipe.net_arch[-1] if recipe.net_arch else self.encoder.n_features
        real: SquashedStateDependent | None = None
        if recipe.use_sde:
            require_reals_for_sde(action_layout)
            real = SquashedStateDependent(latent, recipe.sde_sample_freq, use_expln=recipe.use_expln)
        self.distribution = SquashedActions(action_layout.within(recipe.action_limit), real)
        self.n_tasks = recipe.n_tasks
        if self.n_tasks > 1 and not (self.encoder.is_float_vector and self.encoder.n_numbers > self.n_tasks):
            raise UsageError(
                f"`n_tasks` {self.n_tasks} needs observations that are one float32 vector ending in a one-hot task of "
                f"{self.n_tasks} numbers, but this environment has others; remove n_tasks."
            )
        self.actor_head = nn.Linear(latent, self.n_tasks * self.distribution.n_outputs)

        if recipe.weight_init == "he":
            for module in self.actor_trunk:
                if isinstance(module, nn.Linear):
                    nn.init.kaiming_uniform_(module.weight, nonlinearity="relu")
                    nn.init.zeros_(module.bias)
            for parameter in self.actor_head.parameters():
                nn.init.uniform_(parameter, -_HE_HEAD, _HE_HEAD)
        self.log_std: nn.Parameter | None = None  # otherwise an output of the network
        if recipe.use_sde:
            self.log_std = nn.Parameter(torch.full((self.distribution.n_free,), recipe.log_std_init))

    @property
    def masked(self) -> bool:
        """Whether observations come with an action mask."""
        return self.obs_layout.mask_width > 0

    def act(self, obs: Tensor, state: Tensor | None = None) -> tuple[Params, Tensor | None]:
        """Observations [n, obs_bytes] → params; `state` is returned unchanged."""
        return self.act_on(self.encoder(obs), action_mask(obs, self.obs_layout), state)

    def act_on(self, features: Tensor, mask: Tensor | None, state: Tensor | None) -> tuple[Params, Tensor | None]:
        """Like `act`, on encoded observations."""
        latent = self.actor_trunk(features)
        out = select_task_outputs(self.actor_head(latent), features, self.n_tasks)
        free = out[:0] if self.log_std is None else self.log_std
        params: Params = self.distribution.params(out, free, mask, latent)
        return params, state

    def tasks(self, obs: Tensor) -> Tensor:
        """[n] the task of each observation."""
        return task_of(self.encoder(obs), self.n_tasks)
