"""Deep Q-learning (Mnih et al. 2015) with its usual improvements.

Actions are ε-greedy. An update from a batch of (s, a, R, γᵐ, s'), where R is the m-step return, takes these steps:

    y  = R + γᵐ max Q̄(s', ·)                     target (Mnih et al. 2015, algorithm 1)
    y  = R + γᵐ Q̄(s', argmax Q(s', ·))           target of double DQN (van Hasselt et al. 2016)
    L  = E[huber(Q(s, a) − y)]                    loss: errors clipped to ±1 in the gradient
    Q̄  ← τ Q + (1 − τ) Q̄                          every `target_update_interval` updates

The dueling architecture (Wang et al. 2016) is in nn/q_policy.py; prioritised replay (Schaul et al. 2016) and n-step
returns are in buffers/. For a MultiDiscrete space each head has its own Q, and all share the mean of their targets
(Tavakoli et al. 2018).
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from unidle.algos.member_settings import per_member
from unidle.algos.micro_batches import Loss
from unidle.algos.off_policy import Gradient, GradientOf, Update
from unidle.algos.start_from import with_parts_of
from unidle.buffers.replay import Transitions
from unidle.config import DQNRecipe
from unidle.nn.optim.flat_parameters import FlatParameters
from unidle.nn.optim.optimiser import new_optimiser
from unidle.nn.q_policy import QPolicy


class DQN:
    """The Q network, its target, and their update from one batch."""

    metrics: tuple[str, ...] = ("loss", "value", "grad_norm")
    start_parts: tuple[str, ...] = ()
    noise_shape: tuple[int, ...] = (0,)
    n_tasks = 1

    def __init__(self, policy: QPolicy, recipe: DQNRecipe, gradient: Gradient) -> None:
        self.policy, self.recipe, self._gradient = policy, recipe, gradient
        self.target = copy.deepcopy(policy)
        self.parameters, self.target_parameters = FlatParameters(policy), FlatParameters(self.target)
        device = self.parameters.flat.device
        setting = partial(per_member, [recipe], device=device)
        self.learning_rate, self.max_grad_norm, self.tau = map(setting, ("learning_rate", "max_grad_norm", "tau"))
        self._optimiser = new_optimiser(recipe, self.parameters, self.learning_rate)
        self._until_target = torch.full((), recipe.target_update_interval, device=device)  # updates
        self.sums = torch.zeros(len(self.metrics), device=device)
        flats = [self.parameters.flat, self.target_parameters.flat]
        self.changes: list[Tensor] = [*flats, *self._optimiser.state_dict().values(), self.sums, self._until_target]
        self.phases: Sequence[Update] = (self.update,)
        # (batch) → means to log, and |TD error| of each transition; off_policy_numpy.py may replace it.
        self.loss_gradient: GradientOf = partial(gradient, self.parameters, self._loss)

    # -- one update ----------------------------------------------------------------------------------------------------

    def update(self, batch: Transitions, noise: Tensor) -> Tensor:
        """Update the Q network and, when it is due, the target network; returns |TD error| [B]."""
        means, errors = self.loss_gradient(batch)
        self._gradient.finish(self.parameters.grad)
        norms = self.parameters.clip_(self.max_grad_norm)
        self._optimiser.step()
        with torch.no_grad():
            self._update_target()
            self.sums.add_(torch.cat((means, norms)))
        return errors

    def _loss(self, batch: Transitions) -> Loss:
        """The Huber loss, and |TD error| of each transition averaged over heads."""
        with torch.no_grad():
            target = batch.returns + batch.discounts * self._next_value(batch.next_obs)
        actions = batch.actions.long().unsqueeze(-1)
        q = self.policy.values(batch.obs).gather(-1, actions).squeeze(-1)  # [B, heads]
        errors = q - target.unsqueeze(-1)
        huber = torch.where(errors.abs() < 1, 0.5 * errors.square(), errors.abs() - 0.5).mean(-1)
        loss = (batch.weights * huber).mean()
        with torch.no_grad():
            return Loss(loss, torch.stack((loss, q.mean())), errors.abs().mean(-1))

    def _next_value(self, obs: Tensor) -> Tensor:
        """The maximum of Q̄(s, ·), or double DQN's estimate, averaged over heads [B]."""
        values = self.target.values(obs)
        if not self.recipe.double_dqn:
            return values.amax(-1).mean(-1)
        chosen = self.policy.values(obs).argmax(-1, keepdim=True)
        return values.gather(-1, chosen).squeeze(-1).mean(-1)

    def _update_target(self) -> None:
        """Update the target network every `target_update_interval` calls; for CUDA graphs without a branch."""
        self._until_target.sub_(1)
        is_due = self._until_target == 0
        if is_due.is_cpu and not is_due:  # there are no graphs
            return
        self.target_parameters.flat.data.lerp_(self.parameters.flat.detach(), (is_due * self.tau).unsqueeze(1))
        self._until_target.add_(is_due * self.recipe.target_update_interval)

    # -- exploration, metrics, checkpoints -----------------------------------------------------------------------------

    def set_exploration(self, progress: float, *, warm_up: bool) -> None:
        """ε falls linearly from 1 to `exploration_final_eps` over `exploration_fraction` of the run."""
        recipe = self.recipe
        fallen = min(1.0, progress / recipe.exploration_fraction) if recipe.exploration_fraction else 1.0
        epsilon = 1.0 + fallen * (recipe.exploration_final_eps - 1.0)
        self.policy.distribution.epsilon.fill_(1.0 if warm_up else epsilon)

    def current_metrics(self) -> dict[str, Tensor]:
        """The exploration rate ε."""
        return {"epsilon": self.policy.distribution.epsilon.clone()}

    def plasticity(self, batch: Transitions) -> dict[str, Tensor]:
        """Empty: not measured for DQN."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        """Networks, optimiser and the updates until the next target update."""
        return {
            "policy": self.policy.state_dict(),
            "target": self.target.state_dict(),
            "optimiser": self._optimiser.state_dict(),
            "until_target": self._until_target,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Copy a checkpoint's values into the existing tensors."""
        self.policy.load_state_dict(state["policy"])
        self.target.load_state_dict(state["target"])
        self._optimiser.load_state_dict(state["optimiser"])
        self._until_target.copy_(state["until_target"])

    def start_from(self, state: dict[str, Any]) -> None:
        """Take over the Q network; the target network is a copy of it."""
        merged = with_parts_of(self.state_dict(), state, ("policy", *self.start_parts))
        self.load_state_dict(merged | {"target": merged["policy"]})
