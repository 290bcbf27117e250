"""Soft actor-critic (Haarnoja et al. 2018, with the temperature of the 2019 report), read top to bottom.

    collect a fragment → remember it (`Experience`) → so many updates: critics, policy, temperature, targets

The policy maximises E[Σ γᵗ (r + α H)]. Its critics learn Q(s, a) = r + γ (min Q'(s', a') − α log π(a' | s')) with a'
from the policy and slowly moving targets Q'; α moves so that the entropy stays at its target. For a Discrete space the
expectation over a' is a sum (Christodoulou 2019), and the critics give the value of every action at once.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Generator
from typing import Any

import torch
from torch import Tensor, nn

from unidle.algos.capturing import Capturer, as_it_is
from unidle.algos.micro_batches import FallBack, Loss, Pieces
from unidle.algos.off_policy import Experience, Updates
from unidle.algos.plasticity import of_ensemble, of_trunk
from unidle.buffers.replay import Transitions
from unidle.buffers.rollout import Rollout
from unidle.config import Recipe
from unidle.nn.encoder import Encoder
from unidle.nn.ensemble import Ensemble
from unidle.nn.optim.adam import FlatAdam
from unidle.nn.optim.flat_parameters import FlatParameters
from unidle.nn.sac_policy import SACPolicy, outputs_of_task
from unidle.rng import PLASTICITY, keyed_generator

_OF_THE_MOST = 0.98  # entropy that categories aim at, as a part of the most they can have
_HE_HEAD = 3e-3  # how close to 0 the critics' heads begin with weight_init: he
_METRICS = ("critic_loss", "value", "actor_loss", "entropy")


class Critics(nn.Module):
    """What actions are worth: Q(s, a) [E, B] of reals, or [E, B, categories]."""

    def __init__(self, policy: SACPolicy, recipe: Recipe) -> None:
        super().__init__()
        self.encoder: Encoder = copy.deepcopy(policy.encoder)
        reals, categories = policy.distribution.reals, policy.distribution.n_logits
        arch = recipe.net_arch if recipe.critic_arch is None else recipe.critic_arch
        inputs = self.encoder.n_features + reals
        self._n_tasks, self._takes_actions = recipe.n_tasks, reals > 0
        outputs = recipe.n_tasks * max(1, categories)
        self.ensemble = Ensemble(recipe.n_critics, inputs, arch, outputs, recipe.activation)
        if recipe.weight_init == "he":
            self.ensemble.begin_as_he(_HE_HEAD)

    def forward(self, obs: Tensor, actions: Tensor | None) -> Tensor:
        """Values of these actions, or of all."""
        features = self.encoder(obs)
        if not self._takes_actions:
            return outputs_of_task(self.ensemble(features), features, self._n_tasks)
        assert actions is not None
        values = self.ensemble(torch.cat((features, actions), -1))
        return outputs_of_task(values, features, self._n_tasks).squeeze(-1)


class SAC:
    """A policy, its critics, and how what it remembers improves them."""

    def __init__(
        self,
        policy: SACPolicy,
        recipe: Recipe,
        capture: Capturer = as_it_is,
        fall_back: FallBack = lambda name, error, to: None,
    ) -> None:
        """`policy` must already be on its device: its parameters become views of one flat tensor there."""
        assert isinstance(recipe.batch_size, int)
        self.policy, self.recipe, self._batch_size = policy, recipe, recipe.batch_size
        self.critics = Critics(policy, recipe).to(next(policy.parameters()).device)
        self.parameters = FlatParameters(policy)
        device = self.parameters.flat.device
        self.targets = copy.deepcopy(self.critics)
        self.target_flat = FlatParameters(self.targets).flat.detach()
        self.targets.requires_grad_(False)
        self.critic_parameters = FlatParameters(self.critics)
        self.learning_rate = torch.tensor(recipe.learning_rate, device=device)
        first = 1.0 if recipe.temperature == "auto" else recipe.temperature
        self.log_temperature = torch.full((recipe.n_tasks,), math.log(first), device=device)
        self.temperature_grad = torch.zeros_like(self.log_temperature)
        self.target_entropy = _target_entropy(policy, recipe)
        self.adams = {
            "actor": self._adam(self.parameters.flat, self.parameters.grad),
            "critics": self._adam(self.critic_parameters.flat, self.critic_parameters.grad),
            "temperature": self._adam(self.log_temperature, self.temperature_grad),
        }
        sizes = policy.obs_layout.obs_bytes, policy.distribution.width
        self.experience = Experience(recipe, *sizes, device, capture, policy.tasks, fall_back)
        self.pieces = Pieces("A minibatch", fall_back)
        self.sums = torch.zeros(len(_METRICS), device=device)
        flats = [self.parameters.flat.detach(), self.critic_parameters.flat.detach(), self.target_flat]
        states = [tensor for adam in self.adams.values() for tensor in adam.state_dict().values()]
        self.changes = [*flats, self.log_temperature, *states, self.sums]  # by learning from a batch
        self._updates = Updates(self.update, [*self.changes, *self.experience.changes], device, capture)
        self._learn: Callable[[Transitions, Tensor], Tensor] = self.learn_plainly
        self._kernels_untried, self._fall_back = device.type == "cuda", fall_back
        self.policy.distribution.at_random.fill_(self.experience.is_at_random)

    def _adam(self, flat: Tensor, grad: Tensor) -> FlatAdam:
        return FlatAdam(flat, grad, self.learning_rate, eps=self.recipe.adam_eps)

    # -- one fragment --------------------------------------------------------------------------------------------------

    def set_progress(self, progress: float) -> None:
        """From 0 to 1 of the run: what follows a schedule."""
        recipe = self.recipe
        self.learning_rate.fill_(recipe.learning_rate * (1 - progress if recipe.lr_schedule == "linear" else 1.0))
        self.experience.set_progress(progress)

    def learning(
        self, rollout: Rollout, shuffle: torch.Generator, behaviour: object = None
    ) -> Generator[None, None, dict[str, Tensor]]:
        """Remember `rollout`, learn as often as is due, pausing now and then; returns metrics that nobody waited for.

        Who acted does not matter: what an action was worth is the same whoever chose it.
        """
        self.sums.zero_()
        due = yield from self.experience.rehearse(rollout, self._updates, shuffle)
        self.policy.distribution.at_random.fill_(self.experience.is_at_random)
        metrics = dict(zip(_METRICS, self.sums / max(1, due)))
        metrics["temperature"] = self.log_temperature.exp().mean()
        metrics["learning_rate"] = self.learning_rate.clone()
        metrics["pieces"] = torch.full_like(self.learning_rate, self.pieces.count)
        metrics["weights_finite"] = torch.isfinite(self.parameters.flat.detach()).all()
        return metrics | self.experience.told(due)

    # -- one update ----------------------------------------------------------------------------------------------------

    def update(self, generator: torch.Generator) -> None:
        """Learn from one batch."""
        batch = self.experience.memory.sample(self._batch_size, generator)
        reals = self.policy.distribution.reals
        noise = torch.randn(2, self._batch_size, reals, generator=generator, device=self.sums.device)
        if self._kernels_untried:
            self._kernels_untried = False
            self._take_up_kernels(batch, noise)
        self.experience.note_errors(batch.index, self._learn(batch, noise))

    def _take_up_kernels(self, batch: Transitions, noise: Tensor) -> None:
        """Use kernels if they exist and prove right on `batch`; the plain way is no less right, only slower."""
        try:
            from unidle.algos.sac_kernels import proven_update
        except ImportError:  # torch comes without Triton on some platforms
            return
        try:
            fused = proven_update(self, batch, noise)
        except Exception as error:
            self._fall_back("learning", error, "does without kernels of its own")
            return
        self._learn = self._learn if fused is None else fused.learn

    def learn_plainly(self, batch: Transitions, noise: Tensor) -> Tensor:
        """Take a step of all parts, with noise [2, B, ..] for what came next and what was seen.

        Returns how wrong the values were [B].
        """
        # An episode has one task: that of what follows is the same.
        tasks = self.policy.tasks(batch.obs) if self.recipe.n_tasks > 1 else None
        temperature = self.log_temperature.exp()
        temperature = temperature if tasks is None else temperature[tasks]
        obs = len(batch.obs)

        def heat(part: slice) -> Tensor:
            return temperature if tasks is None else temperature[part]

        def of_values(part: slice) -> Loss:
            return self._value_loss(batch.part(part), heat(part), noise[0][part])

        def of_actions(part: slice) -> Loss:
            return self._action_loss(batch.part(part), heat(part), noise[1][part])

        of_critics, errors = self.pieces.gradient(self.critic_parameters, obs, of_values)
        self.step_plainly("critics")
        of_actor, excess = self.pieces.gradient(self.parameters, obs, of_actions)
        self.step_plainly("actor")
        if self.recipe.temperature == "auto":
            self._learn_temperature(batch, tasks, excess)
        self.sums.add_(torch.cat((of_critics, of_actor)))
        return errors

    def _value_loss(self, batch: Transitions, temperature: Tensor, noise: Tensor) -> Loss:
        """How far the critics are from what came of the actions; of each transition, how wrong its value was."""
        with torch.no_grad():
            following = batch.returns + batch.discounts * self._soft_value(batch.next_obs, temperature, noise)
        values = self.critics(batch.obs, batch.actions)
        if values.dim() == 3:  # of all categories: take the one that was chosen
            values = values.gather(2, batch.actions.long().expand(len(values), -1, -1)).squeeze(2)
        limit = self.recipe.value_limit
        if limit is not None:  # beyond it there is nothing to learn, and nothing is passed on
            values, following = values.clamp(-limit, limit), following.clamp(-limit, limit)
        errors = values - following
        loss = 0.5 * (batch.weights * errors.square()).mean(1).sum()
        with torch.no_grad():
            return Loss(loss, torch.stack((loss, values.mean())), errors.abs().mean(0))

    def _soft_value(self, obs: Tensor, temperature: Tensor, noise: Tensor) -> Tensor:
        """V(s) = E[min Q'(s, a) − α log π(a | s)]: by one action, or over all categories."""
        params, _ = self.policy.act(obs)
        distribution = self.policy.distribution
        if distribution.heads:
            log_probs = distribution.log_probs(params.logits).squeeze(-2)
            values = self.targets(obs, None).amin(0) - temperature.unsqueeze(-1) * log_probs
            return (log_probs.exp() * values).sum(-1)
        actions, log_prob = distribution.sampled_with_log_prob(params, noise)
        value: Tensor = self.targets(obs, actions).amin(0) - temperature * log_prob
        return value

    def _action_loss(self, batch: Transitions, temperature: Tensor, noise: Tensor) -> Loss:
        """How far the policy is from better actions; of each transition, log π + H̄: how much entropy is missing."""
        params, _ = self.policy.act(batch.obs)
        distribution = self.policy.distribution
        wanted: Tensor | float = self.target_entropy
        if distribution.heads:
            log_probs = distribution.log_probs(params.logits).squeeze(-2)
            with torch.no_grad():
                values = self.critics(batch.obs, None).amin(0)
            losses = (log_probs.exp() * (temperature.unsqueeze(-1) * log_probs - values)).sum(-1)
            log_prob = (log_probs.exp() * log_probs).sum(-1)
            if self.recipe.target_entropy is None:
                wanted = _OF_THE_MOST * (log_probs > -1e7).sum(-1).log()  # that a mask allows
        else:
            actions, log_prob = distribution.sampled_with_log_prob(params, noise)
            losses = temperature * log_prob - self.critics(batch.obs, actions).amin(0)
        loss = (_counting(batch) * losses).mean()
        with torch.no_grad():
            return Loss(loss, torch.stack((loss, -log_prob.mean())), log_prob + wanted)

    @torch.no_grad()
    def _learn_temperature(self, batch: Transitions, tasks: Tensor | None, excess: Tensor) -> None:
        """Move it towards the entropy that is wanted."""
        # d/dx of −x (log π + H̄), x = log α of the task.
        slope = -_counting(batch) * excess / len(excess)
        self.temperature_grad.zero_()
        if tasks is None:
            self.temperature_grad.add_(slope.sum())
        else:  # not index_add, whose order, and so its rounding, is another each time on a GPU
            mine = tasks.unsqueeze(1) == torch.arange(len(self.log_temperature), device=tasks.device)
            self.temperature_grad.add_((slope.unsqueeze(1) * mine).sum(0))
        self.adams["temperature"].step()

    @torch.no_grad()
    def step_plainly(self, name: str) -> None:
        """Clip the gradient that is in place and step along it; the critics' targets follow them."""
        parameters = self.parameters if name == "actor" else self.critic_parameters
        if math.isfinite(self.recipe.max_grad_norm):
            parameters.clip_(self.recipe.max_grad_norm)
        self.adams[name].step()
        if name == "critics":
            # Polyak average: one kernel for all of them.
            self.target_flat.lerp_(self.critic_parameters.flat.detach(), self.recipe.tau)

    # -- what a checkpoint holds ---------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Everything that learning depends on, as tensors and plain values."""
        return {
            "policy": self.policy.state_dict(),
            "critics": self.critics.state_dict(),
            "targets": self.targets.state_dict(),
            "log_temperature": self.log_temperature,
            "adams": {name: adam.state_dict() for name, adam in self.adams.items()},
            "experience": self.experience.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Put a checkpoint's values into the tensors that are already here."""
        self.policy.load_state_dict(state["policy"])
        self.critics.load_state_dict(state["critics"])
        self.targets.load_state_dict(state["targets"])
        self.log_temperature.copy_(state["log_temperature"])
        for name, adam in self.adams.items():
            adam.load_state_dict(state["adams"][name])
        self.experience.load_state_dict(state["experience"])

    # -- how much of the networks can still learn ----------------------------------------------------------------------

    @torch.no_grad()
    def plasticity(self, seed: int, step: int) -> dict[str, Tensor]:
        """Measures of actor and critic 0 on a batch of its own, drawn from no stream of the run's; once it learns."""
        if not self.experience.updates:
            return {}
        replay, clip = self.experience.replay, self.recipe.max_grad_norm
        generator = keyed_generator(replay.counters[0].device, seed, PLASTICITY, step)
        batch = replay.sample(self._batch_size, generator)
        obs, actions = (part.to(self.sums.device) for part in (batch.obs, batch.actions))
        features = self.critics.encoder(obs)
        inputs = torch.cat((features, actions), -1) if self.policy.distribution.reals else features
        critic = of_ensemble(self.critics.ensemble, inputs, self.critic_parameters, clip)
        actor = of_trunk(self.policy.actor_trunk, self.policy.encoder(obs), self.parameters, clip)
        parts = {"critic": critic, "actor": actor}
        return {f"plasticity/{of}/{name}": value for of, part in parts.items() for name, value in part.items()}


def _counting(batch: Transitions) -> Tensor:
    """1 for each transition; 0 where a task has nothing yet to be drawn."""
    return (batch.weights > 0).float()


def _target_entropy(policy: SACPolicy, recipe: Recipe) -> float:
    """What the recipe says; else −1 for each real (2018, table 1), or 0.98 of the most that categories can have."""
    if recipe.target_entropy is not None:
        return recipe.target_entropy
    if policy.distribution.heads:
        return _OF_THE_MOST * math.log(policy.distribution.n_logits)
    return -float(policy.distribution.reals)
