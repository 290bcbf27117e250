"""Proximal policy optimisation (Schulman et al. 2017), the clipped version.

    rollout → log-probabilities, values, advantages (`prepare_in_parts`) → epochs of minibatches (`update_in_parts`)

The collector runs only the actor; log-probabilities and values of the whole rollout come from one batched pass here,
with the weights that learning starts from, so every ratio is 1 at the first minibatch. If older weights acted (because
the rollout was collected during the previous update), this is decoupled PPO (Hilton et al. 2022): clipping is relative
to the weights that learning starts from, a truncated importance weight corrects for the policy that acted, and
advantages weight the following steps by it too (V-trace, Espeholt et al. 2018).

Operations with faster implementations go through `ops` (ppo_ops.py), which also captures CUDA graphs and splits
minibatches that do not fit in memory. Nothing here depends on that.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from unidle.algos.evaluation import sequences
from unidle.algos.experience_replay import ExperienceReplay
from unidle.algos.member_settings import per_member
from unidle.algos.metrics import Metrics
from unidle.algos.micro_batches import AfterGradient, Loss
from unidle.algos.run_to_end import run_to_end
from unidle.algos.schedules import schedules_of
from unidle.algos.start_from import with_parts_of
from unidle.buffers.advantages import discounted_returns
from unidle.buffers.replay import gather_obs
from unidle.buffers.rollout import Rollout
from unidle.config import PPORecipe
from unidle.config.validate import sequence_length
from unidle.distributed.ranks import Ranks
from unidle.kernels.ppo_types import Coefficients, Counters
from unidle.nn.actor_critic import ActorCritic
from unidle.nn.normalise import RunningNorm
from unidle.nn.optim.flat_parameters import FlatParameters
from unidle.nn.optim.optimiser import new_optimiser
from unidle.spaces.distributions import Parameters

_REWARD_CLIP = 10.0
_ADVANTAGE_EPS = 1e-8
_KL_MARGIN = 1.5  # a minibatch whose KL divergence exceeds the target by this factor ends the iteration
_MAX_IMPORTANCE = 2.0  # importance weights are unbounded, and a few large ones would dominate the loss
_METRICS = ("policy_loss", "value_loss", "entropy", "approx_kl", "clip_fraction", "grad_norm")
N_MEANS = len(_METRICS) - 1  # those of a minibatch's loss


@dataclass
class Batch:
    """A rollout cut into S sequences of L steps (L is 1 without recurrence); a minibatch is some of the sequences."""

    obs: Tensor  # [S, L, obs_bytes]
    actions: Tensor  # [S, L, width]
    log_probs: Tensor  # [S, L] of the weights that learning starts from
    values: Tensor  # [S, L]
    advantages: Tensor  # [S, L]
    returns: Tensor  # [S, L]
    starts: Tensor | None  # [S, L] where episodes start, for a recurrent policy
    states: Tensor | None  # [S, state] recurrent state at the start of each sequence
    weights: Tensor | None  # [S, L] truncated importance weights if older weights acted, else None

    def at(self, index: Tensor) -> Batch:
        """The minibatch of these sequences."""
        obs, *others = vars(self).values()
        parts = (None if field is None else field.index_select(0, index) for field in others)
        return Batch(gather_obs(obs, index), *parts)  # type: ignore[arg-type]


class Ops(Protocol):
    """The operations of an iteration that have several implementations (see ppo_ops.py)."""

    shuffle: Callable[[int, torch.Generator], Tensor]  # a random permutation of range(n)
    evaluate: Callable[[Rollout], tuple[Tensor, Tensor]]  # log-probabilities [T, N] and values [T + 1, N]
    log_probs: Callable[[ActorCritic, Rollout], Tensor]  # [T, N] by another policy
    values: Callable[[Tensor, Tensor], Tensor]  # of observations [n, obs_bytes] in recurrent states [n, S]
    gae: Callable[..., tuple[Tensor, Tensor]]  # `buffers.advantages.gae`

    def prepare(self, rollout: Rollout, behaviour: ActorCritic | None) -> Generator[None, None, Batch]:
        """`PPO.prepare_in_parts`."""

    def minibatches(self, batch: Batch, shuffle: torch.Generator) -> Iterator[Tensor]:
        """One epoch: the sequences in random order, [minibatches per step, sequences per minibatch] at a time."""

    def step(self, batch: Batch, minibatches: Tensor) -> None:
        """Loss → gradient → `after_gradient` → clipping → optimiser step, for each of the minibatches."""

    def metrics(self) -> dict[str, Tensor]:
        """Metrics of the implementation."""


def clipped_policy_loss(ratio: Tensor, advantages: Tensor, clip: Tensor, weights: Tensor | None = None) -> Tensor:
    """−E[w min(r A, clip(r, 1 − ε, 1 + ε) A)]: eq. 7, as a loss; w is 1 if the current weights acted."""
    clipped = torch.clamp(ratio, 1 - clip, 1 + clip)
    surrogate = torch.minimum(ratio * advantages, clipped * advantages)
    return -(surrogate if weights is None else weights * surrogate).mean()


def value_loss(values: Tensor, old_values: Tensor, returns: Tensor, clip: float | None) -> Tensor:
    """The squared error L^VF of eq. 9; with `clip`, values are clipped to that distance from the old ones."""
    if clip is not None:
        values = old_values + (values - old_values).clamp(-clip, clip)
    return (values - returns).square().mean()


def approximate_kl(log_ratio: Tensor) -> Tensor:
    """E[(r − 1) − log r], a low-variance, non-negative estimate of KL(old ‖ new)."""
    return (log_ratio.exp() - 1 - log_ratio).mean()


def explained_variance(values: Tensor, returns: Tensor, ranks: Ranks | None = None) -> Tensor:
    """1 − Var[returns − values] / Var[returns]: 1 is a perfect critic, 0 a useless one."""
    if ranks is None:
        return 1 - (returns - values).var() / returns.var().clamp(min=1e-12)
    both = torch.stack((returns - values, returns)).flatten(1).double()
    _, var, _ = ranks.merged(both.mean(1), both.var(1, unbiased=False), both.shape[1])
    return 1 - var[0] / var[1].clamp(min=1e-12)


@torch.no_grad()
def normalised_over_ranks(advantages: Tensor, orders: Tensor, ranks: Ranks) -> Tensor:
    """`advantages` [S, L], those of each minibatch of `orders` [minibatches, sequences] normalised over all ranks."""
    minibatches = advantages[orders].flatten(1).double()
    mean, var, count = ranks.merged(minibatches.mean(1), minibatches.var(1, unbiased=False), minibatches.shape[1])
    deviation = (var * (count / (count - 1))).sqrt()
    normalised = (minibatches - mean.unsqueeze(1)) / (deviation.unsqueeze(1) + _ADVANTAGE_EPS)
    result = torch.empty_like(advantages)
    result[orders] = normalised.to(advantages.dtype).view(*orders.shape, -1)
    return result


class PPO:
    """A policy, its optimiser, and the update from a rollout."""

    experience: ExperienceReplay | None = None  # PPO learns from rollouts, without a replay buffer

    def __init__(
        self,
        policy: ActorCritic,
        recipe: PPORecipe,
        make_ops: Callable[[PPO], Ops],
        after_gradient: AfterGradient | None = None,
        ranks: Ranks | None = None,
    ) -> None:
        """`policy` is already on its device: its parameters become views of one flat tensor there.

        With `ranks`, `recipe` is this rank's share of the job's.
        """
        # A minibatch's mean and deviation are those of all ranks: `ops` normalises each epoch's minibatches in advance.
        self.normalises_each_epoch = ranks is not None and recipe.normalize_advantage
        if self.normalises_each_epoch:
            recipe = replace(recipe, normalize_advantage=False)
        self.policy, self.recipe, self.after_gradient, self.ranks = policy, recipe, after_gradient, ranks
        self.schedules = schedules_of(recipe)
        self.parameters = FlatParameters(policy)
        device = self.parameters.flat.device
        setting = partial(per_member, [recipe], device=device)
        self.learning_rate, self.clip_range = setting("learning_rate"), setting("clip_range")
        self.vf_coef, self.ent_coef = setting("vf_coef"), setting("ent_coef")
        self.max_grad_norm, self.max_kl = setting("max_grad_norm"), _KL_MARGIN * setting("target_kl")
        self.optimiser = new_optimiser(recipe, self.parameters, self.learning_rate)
        self.reward_norm = RunningNorm(1).to(device) if recipe.normalize_reward else None
        self.return_carry = torch.zeros(recipe.n_envs, device=device)
        self.sequence_length = sequence_length(recipe)
        max_kl = None if recipe.target_kl is None else _KL_MARGIN * recipe.target_kl
        shared = ("ent_coef", "vf_coef", "clip_range_vf", "normalize_advantage", "max_grad_norm")
        settings = {name: getattr(recipe, name) for name in shared}
        self.coefficients = Coefficients(**settings, advantage_eps=_ADVANTAGE_EPS, max_kl=max_kl)
        self.counters = Counters.zeros(len(self.parameters.flat), len(_METRICS), device)
        self.ops = make_ops(self)

    # -- one iteration -------------------------------------------------------------------------------------------------

    def update(self, rollout: Rollout, progress: float, shuffle: torch.Generator) -> Metrics:
        """`update_in_parts` at `progress`, without pauses."""
        self.set_progress(progress)
        return run_to_end(self.update_in_parts(rollout, shuffle))

    def set_progress(self, progress: float) -> None:
        """Update schedules; `progress` is the finished part of the run, 0 to 1."""
        self.learning_rate.fill_(self.schedules["learning_rate"](1.0 - progress))
        self.clip_range.fill_(self.schedules["clip_range"](1.0 - progress))

    def update_in_parts(
        self, rollout: Rollout, shuffle: torch.Generator, behaviour: ActorCritic | None = None
    ) -> Generator[None, None, Metrics]:
        """Learn from `rollout`, yielding between parts of the work, so that inference can run in between.

        `behaviour` is the policy that acted, if it is not the current one. Returns metrics.
        """
        counters = self.counters
        counters.zero_()
        batch = yield from self.ops.prepare(rollout, behaviour)
        for _ in range(self.recipe.n_epochs):
            for minibatches in self.ops.minibatches(batch, shuffle):
                self.ops.step(batch, minibatches)
                yield
            if self.recipe.target_kl is not None and not counters.stopped.is_cuda and counters.stopped:
                break  # on a GPU, reading it would sync; there the remaining steps are masked instead
        metrics = self._metrics(batch)
        # At the end: the statistics must not change between acting on observations and learning from them.
        self.policy.update_norm(rollout.obs[:-1], self.ranks)
        return metrics

    def prepare(self, rollout: Rollout, behaviour: ActorCritic | None = None) -> Batch:
        """`prepare_in_parts` without pauses."""
        return run_to_end(self.prepare_in_parts(rollout, behaviour))

    def prepare_in_parts(self, rollout: Rollout, behaviour: ActorCritic | None) -> Generator[None, None, Batch]:
        """Compute log-probabilities, values, advantages and importance weights, and cut the rollout into sequences."""
        with torch.no_grad():
            log_probs, values = self.ops.evaluate(rollout)
        yield
        weights = None
        if behaviour is not None:
            with torch.no_grad():
                # Recomputed here: cheaper than at every inference, and with the same rounding.
                weights = (log_probs - self.ops.log_probs(behaviour, rollout)).exp().clamp(max=_MAX_IMPORTANCE)
            yield
        batch = self._batch(rollout, log_probs, values, weights)
        yield
        return batch

    @torch.no_grad()
    def _batch(self, rollout: Rollout, log_probs: Tensor, values: Tensor, weights: Tensor | None) -> Batch:
        steps, n_envs = rollout.shape
        # One extra entry, for unused final observations.
        bootstrap = torch.zeros(steps * n_envs + 1, device=rollout.rewards.device)
        if len(rollout.final_obs):
            # The recurrent state that sees the final observation after step t is states[t + 1].
            states = rollout.states[1:].flatten(0, 1)[rollout.final_at.clamp(max=steps * n_envs - 1)]
            bootstrap[rollout.final_at] = self.ops.values(rollout.final_obs, states)
        rewards, recipe = self._normalised_rewards(rollout), self.recipe
        ends = bootstrap[:-1].view(steps, n_envs), rollout.terminated, rollout.truncated
        advantages, returns = self.ops.gae(rewards, values, *ends, recipe.gamma, recipe.gae_lambda, weights)
        return self.cut(rollout, log_probs, values, advantages, returns, weights)

    def cut(
        self,
        rollout: Rollout,
        log_probs: Tensor,
        values: Tensor,
        advantages: Tensor,
        returns: Tensor,
        weights: Tensor | None,
    ) -> Batch:
        """Cut the rollout and the tensors computed from it into sequences."""
        recurrent = self.policy.core is not None
        cut = partial(sequences, length=self.sequence_length)
        return Batch(
            obs=cut(rollout.obs[:-1]),
            actions=cut(rollout.actions),
            log_probs=cut(log_probs),
            values=cut(values[:-1]),
            advantages=cut(advantages),
            returns=cut(returns),
            starts=cut(rollout.starts[:-1]) if recurrent else None,
            states=rollout.states[: -1 : self.sequence_length].flatten(0, 1) if recurrent else None,
            weights=None if weights is None else cut(weights),
        )

    def _normalised_rewards(self, rollout: Rollout) -> Tensor:
        """Rewards divided by the standard deviation of the discounted return."""
        if self.reward_norm is None:
            return rollout.rewards
        ended = rollout.terminated | rollout.truncated
        carried = self.return_carry.masked_fill(rollout.starts[0], 0.0)
        sums, carry = discounted_returns(rollout.rewards, ended, carried, self.recipe.gamma)
        self.return_carry.copy_(carry)
        self.reward_norm.update(sums.reshape(-1, 1), self.ranks)
        return (rollout.rewards * self.reward_norm.scale).clamp(-_REWARD_CLIP, _REWARD_CLIP)

    # -- one minibatch -------------------------------------------------------------------------------------------------

    def loss(self, params: Parameters, values: Tensor, batch: Batch, all_advantages: Tensor) -> Loss:
        """L = −L^CLIP + c₁ L^VF − c₂ S (eq. 9, negated), and the minibatch's metrics.

        `params` and `values` are the network's outputs for `batch`. `all_advantages` are those of the whole minibatch,
        of which `batch` may be a part.
        """
        recipe = self.recipe
        log_probs, entropy = self.policy.distribution.log_prob_and_entropy(params, batch.actions)
        advantages = batch.advantages
        if recipe.normalize_advantage:
            advantages = (advantages - all_advantages.mean()) / (all_advantages.std() + _ADVANTAGE_EPS)
        log_ratio = log_probs - batch.log_probs
        ratio = log_ratio.exp()
        policy_term = clipped_policy_loss(ratio, advantages, self.clip_range, batch.weights)
        value_term = value_loss(values, batch.values, batch.returns, recipe.clip_range_vf)
        entropy_term = entropy.mean()
        loss = policy_term + self.vf_coef * value_term  # [member]
        if recipe.ent_coef:
            loss = loss - self.ent_coef * entropy_term
        with torch.no_grad():
            kl = approximate_kl(log_ratio)
            clip_fraction = ((ratio - 1).abs() > self.clip_range).float().mean()
            return Loss(loss, torch.stack((policy_term, value_term, entropy_term, kl, clip_fraction)))

    def step(self, metrics: Tensor) -> None:
        """Clip the gradient and step along it, unless the KL divergence has ended the iteration."""
        norms, counters = self.parameters.clip_(self.max_grad_norm), self.counters
        may_stop = self.recipe.target_kl is not None
        with torch.no_grad():
            if may_stop:
                kl = metrics[_METRICS.index("approx_kl")]
                counters.stopped.copy_(torch.maximum(counters.stopped, (kl > self.max_kl).float()))
            terms, stopped = torch.cat((metrics, norms)), counters.stopped.unsqueeze(1) > 0
            counters.sums.add_(torch.where(stopped, 0.0, terms))  # no multiplication by 0: a term may be infinite
            counters.minibatches.add_(1.0 - counters.stopped)
        self.optimiser.step(skip=counters.stopped if may_stop else None)

    def _metrics(self, batch: Batch) -> Metrics:
        counters = self.counters
        means = counters.sums / counters.minibatches.clamp(min=1).unsqueeze(1)
        metrics: Metrics = dict(zip(_METRICS, means.unbind(1)))  # [member] each
        metrics["explained_variance"] = explained_variance(batch.values, batch.returns, self.ranks)
        metrics["learning_rate"] = self.learning_rate.clone()
        metrics["clip_range"] = self.clip_range.clone()
        metrics["updates"] = counters.minibatches.clone()
        if batch.weights is not None:
            metrics["importance_clip_fraction"] = (batch.weights >= _MAX_IMPORTANCE).float().mean()
            # Kish's effective sample size as a share of the batch.
            metrics["effective_sample_share"] = batch.weights.mean().square() / batch.weights.square().mean()
        metrics |= self.ops.metrics()
        metrics["weights_finite"] = torch.isfinite(self.parameters.flat.detach()).all()
        if self.policy.log_std.numel():
            metrics["std"] = self.policy.distribution.real.std(self.policy.log_std.detach()).mean()
        return metrics

    def plasticity(self, seed: int, step: int) -> dict[str, Tensor]:
        """Empty: not measured for PPO."""
        return {}

    # -- checkpoints ---------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, object]:
        """Everything that learning depends on, as tensors and plain values."""
        return {
            "policy": self.policy.state_dict(),
            "optimiser": self.optimiser.state_dict(),
            "reward_norm": self.reward_norm.state_dict() if self.reward_norm else {},
            "return_carry": self.return_carry,
        }

    def load_state_dict(self, state: dict) -> None:
        """Copy a checkpoint's values into the existing tensors."""
        self.policy.load_state_dict(state["policy"])
        self.optimiser.load_state_dict(state["optimiser"])
        if self.reward_norm:
            self.reward_norm.load_state_dict(state["reward_norm"])
        self.return_carry.copy_(state["return_carry"])

    @property
    def start_parts(self) -> tuple[str, ...]:
        """The statistics of rewards, if they are normalised."""
        return ("reward_norm",) if self.reward_norm else ()

    def start_from(self, state: dict) -> None:
        """Take over the policy and the statistics of rewards."""
        self.load_state_dict(with_parts_of(self.state_dict(), state, ("policy", *self.start_parts)))
