"""Twin delayed deep deterministic policy gradient (Fujimoto et al. 2018).

An update from a batch of (s, a, R, γᵐ, s'), where R is the m-step return, takes these steps (the paper's algorithm 1):

    a' = clip(π̄(s') + clip(σ ε, −c, c), −1, 1)     target policy smoothing, ε ~ N(0, 1)
    y  = R + γᵐ min Q̄(s', a')                       clipped double Q-learning: the minimum over the critics
    L  = Σ E[(Q(s, a) − y)²]                        critic loss, summed over the critics

and every `policy_delay`-th update also

    J  = −E[Q₁(s, π(s))]                            actor loss
    Q̄  ← τ Q + (1 − τ) Q̄,  π̄ ← τ π + (1 − τ) π̄     target networks

σ is `target_policy_noise` and c `target_noise_clip`. The policy explores with Gaussian noise (nn/td3_policy.py).
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from unidle.algos.member_settings import per_member
from unidle.algos.micro_batches import Loss
from unidle.algos.off_policy import Gradient, GradientOf, Update
from unidle.algos.plasticity import actor_critic_plasticity
from unidle.algos.start_from import with_parts_of
from unidle.buffers.replay import Transitions
from unidle.config import TD3Recipe
from unidle.nn.critics import Critics
from unidle.nn.optim.flat_parameters import FlatParameters
from unidle.nn.optim.optimiser import new_optimiser
from unidle.nn.td3_policy import TD3Policy


class TD3:
    """Actor, critics, their targets, and their update from one batch."""

    metrics: tuple[str, ...] = ("critic_loss", "value")
    n_tasks = 1
    start_parts: tuple[str, ...] = ("critics",)

    def __init__(self, policy: TD3Policy, recipe: TD3Recipe, gradient: Gradient) -> None:
        assert isinstance(recipe.batch_size, int)
        self.policy, self.recipe, self._gradient = policy, recipe, gradient
        device, reals = next(policy.parameters()).device, policy.distribution.reals
        widths = recipe.critic_widths
        self.critics = Critics(policy.encoder, recipe.n_critics, widths, recipe.activation, reals=reals).to(device)
        self.target_policy, self.target_critics = copy.deepcopy(policy), copy.deepcopy(self.critics)
        self.parameters, self.critic_parameters = FlatParameters(policy), FlatParameters(self.critics)
        self._target_parameters = FlatParameters(self.target_policy)
        self._target_critic_parameters = FlatParameters(self.target_critics)
        setting = partial(per_member, [recipe], device=device)
        self.learning_rate, self.max_grad_norm, self.tau = map(setting, ("learning_rate", "max_grad_norm", "tau"))
        self._optimisers = {
            name: new_optimiser(recipe, parameters, self.learning_rate)
            for name, parameters in (("actor", self.parameters), ("critics", self.critic_parameters))
        }
        self.sums = torch.zeros(4, device=device)  # critic loss, mean Q, actor loss, actor updates
        flats = [self.parameters, self.critic_parameters, self._target_parameters, self._target_critic_parameters]
        moments = [tensor for optimiser in self._optimisers.values() for tensor in optimiser.state_dict().values()]
        self.changes: list[Tensor] = [*(parameters.flat.detach() for parameters in flats), *moments, self.sums]
        self.noise_shape: tuple[int, ...] = (recipe.batch_size, reals)
        self.phases: Sequence[Update] = [self.update_critics] * (recipe.policy_delay - 1) + [self.update]
        # (batch, noise) and (batch) → means to log, and one value per transition; off_policy_numpy.py may replace them.
        self.critic_gradient: GradientOf = partial(gradient, self.critic_parameters, self._critic_loss)
        self.actor_gradient: GradientOf = partial(gradient, self.parameters, self._actor_loss)

    # -- one update ----------------------------------------------------------------------------------------------------

    def update(self, batch: Transitions, noise: Tensor) -> Tensor:
        """Update critics, actor and targets; returns |TD error| [B]."""
        errors = self.update_critics(batch, noise)
        means, _ = self.actor_gradient(batch)
        self._step("actor", self.parameters)
        self.sums[2:].add_(means)
        with torch.no_grad():
            for target, online in (
                (self._target_parameters, self.parameters),
                (self._target_critic_parameters, self.critic_parameters),
            ):
                target.flat.data.lerp_(online.flat.detach(), self.tau.unsqueeze(1))
        return errors

    def update_critics(self, batch: Transitions, noise: Tensor) -> Tensor:
        """Update the critics; returns |TD error| [B]."""
        means, errors = self.critic_gradient(batch, noise)
        self._step("critics", self.critic_parameters)
        self.sums[:2].add_(means)
        return errors

    def _critic_loss(self, batch: Transitions, noise: Tensor) -> Loss:
        """The critics' squared errors, and |TD error| of each transition averaged over critics."""
        with torch.no_grad():
            target = batch.returns + batch.discounts * self._next_value(batch.next_obs, noise)
        q = self.critics(batch.obs, batch.actions)  # [E, B]
        errors = q - target
        loss = (batch.weights * errors.square()).mean(1).sum()
        with torch.no_grad():
            return Loss(loss, torch.stack((loss, q.mean())), errors.abs().mean(0))

    def _next_value(self, obs: Tensor, noise: Tensor) -> Tensor:
        """The minimum over critics of Q̄(s, a) [B], where a is the target policy's smoothed action."""
        clip = self.recipe.target_noise_clip
        smoothing = (self.recipe.target_policy_noise * noise).clamp(-clip, clip)
        actions = (self.target_policy.actions(obs) + smoothing).clamp(-1.0, 1.0)
        value: Tensor = self.target_critics(obs, actions).amin(0)
        return value

    def _actor_loss(self, batch: Transitions) -> Loss:
        """−Q₁ of the policy's actions; the second mean counts actor updates."""
        q = self.critics.first(batch.obs, self.policy.actions(batch.obs))
        loss = -(batch.valid * q).mean()
        with torch.no_grad():
            return Loss(loss, torch.stack((loss, torch.ones_like(loss))))

    @torch.no_grad()
    def _step(self, name: str, parameters: FlatParameters) -> None:
        self._gradient.finish(parameters.grad)
        if math.isfinite(self.recipe.max_grad_norm):
            parameters.clip_(self.max_grad_norm)
        self._optimisers[name].step()

    # -- exploration, metrics, checkpoints -----------------------------------------------------------------------------

    def set_exploration(self, progress: float, *, warm_up: bool) -> None:
        """Uniformly random actions during warm-up; then the policy's actions with Gaussian noise."""
        self.policy.distribution.at_random.fill_(warm_up)

    def current_metrics(self) -> dict[str, Tensor]:
        """The mean actor loss over actor updates, of which there are fewer than critic updates."""
        return {"actor_loss": self.sums[2] / self.sums[3].clamp(min=1.0)}

    def plasticity(self, batch: Transitions) -> dict[str, Tensor]:
        """Plasticity metrics of the actor and the first critic."""
        parameters = self.parameters, self.critic_parameters
        return actor_critic_plasticity(self.policy, self.critics, parameters, batch, self.recipe.max_grad_norm)

    def state_dict(self) -> dict[str, Any]:
        """Networks and optimisers."""
        networks = {name: network.state_dict() for name, network in self._networks().items()}
        optimisers = {name: optimiser.state_dict() for name, optimiser in self._optimisers.items()}
        return {**networks, "optimisers": optimisers}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Copy a checkpoint's values into the existing tensors."""
        for name, network in self._networks().items():
            network.load_state_dict(state[name])
        for name, optimiser in self._optimisers.items():
            optimiser.load_state_dict(state["optimisers"][name])

    def start_from(self, state: dict[str, Any]) -> None:
        """Take over policy and critics; the target networks are copies of them."""
        merged = with_parts_of(self.state_dict(), state, ("policy", *self.start_parts))
        targets = {"target_policy": merged["policy"], "target_critics": merged["critics"]}
        self.load_state_dict(merged | targets)

    def _networks(self) -> dict[str, torch.nn.Module]:
        return {
            "policy": self.policy,
            "critics": self.critics,
            "target_policy": self.target_policy,
            "target_critics": self.target_critics,
        }
