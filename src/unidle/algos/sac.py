"""Soft actor-critic (Haarnoja et al. 2018) with a learned temperature (Haarnoja et al. 2019).

The policy maximises reward and entropy, E[Σ γᵗ (r + α H(π(·|s)))]. An update from a batch of (s, a, R, γᵐ, s'), where R
is the m-step return, takes these steps in order (equation numbers: Haarnoja et al. 2019, arXiv:1812.05905):

    V(s') = min Q̄(s', a') − α log π(a'|s'),  a' ~ π(·|s')         value of the next state       (3)
    J(Q)  = ½ E[(Q(s, a) − (R + γᵐ V(s')))²]                       critic loss                   (5)
    J(π)  = E[α log π(ã|s) − min Q(s, ã)],   ã = tanh(μ + σε)      actor loss                    (9)
    J(α)  = E[−log α (log π(ã|s) + H̄)]                             temperature loss              (18)
    Q̄     ← τ Q + (1 − τ) Q̄                                        target networks

The minimum is over the critics. J(α) has log α where equation 18 has α, as in most implementations. For a Discrete
action space the expectations over a' and ã are sums (Christodoulou 2019), and the critics return the values of all
actions at once.
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
from unidle.config import SACRecipe
from unidle.nn.critics import Critics
from unidle.nn.optim.adam import FlatAdam
from unidle.nn.optim.flat_parameters import FlatParameters
from unidle.nn.optim.optimiser import Optimiser, new_optimiser
from unidle.nn.sac_policy import SACPolicy
from unidle.spaces.distributions import MASKED_BELOW

_DISCRETE_ENTROPY = 0.98  # target entropy of a Discrete action space, as a share of the maximum
_HE_HEAD = 3e-3  # bound of the initial weights and biases of the critics' output layers with weight_init: he


class SAC:
    """Actor, critics, temperature, and their update from one batch."""

    metrics: tuple[str, ...] = ("critic_loss", "value", "actor_loss", "entropy")
    start_parts: tuple[str, ...] = ("critics",)

    def __init__(self, policy: SACPolicy, recipe: SACRecipe, gradient: Gradient) -> None:
        assert isinstance(recipe.batch_size, int)
        self.policy, self.recipe, self._gradient = policy, recipe, gradient
        self.n_tasks = recipe.n_tasks
        device = next(policy.parameters()).device
        self.critics = Critics(
            policy.encoder,
            recipe.n_critics,
            recipe.critic_widths,
            recipe.activation,
            reals=policy.distribution.reals,
            categories=policy.distribution.n_logits,
            n_tasks=recipe.n_tasks,
        )
        if recipe.weight_init == "he":
            self.critics.ensemble.init_he(_HE_HEAD)
        self.critics.to(device)
        self.targets = copy.deepcopy(self.critics)
        self.parameters = FlatParameters(policy)
        self.critic_parameters = FlatParameters(self.critics)
        self.target_flat = FlatParameters(self.targets).flat.detach()
        self.targets.requires_grad_(False)
        initial_alpha = recipe.ent_coef_init if recipe.ent_coef == "auto" else recipe.ent_coef
        self.log_alpha = torch.full((1, recipe.n_tasks), math.log(initial_alpha), device=device)  # [member, task]
        self.alpha_grad = torch.zeros_like(self.log_alpha)
        self.target_entropy = _target_entropy(policy, recipe)
        setting = partial(per_member, [recipe], device=device)
        self.learning_rate, self.max_grad_norm, self.tau = map(setting, ("learning_rate", "max_grad_norm", "tau"))
        self.optimisers: dict[str, Optimiser] = {
            "actor": new_optimiser(recipe, self.parameters, self.learning_rate),
            "critics": new_optimiser(recipe, self.critic_parameters, self.learning_rate),
            # Always Adam, as in other libraries: it has a single parameter, which must not decay.
            "temperature": FlatAdam(self.log_alpha, self.alpha_grad, self.learning_rate, eps=recipe.adam_eps),
        }
        self.sums = torch.zeros(len(self.metrics), device=device)
        flats = [self.parameters.flat.detach(), self.critic_parameters.flat.detach(), self.target_flat]
        moments = [tensor for optimiser in self.optimisers.values() for tensor in optimiser.state_dict().values()]
        self.changes: list[Tensor] = [*flats, self.log_alpha, *moments, self.sums]
        self.noise_shape: tuple[int, ...] = (2, recipe.batch_size, policy.distribution.reals)  # ε for a' and for ã
        self.phases: Sequence[Update] = (self.update,)
        # (batch, α, noise) → means to log, and one value per transition; off_policy_numpy.py may replace them.
        self.critic_gradient: GradientOf = partial(gradient, self.critic_parameters, self._critic_loss)
        self.actor_gradient: GradientOf = partial(gradient, self.parameters, self._actor_loss)

    # -- one update ----------------------------------------------------------------------------------------------------

    def update(self, batch: Transitions, noise: Tensor) -> Tensor:
        """Update critics, targets, actor and temperature; returns |TD error| [B]."""
        alpha = self.alpha(batch)
        critic_means, errors = self.critic_gradient(batch, alpha, noise[0])
        self.step("critics")
        actor_means, entropy_gap = self.actor_gradient(batch, alpha, noise[1])
        self.step("actor")
        if self.recipe.ent_coef == "auto":
            self._update_alpha(batch, entropy_gap)
        self.sums.add_(torch.cat((critic_means, actor_means)))
        return errors

    def alpha(self, batch: Transitions) -> Tensor:
        """The temperature of each transition's task [B]."""
        alpha = self.log_alpha.exp().squeeze(0)
        return alpha.expand(len(batch)) if self.n_tasks == 1 else alpha[self.policy.tasks(batch.obs)]

    def _critic_loss(self, batch: Transitions, alpha: Tensor, noise: Tensor) -> Loss:
        """Equation 5, summed over critics, and |TD error| of each transition averaged over critics."""
        with torch.no_grad():
            target = batch.returns + batch.discounts * self._next_value(batch.next_obs, alpha, noise)
        q = self.critics(batch.obs, batch.actions)  # [E, B] or [E, B, categories]
        if q.dim() == 3:
            q = q.gather(2, batch.actions.long().expand(len(q), -1, -1)).squeeze(2)
        limit = self.recipe.value_limit
        if limit is not None:
            q, target = q.clamp(-limit, limit), target.clamp(-limit, limit)
        errors = q - target
        loss = 0.5 * (batch.weights * errors.square()).mean(1).sum()
        with torch.no_grad():
            return Loss(loss, torch.stack((loss, q.mean())), errors.abs().mean(0))

    def _next_value(self, obs: Tensor, alpha: Tensor, noise: Tensor) -> Tensor:
        """Equation 3: V(s) [B], from one sampled action or as a sum over all categories."""
        params, _ = self.policy.act(obs)
        distribution = self.policy.distribution
        if distribution.heads:  # Discrete
            log_probs = distribution.log_probs(params.logits).squeeze(-2)
            values = self.targets(obs, None).amin(0) - alpha.unsqueeze(-1) * log_probs
            return (log_probs.exp() * values).sum(-1)
        actions, log_prob = distribution.sample_with_log_prob(params, noise)
        value: Tensor = self.targets(obs, actions).amin(0) - alpha * log_prob
        return value

    def _actor_loss(self, batch: Transitions, alpha: Tensor, noise: Tensor) -> Loss:
        """Equation 9, and log π + H̄ of each transition: by how much its entropy is below the target."""
        params, _ = self.policy.act(batch.obs)
        distribution = self.policy.distribution
        target_entropy: Tensor | float = self.target_entropy
        if distribution.heads:  # Discrete
            log_probs = distribution.log_probs(params.logits).squeeze(-2)
            with torch.no_grad():
                q = self.critics(batch.obs, None).amin(0)
            losses = (log_probs.exp() * (alpha.unsqueeze(-1) * log_probs - q)).sum(-1)
            log_prob = (log_probs.exp() * log_probs).sum(-1)
            if self.recipe.target_entropy is None:  # masked actions do not count
                target_entropy = _DISCRETE_ENTROPY * (log_probs > MASKED_BELOW).sum(-1).log()
        else:
            actions, log_prob = distribution.sample_with_log_prob(params, noise)
            losses = alpha * log_prob - self.critics(batch.obs, actions).amin(0)
        loss = (batch.valid * losses).mean()
        with torch.no_grad():
            return Loss(loss, torch.stack((loss, -log_prob.mean())), log_prob + target_entropy)

    @torch.no_grad()
    def _update_alpha(self, batch: Transitions, entropy_gap: Tensor) -> None:
        """Step log α along the gradient of J(α); `entropy_gap` is log π + H̄ [B]."""
        grads = -batch.valid * entropy_gap / len(entropy_gap)
        self.alpha_grad.zero_()
        if self.n_tasks == 1:
            self.alpha_grad.add_(grads.sum())
        else:  # not index_add, whose order of summation varies on a GPU
            one_hot = self.policy.tasks(batch.obs).unsqueeze(1) == torch.arange(self.n_tasks, device=grads.device)
            self.alpha_grad.add_((grads.unsqueeze(1) * one_hot).sum(0))
        self._gradient.finish(self.alpha_grad)
        self.optimisers["temperature"].step()

    @torch.no_grad()
    def step(self, name: str) -> None:
        """Clip the gradient of the actor or the critics and step; with the critics, update the target networks."""
        parameters = self.parameters if name == "actor" else self.critic_parameters
        self._gradient.finish(parameters.grad)
        if math.isfinite(self.recipe.max_grad_norm):
            parameters.clip_(self.max_grad_norm)
        self.optimisers[name].step()
        if name == "critics":
            self.target_flat.lerp_(self.critic_parameters.flat.detach(), self.tau.unsqueeze(1))

    # -- exploration, metrics, checkpoints -----------------------------------------------------------------------------

    def set_exploration(self, progress: float, *, warm_up: bool) -> None:
        """Uniformly random actions during warm-up; then the stochastic policy explores."""
        self.policy.distribution.at_random.fill_(warm_up and not self.recipe.use_sde_at_warmup)

    def current_metrics(self) -> dict[str, Tensor]:
        """The temperature, averaged over tasks, and the learned standard deviation of exploration matrices."""
        metrics = {"temperature": self.log_alpha.exp().mean()}
        if self.policy.log_std is not None:
            metrics["std"] = self.policy.distribution.real.std(self.policy.log_std.detach()).mean()
        return metrics

    def plasticity(self, batch: Transitions) -> dict[str, Tensor]:
        """Plasticity metrics of the actor and the first critic."""
        parameters = self.parameters, self.critic_parameters
        return actor_critic_plasticity(self.policy, self.critics, parameters, batch, self.recipe.max_grad_norm)

    def state_dict(self) -> dict[str, Any]:
        """Networks, temperature and optimisers."""
        return {
            "policy": self.policy.state_dict(),
            "critics": self.critics.state_dict(),
            "targets": self.targets.state_dict(),
            "log_temperature": self.log_alpha,
            "optimisers": {name: optimiser.state_dict() for name, optimiser in self.optimisers.items()},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Copy a checkpoint's values into the existing tensors."""
        self.policy.load_state_dict(state["policy"])
        self.critics.load_state_dict(state["critics"])
        self.targets.load_state_dict(state["targets"])
        self.log_alpha.copy_(state["log_temperature"])
        for name, optimiser in self.optimisers.items():
            optimiser.load_state_dict(state["optimisers"][name])

    def start_from(self, state: dict[str, Any]) -> None:
        """Take over policy and critics; the target networks are copies of the critics."""
        merged = with_parts_of(self.state_dict(), state, ("policy", *self.start_parts))
        self.load_state_dict(merged | {"targets": merged["critics"]})


def _target_entropy(policy: SACPolicy, recipe: SACRecipe) -> float:
    """H̄: the setting; by default −dim(a) (2019, appendix D), or 0.98 of the maximum for Discrete actions."""
    if recipe.target_entropy is not None:
        return recipe.target_entropy
    if policy.distribution.heads:
        return _DISCRETE_ENTROPY * math.log(policy.distribution.n_logits)
    return -float(policy.distribution.reals)
