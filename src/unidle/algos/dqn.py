"""Deep Q-learning (Mnih et al. 2015) with its usual improvements, read top to bottom.

    collect a fragment, ε-greedily → remember it (`Experience`) → so many updates towards r + γ max Q'(s', ·)

Double (van Hasselt et al. 2016): Q chooses the next action and Q' values it. Duelling (Wang et al. 2016) is the
network's affair. Prioritised (Schaul et al. 2016) and n-step returns are the memory's. Several heads (MultiDiscrete)
learn independently from the same reward (Tavakoli et al. 2018): each towards r + γ mean over heads of max Q'.
"""

from __future__ import annotations

import copy
from collections.abc import Generator
from typing import Any

import torch
from torch import Tensor

from unidle.algos.capturing import Capturer, as_it_is
from unidle.algos.micro_batches import FallBack, Loss, Pieces
from unidle.algos.off_policy import Experience, Updates
from unidle.buffers.replay import Transitions
from unidle.buffers.rollout import Rollout
from unidle.config import Recipe
from unidle.nn.optim.adam import FlatAdam
from unidle.nn.optim.flat_parameters import FlatParameters
from unidle.nn.q_policy import QPolicy

_METRICS = ("loss", "value", "grad_norm")


class DQN:
    """A network of values, and how what it remembers improves it."""

    def __init__(
        self,
        policy: QPolicy,
        recipe: Recipe,
        capture: Capturer = as_it_is,
        fall_back: FallBack = lambda name, error, to: None,
    ) -> None:
        """`policy` must already be on its device: its parameters become views of one flat tensor there."""
        assert isinstance(recipe.batch_size, int)
        self.policy, self.recipe, self._batch_size = policy, recipe, recipe.batch_size
        self.target = copy.deepcopy(policy)
        self._target_parameters = FlatParameters(self.target)
        self.parameters = FlatParameters(policy)
        device = self.parameters.flat.device
        self.learning_rate = torch.tensor(recipe.learning_rate, device=device)
        self._adam = FlatAdam(self.parameters.flat, self.parameters.grad, self.learning_rate, eps=self.recipe.adam_eps)
        sizes = policy.obs_layout.obs_bytes, policy.distribution.width
        self.experience = Experience(recipe, *sizes, device, capture, fall_back=fall_back)
        self.pieces = Pieces("A minibatch", fall_back)
        self._sums = torch.zeros(len(_METRICS), device=device)
        self._until_target = torch.full((), recipe.target_update_interval, device=device)  # updates
        changes = [self.parameters.flat, self._target_parameters.flat, *self._adam.state_dict().values()]
        changes += [self._sums, self._until_target, *self.experience.changes]
        self._updates = Updates(self.update, changes, device, capture)
        self._explore(0.0)

    def _explore(self, progress: float) -> None:
        """Epsilon falls linearly from 1 to `exploration_final_eps` over `exploration_fraction` of the run."""
        recipe = self.recipe
        fallen = min(1.0, progress / recipe.exploration_fraction) if recipe.exploration_fraction else 1.0
        epsilon = 1.0 + fallen * (recipe.exploration_final_eps - 1.0)
        self.policy.distribution.epsilon.fill_(1.0 if self.experience.is_at_random else epsilon)

    # -- one fragment --------------------------------------------------------------------------------------------------

    def set_progress(self, progress: float) -> None:
        """From 0 to 1 of the run: what follows a schedule."""
        recipe, self._progress = self.recipe, progress
        self.learning_rate.fill_(recipe.learning_rate * (1 - progress if recipe.lr_schedule == "linear" else 1.0))
        self.experience.set_progress(progress)

    def learning(
        self, rollout: Rollout, shuffle: torch.Generator, behaviour: object = None
    ) -> Generator[None, None, dict[str, Tensor]]:
        """Remember `rollout`, learn as often as is due, pausing now and then; returns metrics that nobody waited for.

        Who acted does not matter: what an action was worth is the same whoever chose it.
        """
        self._sums.zero_()
        due = yield from self.experience.rehearse(rollout, self._updates, shuffle)
        self._explore(self._progress)
        metrics = dict(zip(_METRICS, self._sums / max(1, due)))
        metrics["epsilon"] = self.policy.distribution.epsilon.clone()
        metrics["learning_rate"] = self.learning_rate.clone()
        metrics["pieces"] = torch.full_like(self.learning_rate, self.pieces.count)
        metrics["weights_finite"] = torch.isfinite(self.parameters.flat.detach()).all()
        return metrics | self.experience.told(due)

    # -- one update ----------------------------------------------------------------------------------------------------

    def update(self, generator: torch.Generator) -> None:
        """Learn from one batch."""
        batch = self.experience.memory.sample(self._batch_size, generator)
        obs = len(batch.obs)
        means, errors = self.pieces.gradient(self.parameters, obs, lambda part: self._loss(batch.part(part)))
        norm = self.parameters.clip_(self.recipe.max_grad_norm)
        self._adam.step()
        with torch.no_grad():
            self.experience.note_errors(batch.index, errors)
            self._move_target()
            self._sums.add_(torch.cat((means, norm.unsqueeze(0))))

    def _loss(self, batch: Transitions) -> Loss:
        """How far values are from what followed; of each transition, the size of the error."""
        with torch.no_grad():
            following = batch.returns + batch.discounts * self._best_value(batch.next_obs)
        chosen = batch.actions.long().unsqueeze(-1)
        values = self.policy.values(batch.obs).gather(-1, chosen).squeeze(-1)  # [B, heads]
        errors = values - following.unsqueeze(-1)
        # Huber's loss: squared near 0, linear beyond 1.
        losses = torch.where(errors.abs() < 1, 0.5 * errors.square(), errors.abs() - 0.5).mean(-1)
        loss = (batch.weights * losses).mean()
        with torch.no_grad():
            return Loss(loss, torch.stack((loss, values.mean())), errors.abs().mean(-1))

    def _best_value(self, obs: Tensor) -> Tensor:
        """Max Q'(s, ·) [B], the mean over heads."""
        values = self.target.values(obs)
        if not self.recipe.double_dqn:
            return values.amax(-1).mean(-1)
        chosen = self.policy.values(obs).argmax(-1, keepdim=True)
        return values.gather(-1, chosen).squeeze(-1).mean(-1)

    def _move_target(self) -> None:
        """Every `target_update_interval` updates, by τ of the way; without a branch, for a graph to record."""
        self._until_target.sub_(1)
        is_due = self._until_target == 0
        self._target_parameters.flat.data.lerp_(self.parameters.flat.detach(), is_due * self.recipe.tau)
        self._until_target.add_(is_due * self.recipe.target_update_interval)

    def plasticity(self, seed: int, step: int) -> dict[str, Tensor]:
        """Not measured."""
        return {}

    # -- what a checkpoint holds ---------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Everything that learning depends on, as tensors and plain values."""
        return {
            "policy": self.policy.state_dict(),
            "target": self.target.state_dict(),
            "adam": self._adam.state_dict(),
            "until_target": self._until_target,
            "experience": self.experience.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Put a checkpoint's values into the tensors that are already here."""
        self.policy.load_state_dict(state["policy"])
        self.target.load_state_dict(state["target"])
        self._adam.load_state_dict(state["adam"])
        self._until_target.copy_(state["until_target"])
        self.experience.load_state_dict(state["experience"])
