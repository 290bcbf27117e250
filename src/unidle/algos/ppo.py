"""Proximal policy optimisation (Schulman et al. 2017), the clipped version, read top to bottom.

    collect a rollout → values, log-probabilities, advantages (`prepare`) → epochs of minibatches (`learning`)

The collector runs the actor alone; values and log-probabilities of the whole rollout come from one batched pass here,
with the weights that learning starts from, so every ratio is 1 at the first minibatch. Where older weights acted (the
rollout was collected while the one before was learned from), this is decoupled PPO (Hilton et al. 2022): clipping
stays relative to those weights, a truncated importance weight corrects for who acted, and advantages count the steps
that follow by the same weights (V-trace: Espeholt et al. 2018).
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from unidle.algos.capturing import NODES_PER_GRAPH, Capturer, as_it_is
from unidle.algos.evaluation import Evaluation, sequences
from unidle.algos.experience_replay import ExperienceReplay
from unidle.algos.micro_batches import FallBack, Loss, Pieces
from unidle.algos.numpy_minibatch import NumpyMinibatch
from unidle.buffers.rollout import Rollout, discounted_returns, gae
from unidle.config import Recipe
from unidle.config.validate import largest_divisor, sequence_length
from unidle.nn.actor_critic import ActorCritic
from unidle.nn.normalise import RunningNorm
from unidle.nn.numpy_layers import is_small
from unidle.nn.optim.adam import FlatAdam
from unidle.nn.optim.flat_parameters import FlatParameters
from unidle.spaces.distributions import Parameters

_REWARD_CLIP = 10.0
NODES_PER_MINIBATCH = 250  # of a graph, at most; and some 60 more for each step of a recurrent sequence
# The most that a stale transition may count: importance weights have no upper bound, and a few would drown the rest.
_WEIGHT_CAP = 2.0
_Result = TypeVar("_Result")
_METRICS = ("policy_loss", "value_loss", "entropy", "approx_kl", "clip_fraction", "grad_norm")


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
    states: Tensor | None  # [S, state] recurrent state each sequence begins with
    weights: Tensor | None  # [S, L] importance of what older weights did; None: the same weights acted

    def at(self, index: Tensor) -> Batch:
        """The minibatch of these sequences."""
        return Batch(*(None if field is None else field.index_select(0, index) for field in vars(self).values()))  # type: ignore[arg-type]

    def take_over(self, other: Batch) -> None:
        """Copy `other` into the tensors that are here, where it is not in them already."""
        for mine, new in zip(vars(self).values(), vars(other).values()):
            if mine is not None and mine.data_ptr() != new.data_ptr():
                mine.copy_(new)


class Ways(NamedTuple):
    """How the parts of an iteration are computed: plainly, as below, or in a way made for the device.

    Those are ppo_kernels.py for a GPU, and numpy_minibatch.py for a CPU.
    """

    shuffle: Callable[[int, torch.Generator], Tensor]  # the numbers below n, in a random order
    evaluate: Callable[[Rollout], tuple[Tensor, Tensor]]  # log-probabilities [T, N] and values [T + 1, N]
    score: Callable[[ActorCritic, Rollout], Tensor]  # log-probabilities [T, N] by the policy that acted
    value: Callable[[Tensor, Tensor], Tensor]  # of rows [n, obs_bytes] seen in recurrent states [n, S]
    gae: Callable[..., tuple[Tensor, Tensor]]
    loss: Callable[[Batch, Tensor, Tensor], Loss]  # of some sequences that are part of a minibatch
    step: Callable[[Tensor], None]  # along the gradient in place; gets what is logged of the minibatch
    learn: Callable[[Batch, Tensor], None]  # a step for each of these minibatches


def shuffled(n: int, generator: torch.Generator) -> Tensor:
    """The numbers below n in a random order."""
    return torch.randperm(n, generator=generator, device=generator.device)


def clipped_policy_loss(ratio: Tensor, advantages: Tensor, clip: Tensor, weights: Tensor | None = None) -> Tensor:
    """−E[w min(r A, clip(r, 1 − ε, 1 + ε) A)]: eq. 7 of the paper, as a loss; w is 1 where nothing is stale."""
    clipped = torch.clamp(ratio, 1 - clip, 1 + clip)
    surrogate = torch.minimum(ratio * advantages, clipped * advantages)
    return -(surrogate if weights is None else weights * surrogate).mean()


def value_loss(values: Tensor, old_values: Tensor, returns: Tensor, clip: float | None) -> Tensor:
    """Mean squared error; with `clip`, of values kept within that distance of the old ones."""
    if clip is not None:
        values = old_values + (values - old_values).clamp(-clip, clip)
    return (values - returns).square().mean()


def approximate_kl(log_ratio: Tensor) -> Tensor:
    """E[(r − 1) − log r], a low-variance, non-negative estimate of KL(old ‖ new)."""
    return (log_ratio.exp() - 1 - log_ratio).mean()


def explained_variance(values: Tensor, returns: Tensor) -> Tensor:
    """1 − Var[returns − values] / Var[returns]: 1 is a perfect critic, 0 one that says nothing."""
    return 1 - (returns - values).var() / returns.var().clamp(min=1e-12)


def iteration_nodes(recipe: Recipe) -> int | None:
    """CUDA-graph nodes of one iteration's updates; None: a recurrent policy's are not captured with the rollout."""
    assert isinstance(recipe.batch_size, int)
    if recipe.recurrent != "none":
        return None
    return recipe.n_epochs * recipe.total_batch // recipe.batch_size * NODES_PER_MINIBATCH


def in_one_go(pieces: Generator[None, None, _Result]) -> _Result:
    """What such work returns, without the pauses."""
    while True:
        try:
            next(pieces)
        except StopIteration as end:
            result: _Result = end.value
            return result


class PPO:
    """A policy, its optimiser, and how a rollout improves it."""

    experience: ExperienceReplay | None = None  # it learns from rollouts, not from a replay buffer

    def __init__(
        self,
        policy: ActorCritic,
        recipe: Recipe,
        capture: Capturer = as_it_is,
        fall_back: FallBack = lambda name, error, to: None,
    ) -> None:
        """`policy` must already be on its device: its parameters become views of one flat tensor there.

        `fall_back` hears what takes a slower way, and why.
        """
        assert isinstance(recipe.batch_size, int)
        self.policy, self.recipe = policy, recipe
        self.parameters = FlatParameters(policy)
        device = self.parameters.flat.device
        # Tensors, so that a captured update sees them change.
        self.learning_rate = torch.tensor(recipe.learning_rate, device=device)
        self.clip_range = torch.tensor(recipe.clip_range, device=device)
        self.adam = FlatAdam(self.parameters.flat, self.parameters.grad, self.learning_rate, eps=1e-5)
        self.reward_norm = RunningNorm(1).to(device) if recipe.normalize_reward else None
        self.return_carry = torch.zeros(recipe.n_envs, device=device)
        self.sequence_length = sequence_length(recipe)
        self._per_minibatch = recipe.batch_size // self.sequence_length  # sequences
        self.sums = torch.zeros(len(_METRICS), device=device)
        self.minibatches = torch.zeros((), device=device)
        self.stopped = torch.zeros((), device=device)  # 1 once target_kl was passed in this iteration
        self._capture, self._fall_back = capture, fall_back
        self.pieces = Pieces("A minibatch", fall_back)  # one, unless memory runs out
        whole = Evaluation(policy, recipe, self.sequence_length, fall_back)
        self.ways = Ways(
            shuffled, whole.rollout, whole.score, whole.values, gae, self.loss_of, self.step_along, self.steps
        )
        self._kernels_untried = device.type == "cuda"
        self.in_numpy = device.type == "cpu" and is_small(policy, self._per_minibatch)
        if self.in_numpy:
            self.ways = self.ways._replace(learn=NumpyMinibatch(self).learn)
        # For each rollout the batch cut from it, and how to learn from that in place: it may be captured, and a graph
        # knows tensors, not names.
        self._bound: dict[int, tuple[Batch, Callable[[], None]]] = {}
        # Several minibatches to a graph; on a CPU one at a time, so that whoever waits between them waits no longer.
        n_minibatches = recipe.total_batch // recipe.batch_size
        most = NODES_PER_GRAPH // (NODES_PER_MINIBATCH + 60 * self.sequence_length) if device.type == "cuda" else 1
        per_call = largest_divisor(n_minibatches, most)
        self.orders = torch.zeros(per_call, self._per_minibatch, dtype=torch.long, device=device)

    # -- one iteration -------------------------------------------------------------------------------------------------

    def update(self, rollout: Rollout, progress: float, shuffle: torch.Generator) -> dict[str, Tensor]:
        """`learning` at `progress`, in one go."""
        self.set_progress(progress)
        return in_one_go(self.learning(rollout, shuffle))

    def set_progress(self, progress: float) -> None:
        """From 0 to 1 of the run: what follows a schedule."""
        recipe, remaining = self.recipe, 1.0 - progress
        self.learning_rate.fill_(recipe.learning_rate * (remaining if recipe.lr_schedule == "linear" else 1.0))
        self.clip_range.fill_(recipe.clip_range * (remaining if recipe.clip_schedule == "linear" else 1.0))

    def learning(
        self, rollout: Rollout, shuffle: torch.Generator, behaviour: ActorCritic | None = None
    ) -> Generator[None, None, dict[str, Tensor]]:
        """Learn from `rollout`, pausing after each piece of the work.

        `behaviour` is the policy that acted, if it is not this one. Returns metrics as tensors that nobody waited for.
        """
        recipe = self.recipe
        for total in (self.sums, self.minibatches, self.stopped):
            total.zero_()
        if self._kernels_untried:
            self._kernels_untried = False
            self._take_up_kernels(rollout)
        batch = yield from self.preparing(rollout, behaviour)
        learn = self._learn_from(rollout, batch)
        for _ in range(recipe.n_epochs):
            order = self.ways.shuffle(len(batch.obs), shuffle)
            for orders in order.view(-1, *self.orders.shape):
                self.orders.copy_(orders)
                learn()
                yield
            if recipe.target_kl is not None and not self.sums.is_cuda and self.stopped:
                break  # on a GPU asking would cost a sync; the updates that remain are masked instead
        metrics = dict(zip(_METRICS, self.sums / self.minibatches.clamp(min=1)))
        metrics["explained_variance"] = explained_variance(batch.values, batch.returns)
        metrics["learning_rate"] = self.learning_rate.clone()
        metrics["clip_range"] = self.clip_range.clone()
        metrics["updates"] = self.minibatches.clone()
        if batch.weights is not None:
            metrics["weights_capped"] = (batch.weights >= _WEIGHT_CAP).float().mean()
            # As of so many transitions of one weight (Kish's effective sample size).
            metrics["effective_share"] = batch.weights.mean().square() / batch.weights.square().mean()
        metrics["pieces"] = torch.full_like(self.minibatches, self.pieces.count)
        metrics["weights_finite"] = torch.isfinite(self.parameters.flat.detach()).all()
        if self.policy.log_std.numel():
            metrics["std"] = self.policy.log_std.detach().exp().mean()
        # After learning: the statistics must not move between acting and the last use of what was acted on.
        self.policy.update_norm(rollout.obs[:-1])
        return metrics

    def _learn_from(self, rollout: Rollout, batch: Batch) -> Callable[[], None]:
        """What learns from the minibatches in `orders` of `batch`, which was cut from `rollout`."""
        if id(rollout) not in self._bound:
            changes = [*self.adam.state_dict().values(), self.sums, self.minibatches, self.stopped]
            steps = partial(self.ways.learn, batch, self.orders)
            self._bound[id(rollout)] = batch, self._capture("learning", steps, [self.parameters.flat, *changes])
        bound, learn = self._bound[id(rollout)]
        bound.take_over(batch)
        return learn

    def prepare(self, rollout: Rollout, behaviour: ActorCritic | None = None) -> Batch:
        """`preparing` in one go."""
        return in_one_go(self.preparing(rollout, behaviour))

    def preparing(self, rollout: Rollout, behaviour: ActorCritic | None) -> Generator[None, None, Batch]:
        """Values, log-probabilities, advantages and importance weights of a rollout, cut into sequences."""
        with torch.no_grad():
            log_probs, values = self.ways.evaluate(rollout)
        yield
        weights = None
        if behaviour is not None:
            with torch.no_grad():
                # Once more with the weights that acted: cheaper than to have every service note it. And by the same
                # way, so that both are rounded alike.
                weights = (log_probs - self.ways.score(behaviour, rollout)).exp().clamp(max=_WEIGHT_CAP)
            yield
        batch = self._batch(rollout, log_probs, values, weights)
        yield
        return batch

    @torch.no_grad()
    def _batch(self, rollout: Rollout, log_probs: Tensor, values: Tensor, weights: Tensor | None) -> Batch:
        """Advantages and returns, and everything cut into sequences."""
        recipe = self.recipe
        steps, n_envs = rollout.shape
        # One place more than there are steps: final observations that are none point there.
        bootstrap = torch.zeros(steps * n_envs + 1, device=rollout.rewards.device)
        if len(rollout.final_obs):
            # The state that sees a final row came out of that step t, so it stands at states[t + 1].
            states = rollout.states[1:].flatten(0, 1)[rollout.final_at.clamp(max=steps * n_envs - 1)]
            bootstrap[rollout.final_at] = self.ways.value(rollout.final_obs, states)
        advantages, returns = self.ways.gae(
            self._normalised_rewards(rollout),
            values,
            bootstrap[:-1].view(steps, n_envs),
            rollout.terminated,
            rollout.truncated,
            recipe.gamma,
            recipe.gae_lambda,
            weights,
        )
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
        """A rollout, and what was computed of it, as sequences."""
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
        if self.reward_norm is None:
            return rollout.rewards
        ended = rollout.terminated | rollout.truncated
        carried = self.return_carry.masked_fill(rollout.starts[0], 0.0)
        sums, carry = discounted_returns(rollout.rewards, ended, carried, self.recipe.gamma)
        self.return_carry.copy_(carry)
        self.reward_norm.update(sums.reshape(-1, 1))
        return (rollout.rewards * self.reward_norm.scale).clamp(-_REWARD_CLIP, _REWARD_CLIP)

    def _take_up_kernels(self, rollout: Rollout) -> None:
        """Use kernels where they exist and prove right on `rollout`; plain ways are no less right, only slower."""
        try:
            from unidle.algos.ppo_kernels import PROOFS
        except ImportError:  # torch comes without Triton on some platforms
            return
        for which, prove in PROOFS.items():  # one by one: those that fail take no others with them
            try:
                self.ways = self.ways._replace(**prove(self, rollout))
            except Exception as error:
                self._fall_back("learning", error, f"does without kernels of its own {which}")

    # -- one minibatch -------------------------------------------------------------------------------------------------

    def steps(self, batch: Batch, orders: Tensor) -> None:
        """A step for each of these minibatches."""
        for order in orders.unbind():
            self.ways.step(self.gradient(batch, order))

    def step_along(self, logged: Tensor) -> None:
        """One step along the gradient that is in place; `logged` are the first five of what is logged."""
        recipe = self.recipe
        norm = self.parameters.clip_(recipe.max_grad_norm)
        with torch.no_grad():
            if recipe.target_kl is not None:
                kl = logged[_METRICS.index("approx_kl")]
                self.stopped.copy_(torch.maximum(self.stopped, (kl > 1.5 * recipe.target_kl).float()))
            terms = torch.cat((logged, norm.unsqueeze(0)))
            self.sums.add_(torch.where(self.stopped > 0, 0.0, terms))  # not a product: a skipped term may be infinite
            self.minibatches.add_(1.0 - self.stopped)
        self.adam.step(skip=None if recipe.target_kl is None else self.stopped)

    def gradient(self, batch: Batch, order: Tensor) -> Tensor:
        """Put the gradient of the sequences `order` of `batch` in place; returns the first five of what is logged."""
        return self.pieces.gradient(
            self.parameters, len(order), lambda part: self.ways.loss(batch, order[part], order)
        )[0]

    def loss_of(self, batch: Batch, part: Tensor, whole: Tensor) -> Loss:
        """Loss of the sequences `part`, and what is logged; advantages are normalised as those of `whole`."""
        minibatch = batch.at(part)
        of_all = minibatch.advantages if len(part) == len(whole) else batch.advantages.index_select(0, whole)
        params, values = self.policy(minibatch.obs, minibatch.starts, minibatch.states)
        return self.loss_from(params, values, minibatch, of_all)

    def loss_from(self, params: Parameters, values: Tensor, batch: Batch, of_all: Tensor) -> Loss:
        """Loss of `batch` from what the network gave, and what is logged; advantages are normalised as `of_all` are."""
        recipe = self.recipe
        log_probs, entropy = self.policy.distribution.score(params, batch.actions)
        advantages = batch.advantages
        if recipe.normalize_advantage:
            advantages = (advantages - of_all.mean()) / (of_all.std() + 1e-8)
        log_ratio = log_probs - batch.log_probs
        ratio = log_ratio.exp()
        policy_term = clipped_policy_loss(ratio, advantages, self.clip_range, batch.weights)
        value_term = value_loss(values, batch.values, batch.returns, recipe.clip_range_vf)
        entropy_term = entropy.mean()
        loss = policy_term + recipe.vf_coef * value_term
        if recipe.ent_coef:
            loss = loss - recipe.ent_coef * entropy_term
        with torch.no_grad():
            kl = approximate_kl(log_ratio)
            clip_fraction = ((ratio - 1).abs() > self.clip_range).float().mean()
            return Loss(loss, torch.stack((policy_term, value_term, entropy_term, kl, clip_fraction)))

    def plasticity(self, seed: int, step: int) -> dict[str, Tensor]:
        """Not measured."""
        return {}

    # -- what a checkpoint holds ---------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, object]:
        """Everything that learning depends on, as tensors and plain values."""
        return {
            "policy": self.policy.state_dict(),
            "adam": self.adam.state_dict(),
            "reward_norm": self.reward_norm.state_dict() if self.reward_norm else {},
            "return_carry": self.return_carry,
        }

    def load_state_dict(self, state: dict) -> None:
        """Put a checkpoint's values into the tensors that are already here."""
        self.policy.load_state_dict(state["policy"])
        self.adam.load_state_dict(state["adam"])
        if self.reward_norm:
            self.reward_norm.load_state_dict(state["reward_norm"])
        self.return_carry.copy_(state["return_carry"])
