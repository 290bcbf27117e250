"""The common part of off-policy algorithms.

An algorithm (sac.py, dqn.py, td3.py) is an `UpdateRule`: it learns from one batch. `OffPolicy` does the rest:

    rollout → replay buffer → `utd_ratio` updates per step, each: sample → [random shift] → rule → priorities

experience_replay.py stores and schedules. This file wraps a rule: CUDA-graph capture, micro-batches, choice of kernels.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from unidle.algos.capturing import Capturer, no_capture
from unidle.algos.experience_replay import ExperienceReplay, Updates
from unidle.algos.metrics import Metrics
from unidle.algos.micro_batches import AfterGradient, Loss, MicroBatches
from unidle.algos.random_shift import RandomShift
from unidle.algos.schedules import schedules_of
from unidle.buffers.frames import Frames
from unidle.buffers.replay import Transitions
from unidle.buffers.rollout import Rollout
from unidle.config import OffPolicyRecipe
from unidle.distributed.ranks import Ranks
from unidle.kernels.dispatch import Dispatch, Report, no_report
from unidle.nn.optim.flat_parameters import FlatParameters
from unidle.rng import PLASTICITY, keyed_generator

Update = Callable[[Transitions, Tensor], Tensor]  # batch, noise → |TD error| [B]
GradientOf = Callable[..., tuple[Tensor, Tensor]]  # (batch, ...) → `Loss.means` and `Loss.each`
# Chooses the fastest update that agrees with a rule on its first batch: (dispatch, rule, batch, noise).
ChooseUpdate = Callable[[Dispatch, Any, Transitions, Tensor], Update]
# Replaces a rule's gradients by the fastest that agree with them on its first batch.
ChooseGradients = Callable[[Dispatch, Any, Transitions, Tensor], None]


class Gradient:
    """Computes gradients, in micro-batches where a batch does not fit in memory.

    Before the step along a gradient, however it was computed, a rule passes it to `finish`.
    """

    def __init__(self, micro_batches: MicroBatches, after_gradient: AfterGradient | None = None) -> None:
        self._micro_batches, self._after_gradient = micro_batches, after_gradient

    def __call__(
        self, parameters: FlatParameters, loss: Callable[..., Loss], *batch: Transitions | Tensor
    ) -> tuple[Tensor, Tensor]:
        """Put the gradient of `loss(*batch)` into `parameters.grad`; returns `Loss.means` and `Loss.each`."""
        means, each = self._micro_batches.gradient(
            parameters, len(batch[0]), lambda rows: loss(*(part[rows] for part in batch))
        )
        return means, each

    def finish(self, grad: Tensor) -> None:
        """Pass `grad` to `after_gradient`, which may change it."""
        if self._after_gradient is not None:
            self._after_gradient(grad)


class UpdateRule(Protocol):
    """One algorithm: networks, optimisers, and an update from one batch."""

    metrics: tuple[str, ...]
    sums: Tensor  # [metrics] summed over updates
    policy: Any
    parameters: FlatParameters  # of the policy
    learning_rate: Tensor  # [member]
    changes: list[Tensor]  # all tensors that an update changes
    noise_shape: tuple[int, ...]  # of the standard normal noise that an update needs
    phases: Sequence[Update]  # update number n is phases[n % len(phases)]
    n_tasks: int
    start_parts: tuple[str, ...]  # of the state: what `start_from` takes over, beside `policy`

    def set_exploration(self, progress: float, *, warm_up: bool) -> None:
        """Set the exploration of the policy; during warm-up actions are uniformly random."""

    def current_metrics(self) -> dict[str, Tensor]:
        """Metrics that are not sums over updates."""

    def plasticity(self, batch: Transitions) -> dict[str, Tensor]:
        """Plasticity metrics of the networks on `batch`."""

    def state_dict(self) -> dict[str, Any]:
        """Networks, optimisers and counters."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Copy a checkpoint's values into the existing tensors."""

    def start_from(self, state: dict[str, Any]) -> None:
        """`registry.Algorithm.start_from`."""


class OffPolicy:
    """Trains a policy by an update rule from a replay buffer. Implements `registry.Algorithm`."""

    def __init__(
        self,
        make_rule: Callable[[Any, Any, Gradient], UpdateRule],
        policy: Any,
        recipe: OffPolicyRecipe,
        capture: Capturer = no_capture,
        report: Report = no_report,
        after_gradient: AfterGradient | None = None,
        ranks: Ranks | None = None,
        *,
        choose_update: ChooseUpdate | None = None,
        choose_gradients: ChooseGradients | None = None,
    ) -> None:
        """`policy` is already on its device: its parameters become views of one flat tensor there.

        With `ranks`, `recipe` is this rank's share of the job's. `choose_update` is for CUDA, `choose_gradients` for
        the CPU.
        """
        assert isinstance(recipe.batch_size, int)
        self.policy, self.recipe, self._batch_size = policy, recipe, recipe.batch_size
        self.schedules, self.after_gradient = schedules_of(recipe), after_gradient
        self.micro_batches = MicroBatches("A minibatch", report)
        self.rule = rule = make_rule(policy, recipe, Gradient(self.micro_batches, after_gradient))
        self.parameters = rule.parameters
        self._device = self.parameters.flat.device
        self._random_shift = RandomShift(policy.obs_layout, recipe.random_shift) if recipe.random_shift else None
        self._dispatch = Dispatch(report, None if ranks is None else ranks.all)
        self._phases = list(rule.phases)
        # On a GPU, kernels compute gradient and step together, and a graph cannot record arbitrary Python code; but it
        # can be split where ranks reduce.
        has_hook, on_cuda = after_gradient is not None, self._device.type == "cuda"
        self._choose_update = choose_update if on_cuda and not has_hook else None
        self._choose_gradients = None if on_cuda else choose_gradients
        self.experience = ExperienceReplay(
            recipe,
            policy.obs_layout.obs_bytes,
            policy.distribution.width,
            self._device,
            capture,
            n_tasks=rule.n_tasks,
            tasks_of=policy.tasks if rule.n_tasks > 1 else None,
            report=report,
            frames=Frames.of(policy.obs_layout),
            ranks=1 if ranks is None else ranks.size,
        )
        changes = [*rule.changes, *self.experience.changes]
        capture_updates = no_capture if has_hook and ranks is None else capture
        self._updates = Updates(self.update, changes, self._device, capture_updates, len(self._phases))
        self._progress = 0.0
        rule.set_exploration(0.0, warm_up=self.experience.is_warm_up)

    def set_progress(self, progress: float) -> None:
        """Update schedules; `progress` is the finished part of the run, 0 to 1."""
        self._progress = progress
        self.rule.learning_rate.fill_(self.schedules["learning_rate"](1.0 - progress))
        self.experience.set_progress(progress)

    def update_in_parts(
        self, rollout: Rollout, shuffle: torch.Generator, behaviour: object = None
    ) -> Generator[None, None, Metrics]:
        """Store `rollout` and run the updates that are due, yielding between them; returns metrics.

        `behaviour` is ignored: a Q value does not depend on the policy that chose the action.
        """
        rule = self.rule
        rule.sums.zero_()
        due = yield from self.experience.store_and_update(rollout, self._updates, shuffle)
        rule.set_exploration(self._progress, warm_up=self.experience.is_warm_up)
        means = rule.sums / max(1, due)
        metrics: Metrics = dict(zip(rule.metrics, means.tolist() if means.is_cpu else means))
        metrics |= rule.current_metrics()
        metrics["learning_rate"] = rule.learning_rate.clone()
        metrics["micro_batches"] = float(self.micro_batches.count)
        # NaN and infinite values stay in a sum, which takes one pass: `isfinite` of each weight takes several.
        total = self.parameters.flat.detach().sum()
        metrics["weights_finite"] = float(math.isfinite(total)) if total.is_cpu else torch.isfinite(total)
        metrics["updates"] = float(due)
        metrics["n_updates"] = float(self.experience.updates)
        return metrics

    def update(self, generator: torch.Generator, phase: int = 0) -> None:
        """Update from one sampled batch."""
        batch = self.experience.sampler.sample(self._batch_size, generator)
        noise = torch.randn(self.rule.noise_shape, generator=generator, device=self._device)
        if self._random_shift is not None:
            batch = self._random_shift(batch, generator)
        if self._choose_update is not None:  # on the first batch, before anything is captured
            choose, self._choose_update = self._choose_update, None
            self._phases[phase] = choose(self._dispatch, self.rule, batch, noise)
        if self._choose_gradients is not None:
            choose_gradients, self._choose_gradients = self._choose_gradients, None
            choose_gradients(self._dispatch, self.rule, batch, noise)
        self.experience.update_priorities(batch.index, self._phases[phase](batch, noise))

    @torch.no_grad()
    def plasticity(self, seed: int, step: int) -> dict[str, Tensor]:
        """Plasticity metrics on a batch drawn from a separate random stream; empty before the first update."""
        if not self.experience.updates:
            return {}
        buffer = self.experience.buffer
        generator = keyed_generator(buffer.counters[0].device, seed, PLASTICITY, step)
        batch = buffer.sample(self._batch_size, generator)
        return self.rule.plasticity(Transitions(*(tensor.to(self._device) for tensor in batch.tensors())))

    def state_dict(self) -> dict[str, Any]:
        """Everything that learning depends on, as tensors and plain values."""
        return {**self.rule.state_dict(), "experience": self.experience.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Copy a checkpoint's values into the existing tensors."""
        self.rule.load_state_dict(state)
        self.experience.load_state_dict(state["experience"])

    @property
    def start_parts(self) -> tuple[str, ...]:
        """What the rule takes over, beside its policy."""
        return self.rule.start_parts

    def start_from(self, state: dict[str, Any]) -> None:
        """Take over the rule's networks; the replay buffer stays empty."""
        self.rule.start_from(state)
