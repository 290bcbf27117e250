"""What acts in soft actor-critic: a Gaussian squashed into the action range, or a choice among categories."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from unidle.config import Recipe
from unidle.errors import UsageError
from unidle.nn.actor_critic import NetworkFactory, encoder_of, mask_of
from unidle.nn.encoder import Encoder
from unidle.nn.mlp import mlp
from unidle.spaces.actions import ActionLayout
from unidle.spaces.distributions import LOG_SQRT_2PI, ActionDistribution, Params
from unidle.spaces.observations import ObservationLayout

LOG_STD_RANGE = (-20.0, 2.0)
_HE_HEAD = 1e-3  # how close to 0 the head begins with weight_init: he


def task_of(features: Tensor, n_tasks: int) -> Tensor:
    """[..] the task that the last of the features [.., n] tell."""
    return features[..., -n_tasks:].argmax(-1)


def outputs_of_task(values: Tensor, features: Tensor, n_tasks: int) -> Tensor:
    """Of all tasks' outputs [.., n_tasks × outputs], those of the task that the features tell: [.., outputs]."""
    if n_tasks == 1:
        return values
    values = values.unflatten(-1, (n_tasks, -1))
    task = task_of(features, n_tasks)[..., None, None]
    return values.gather(-2, task.expand(*values.shape[:-2], 1, values.shape[-1])).squeeze(-2)


class SquashedActions(ActionDistribution):
    """Reals are tanh(u), u ~ N(mean, exp(log_std)), with both from the network; categories are as they were.

    While `at_random` is 1 every action is as likely as any other, whatever the network says.
    """

    def __init__(self, layout: ActionLayout) -> None:
        super().__init__(layout)
        self.register_buffer("at_random", torch.zeros(()))

    at_random: Tensor

    def sample(self, params: Params, noise: Tensor) -> Tensor:
        """The action that `noise` picks."""
        if self.heads:
            any_of_them = torch.where(params.logits > -1e7, 0.0, params.logits)  # what a mask forbids stays forbidden
            logits = torch.where(self.at_random > 0, any_of_them, params.logits)
            return super().sample(params._replace(logits=logits), noise)
        squashed = torch.tanh(params.mean + params.log_std.exp() * noise)
        return torch.where(self.at_random > 0, torch.erf(noise / math.sqrt(2)), squashed)  # erf of a normal: uniform

    def mode(self, params: Params) -> Tensor:
        """The most likely category, or the middle of the squashed Gaussian."""
        return super().mode(params) if self.heads else torch.tanh(params.mean)

    def sampled_with_log_prob(self, params: Params, noise: Tensor) -> tuple[Tensor, Tensor]:
        """An action of reals [.., reals] that gradients pass through, and its log-probability [..]."""
        u = params.mean + params.log_std.exp() * noise
        log_prob = -0.5 * noise.square() - params.log_std - LOG_SQRT_2PI
        # log(1 − tanh² u), in a form that does not round to log 0.
        log_slope = 2 * (math.log(2) - u - nn.functional.softplus(-2 * u))
        return torch.tanh(u), (log_prob - log_slope).sum(-1)


class SACPolicy(nn.Module):
    """Rows of observations → `Params` of the next action. With several tasks, each has a head of its own."""

    state_size = 0  # of a recurrent state: there is none

    def __init__(
        self,
        obs_layout: ObservationLayout,
        action_layout: ActionLayout,
        recipe: Recipe,
        network: NetworkFactory | None = None,
    ) -> None:
        super().__init__()
        if action_layout.heads > 1 or (action_layout.heads and action_layout.reals):
            raise UsageError("SAC takes actions that are a Box or one Discrete choice; for others use --algo ppo.")
        if not action_layout.bounded.all():
            raise UsageError("SAC needs an action space with finite bounds; give the Box a low and a high.")
        self.obs_layout = obs_layout
        self.distribution = SquashedActions(action_layout)
        self.encoder: Encoder = encoder_of(obs_layout, action_layout, recipe, network)
        self.actor_trunk = mlp(self.encoder.n_features, recipe.net_arch, recipe.activation, orthogonally=False)
        latent = recipe.net_arch[-1] if recipe.net_arch else self.encoder.n_features
        self.n_tasks = recipe.n_tasks
        if self.n_tasks > 1 and not (self.encoder.is_plain and self.encoder.n_numbers > self.n_tasks):
            raise UsageError(
                f"The last {self.n_tasks} numbers of an observation must tell the task, and this environment's is not "
                "one vector of float numbers with as many and more; leave out n_tasks."
            )
        self.actor_head = nn.Linear(latent, self.n_tasks * (self.distribution.n_logits + 2 * self.distribution.reals))

        if recipe.weight_init == "he":
            for module in self.actor_trunk:
                if isinstance(module, nn.Linear):
                    nn.init.kaiming_uniform_(module.weight, nonlinearity="relu")
                    nn.init.zeros_(module.bias)
            for parameter in self.actor_head.parameters():
                nn.init.uniform_(parameter, -_HE_HEAD, _HE_HEAD)

    @property
    def masked(self) -> bool:
        """Whether observations come with a mask of the actions."""
        return self.obs_layout.mask_width > 0

    def act(self, obs: Tensor, state: Tensor | None = None) -> tuple[Params, Tensor | None]:
        """Rows [n, obs_bytes] → params; `state` is handed back as it is."""
        return self.act_on(self.encoder(obs), mask_of(obs, self.obs_layout), state)

    def act_on(self, features: Tensor, mask: Tensor | None, state: Tensor | None) -> tuple[Params, Tensor | None]:
        """The same, on features that are already encoded."""
        n_logits, reals = self.distribution.n_logits, self.distribution.reals
        out = outputs_of_task(self.actor_head(self.actor_trunk(features)), features, self.n_tasks)
        logits, mean, log_std = out.split((n_logits, reals, reals), -1)
        if mask is not None:
            logits = self.distribution.masked(logits, mask)
        return Params(logits, mean, log_std.clamp(*LOG_STD_RANGE)), state

    def tasks(self, obs: Tensor) -> Tensor:
        """[n] the task that each row is of."""
        return task_of(self.encoder(obs), self.n_tasks)
