"""Chooses how PPO's operations run: which implementation, in how many micro-batches, captured as CUDA graphs or not.

The references are plain PyTorch. A kernel replaces one if it supports the case and agrees with it on the run's first
rollout (see `kernels.dispatch`): Triton on a GPU, NumPy on a CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from unidle.algos import ppo_verification as verification
from unidle.algos.capturing import NODES_PER_GRAPH, Capturer, no_capture
from unidle.algos.evaluation import Evaluation
from unidle.algos.micro_batches import AfterGradient, Loss, MicroBatches
from unidle.algos.ppo import N_MEANS, PPO, Batch, normalised_over_ranks
from unidle.buffers.advantages import gae
from unidle.buffers.rollout import Rollout
from unidle.config import PPORecipe
from unidle.config.validate import largest_divisor
from unidle.distributed.ranks import Ranks
from unidle.kernels.dispatch import Dispatch, Report, no_report, restored
from unidle.kernels.numpy.ppo_minibatch import NumpyMinibatch
from unidle.nn.actor_critic import ActorCritic
from unidle.nn.numpy_views import numpy_actor_critic, numpy_unsupported
from unidle.nn.optim.optimiser import fused_step_unsupported

_NODES_PER_MINIBATCH = 250  # of a CUDA graph, at most; and about 60 more for each step of a recurrent sequence


def new_ppo(
    policy: ActorCritic,
    recipe: PPORecipe,
    capture: Capturer = no_capture,
    report: Report = no_report,
    after_gradient: AfterGradient | None = None,
    ranks: Ranks | None = None,
) -> PPO:
    """PPO with the fastest operations for its device; `report` is called when one falls back to a slower one."""
    return PPO(policy, recipe, lambda ppo: PPOOps(ppo, capture, report), after_gradient, ranks)


def iteration_nodes(recipe: PPORecipe) -> int | None:
    """CUDA-graph nodes of one iteration's updates; None: a recurrent policy's are not captured with the rollout."""
    assert isinstance(recipe.batch_size, int)
    if recipe.recurrent != "none":
        return None
    return recipe.n_epochs * recipe.total_batch // recipe.batch_size * _NODES_PER_MINIBATCH


def permutation(n: int, generator: torch.Generator) -> Tensor:
    """A random permutation of range(n)."""
    return torch.randperm(n, generator=generator, device=generator.device)


class MinibatchKernel(Protocol):
    """Computes gradients of minibatches, and steps along them."""

    def gradient(self, batch: Batch, order: Tensor) -> Tensor:
        """Compute the gradient of the sequences `order` of `batch` in place; returns the metrics [5]."""

    def learn(self, batch: Batch, orders: Tensor) -> None:
        """Take one step for each minibatch `orders` [minibatches, sequences] of `batch`."""


class PPOOps:
    """The operations of one `PPO`."""

    def __init__(self, ppo: PPO, capture: Capturer, report: Report) -> None:
        recipe, self.device = ppo.recipe, ppo.parameters.flat.device
        assert isinstance(recipe.batch_size, int)
        self.ppo, self._capture = ppo, capture
        self.dispatch = Dispatch(report, None if ppo.ranks is None else ppo.ranks.all)
        self.micro_batches = MicroBatches("A minibatch", report)
        evaluation = Evaluation(ppo.policy, recipe, ppo.sequence_length, report)
        # The references; `_choose_numpy` and `choose_triton` replace them.
        self.shuffle: Callable[[int, torch.Generator], Tensor] = permutation
        self.evaluate: Callable[[Rollout], tuple[Tensor, Tensor]] = evaluation.rollout
        self.log_probs: Callable[[ActorCritic, Rollout], Tensor] = evaluation.score
        self.values: Callable[[Tensor, Tensor], Tensor] = evaluation.values
        self.gae: Callable[..., tuple[Tensor, Tensor]] = gae
        self.loss: Callable[[Batch, Tensor, Tensor], Loss] = self.reference_loss
        self.gradient: Callable[[Batch, Tensor], Tensor] = self.reference_gradient
        self.optimiser_step: Callable[[Tensor], None] = ppo.step
        self.learn: Callable[[Batch, Tensor], None] = self.reference_learn
        self._chosen = False
        sequences = recipe.batch_size // ppo.sequence_length
        self.numpy_unsupported = (
            "the policy is not on a CPU"
            if self.device.type != "cpu"
            else numpy_unsupported(ppo.policy, sequences, with_critic=True)
        )
        # For each rollout buffer, its first batch and the function that learns from it. A CUDA graph refers to tensors
        # by address, so later batches are copied into the first.
        self._static_batches: dict[int, tuple[Batch, Callable[[], None]]] = {}
        self._learn_on: dict[int, Callable[[], None]] = {}
        self._advantages = torch.empty(0)  # of the batch that `prepare` returned, before `minibatches` normalises them
        # Several minibatches per graph; on a CPU one at a time, so that environments do not wait longer, and with
        # several ranks, which reduce between the gradient's graph and the step's.
        at_most = (
            NODES_PER_GRAPH // (_NODES_PER_MINIBATCH + 60 * ppo.sequence_length)
            if self.device.type == "cuda" and ppo.ranks is None
            else 1
        )
        per_step = largest_divisor(recipe.total_batch // recipe.batch_size, at_most)
        self.orders = torch.zeros(per_step, sequences, dtype=torch.long, device=self.device)

    # -- one iteration -------------------------------------------------------------------------------------------------

    def prepare(self, rollout: Rollout, behaviour: ActorCritic | None) -> Generator[None, None, Batch]:
        """`PPO.prepare_in_parts`, in tensors that stay the same for each rollout buffer."""
        is_first, self._chosen = not self._chosen, True
        if is_first and self.device.type == "cuda":
            self.choose_triton(rollout)
        batch = yield from self.ppo.prepare_in_parts(rollout, behaviour)
        if is_first:
            self._choose_numpy(batch)
        if id(rollout) not in self._static_batches:
            self._static_batches[id(rollout)] = batch, self._captured(batch)
        bound, learn = self._static_batches[id(rollout)]
        for kept, new in zip(vars(bound).values(), vars(batch).values()):
            if kept is not None and kept.data_ptr() != new.data_ptr():
                kept.copy_(new)
        self._learn_on[id(bound)] = learn
        if self.ppo.normalises_each_epoch:
            self._advantages = bound.advantages.clone()
        return bound

    def _captured(self, batch: Batch) -> Callable[[], None]:
        counters = self.ppo.counters
        changes = [*self.ppo.optimiser.state_dict().values(), counters.sums, counters.minibatches, counters.stopped]
        changes.append(self.ppo.parameters.flat)
        if self.ppo.after_gradient is None:
            return self._capture("learning", partial(self.learn, batch, self.orders), changes)
        return self._split_at_hook(batch, changes)

    def _split_at_hook(self, batch: Batch, changes: list[Tensor]) -> Callable[[], None]:
        """Two graphs for each minibatch: the hook between them may do things that a graph cannot record."""
        grad, metrics = self.ppo.parameters.grad, torch.zeros(N_MEANS, device=self.device)
        order = torch.zeros_like(self.orders[0])

        def compute_gradient() -> None:
            metrics.copy_(self.gradient(batch, order))

        gradient = self._capture("gradients", compute_gradient, [grad, metrics])
        step = self._capture("optimiser steps", lambda: self.optimiser_step(metrics), changes)

        def learn() -> None:
            for minibatch in self.orders.unbind():
                order.copy_(minibatch)
                gradient()
                self._after_gradient(metrics)
                step()

        return learn

    def _after_gradient(self, metrics: Tensor) -> None:
        ppo = self.ppo
        if ppo.after_gradient is not None:
            ppo.after_gradient(ppo.parameters.grad)
        if ppo.ranks is not None and ppo.recipe.target_kl is not None:
            ppo.ranks.mean_(metrics)  # the KL divergence stops all ranks at the same minibatch

    def minibatches(self, batch: Batch, shuffle: torch.Generator) -> Iterator[Tensor]:
        """One epoch: the sequences in random order, [minibatches per step, sequences per minibatch] at a time."""
        order = self.shuffle(len(batch.obs), shuffle).view(-1, *self.orders.shape)
        if self.ppo.normalises_each_epoch:
            assert self.ppo.ranks is not None
            batch.advantages.copy_(normalised_over_ranks(self._advantages, order.flatten(0, 1), self.ppo.ranks))
        yield from order

    def step(self, batch: Batch, minibatches: Tensor) -> None:
        """Learn from these minibatches of a batch that `prepare` returned."""
        self.orders.copy_(minibatches)
        self._learn_on[id(batch)]()

    def metrics(self) -> dict[str, Tensor]:
        """The number of micro-batches that a minibatch is split into."""
        return {"micro_batches": torch.full_like(self.ppo.counters.minibatches, self.micro_batches.count)}

    # -- the references ------------------------------------------------------------------------------------------------

    def reference_learn(self, batch: Batch, orders: Tensor) -> None:
        """One step for each minibatch `orders` [minibatches, sequences] of `batch`."""
        for order in orders.unbind():
            metrics = self.gradient(batch, order)
            self._after_gradient(metrics)
            self.optimiser_step(metrics)

    def reference_gradient(self, batch: Batch, order: Tensor) -> Tensor:
        """Compute the gradient of the sequences `order` of `batch` in place; returns the metrics [5]."""
        return self.micro_batches.gradient(
            self.ppo.parameters, len(order), lambda part: self.loss(batch, order[part], order)
        )[0]

    def reference_loss(self, batch: Batch, part: Tensor, whole: Tensor) -> Loss:
        """Loss and metrics of the sequences `part` of the minibatch `whole`."""
        minibatch = batch.at(part)
        advantages = minibatch.advantages if len(part) == len(whole) else batch.advantages.index_select(0, whole)
        params, values = self.ppo.policy(minibatch.obs, minibatch.starts, minibatch.states)
        return self.ppo.loss(params, values, minibatch, advantages)

    # -- the kernels ---------------------------------------------------------------------------------------------------

    @property
    def in_numpy(self) -> bool:
        """Whether minibatches are computed in NumPy."""
        return any(isinstance(getattr(part, "__self__", None), NumpyMinibatch) for part in (self.learn, self.gradient))

    def _choose_numpy(self, batch: Batch) -> None:
        ppo = self.ppo

        def build() -> NumpyMinibatch:
            network = numpy_actor_critic(ppo.policy, ppo.parameters)
            return NumpyMinibatch(
                network, ppo.parameters.grad, ppo.counters, ppo.coefficients, ppo.clip_range, ppo.optimiser.step
            )

        if self.device.type == "cpu":
            order = torch.arange(self.orders.shape[1])
            verify = partial(self._verify_minibatch, batch, order)
            self._use(self.dispatch.choose("PPO minibatch", None, build, verify, self.numpy_unsupported))

    def _use(self, minibatch: MinibatchKernel | None) -> bool:
        """Learn with a kernel, if there is one; with a hook between gradient and step, it computes gradients only."""
        if minibatch is not None and self.ppo.after_gradient is None:
            self.learn = minibatch.learn
        elif minibatch is not None:
            self.gradient = minibatch.gradient
        return minibatch is not None

    def _verify_minibatch(self, batch: Batch, order: Tensor, minibatch: MinibatchKernel) -> None:
        verification.verify_gradient(self.ppo, batch, order, self.gradient, minibatch.gradient)
        verification.verify_learning(self.ppo, batch, order, minibatch.gradient, minibatch.learn)

    def choose_triton(self, rollout: Rollout) -> None:
        """Use Triton kernels where they exist and agree with the references on `rollout`."""
        try:
            from unidle.algos import ppo_kernels as kernels
        except ImportError:  # torch comes without Triton on some platforms
            self.dispatch.fallbacks["PPO"] = "Triton is not installed"
            return
        ppo, choose, reference_gae = self.ppo, self.dispatch.choose, self.gae
        other_step = fused_step_unsupported(ppo.recipe)
        n_sequences = rollout.rewards.numel() // ppo.sequence_length
        verify_shuffle = partial(kernels.verify_shuffle, n_sequences, self.device)
        self.shuffle = choose("PPO shuffle", self.shuffle, lambda: kernels.shuffle.shuffle, verify_shuffle)
        verify_gae = partial(kernels.verify_gae, ppo, rollout, reference_gae)
        self.gae = choose("PPO advantages", reference_gae, lambda: kernels.gae.gae, verify_gae)
        # A user's layers may draw random numbers and count batches, as dropout and batch normalisation do.
        devices = [self.device] if self.device.type == "cuda" else []
        with torch.random.fork_rng(devices), restored(list(ppo.policy.buffers())):
            sample = kernels.first_sample(ppo, rollout, self.evaluate, reference_gae, self.orders.shape[1])
            unsupported = kernels.small_mlp_unsupported(ppo.policy)
            network = choose(
                "PPO evaluation",
                None,
                lambda: kernels.SmallNetwork(ppo.policy),
                partial(kernels.verify_evaluation, sample),
                unsupported,
            )
            if network is not None:
                self.evaluate, self.log_probs, self.values = network.evaluate, network.log_probs, network.values
            minibatch = choose(
                "PPO minibatch",
                None,
                lambda: kernels.new_minibatch(ppo),
                lambda kernel: self._verify_minibatch(sample.batch, sample.order, kernel),
                unsupported or other_step,
            )
            has_gradient = self._use(minibatch)
            if has_gradient and ppo.after_gradient is None:
                return
            verify_step = partial(verification.verify_step, ppo)
            self.optimiser_step = choose("PPO step", ppo.step, lambda: kernels.new_step(ppo), verify_step, other_step)
            if has_gradient:
                return
            loss = choose(
                "PPO loss",
                None,
                lambda: kernels.NetworkLoss(ppo),
                lambda loss: verification.verify_loss(ppo, sample.batch, sample.order, loss.gradients),
                kernels.loss_unsupported(ppo),
            )
            if loss is not None:
                self.loss = loss
