"""Experience replay: stores rollouts in a replay buffer and runs the updates that are due.

After each rollout the total number of updates is ⌊utd_ratio × (steps − learning_starts)⌋, exactly.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Generator, Sequence
from fractions import Fraction
from typing import Any

import numpy as np
import torch
from torch import Tensor

from unidle.algos.capturing import Capturer
from unidle.buffers.frames import Frames
from unidle.buffers.multitask import TaskReplay
from unidle.buffers.numpy_replay import NumpyReplay
from unidle.buffers.placement import HOST, ReplayBuffer, fits_only_on_host, new_replay_buffer
from unidle.buffers.prefetch import Prefetch
from unidle.buffers.prioritised import Prioritised
from unidle.buffers.rollout import Rollout
from unidle.config import OffPolicyRecipe
from unidle.kernels.dispatch import Dispatch, Report, no_report

_UPDATES_PER_GRAPH = 8


class ExperienceReplay:
    """The replay buffer of a run, and the number of updates that are due.

    `buffer` stores the transitions. Updates sample from `sampler`: the buffer itself, or a `Prefetch` if it is on the
    host.
    """

    def __init__(
        self,
        recipe: OffPolicyRecipe,
        obs_bytes: int,
        width: int,
        device: torch.device,
        capture: Capturer,
        *,
        n_tasks: int = 1,
        tasks_of: Callable[[Tensor], Tensor] | None = None,
        report: Report = no_report,
        frames: Frames | None = None,
        ranks: int = 1,
    ) -> None:
        """`tasks_of` maps observations [N, obs_bytes] to their tasks [N], if there are several.

        `frames` are those of observations that are stacks with images. With several `ranks`, `recipe` is one rank's
        share; steps and updates are counted for the whole job.
        """
        self._steps_per_rollout = recipe.total_batch * ranks
        self._recipe, self._capture, self._tasks_of, self._device = recipe, capture, tasks_of, device
        self._on_host = fits_only_on_host(recipe, obs_bytes, width, device, n_tasks, report, frames)
        buffer_device = HOST if self._on_host else device
        self.buffer: ReplayBuffer = new_replay_buffer(
            recipe, obs_bytes, width, buffer_device, n_tasks, Dispatch(report), frames
        )
        self.sampler: ReplayBuffer | Prefetch = self.buffer
        if self._on_host:
            assert isinstance(recipe.batch_size, int)
            self.sampler = Prefetch(self.buffer, recipe.batch_size, device)
        self._ended = torch.zeros(recipe.n_envs, dtype=torch.bool, device=buffer_device)  # by the last stored step
        self._starts = torch.zeros(recipe.n_envs, dtype=torch.bool, device=buffer_device)
        # Next observations of all steps: the final one where an episode was truncated. The last entry is a dummy.
        self._next_obs = torch.zeros(recipe.total_batch + 1, obs_bytes, dtype=torch.uint8, device=buffer_device)
        self._adds: dict[int, Callable[[], None]] = {}  # one per rollout: a captured graph is tied to its tensors
        self._utd_ratio = Fraction(str(recipe.utd_ratio))  # exact, as a decimal: 0.29 × 100 is 29
        self.steps = self.updates = 0
        # Updates that are due: `_updates_before`, and `utd_ratio` for every step after `_first_step`.
        self._first_step, self._updates_before = recipe.learning_starts, 0

    def store_and_update(
        self, rollout: Rollout, updates: Updates, shuffle: torch.Generator
    ) -> Generator[None, None, int]:
        """Store a rollout and run the updates that are due, yielding between them; returns how many.

        Does not yield before the first update, so that a GPU does not idle.
        """
        due = remaining = self.store(rollout)
        updates.begin(shuffle, self.updates - due)
        if isinstance(self.sampler, Prefetch):
            yield from _with_prefetch(due, updates, self.sampler, shuffle)
            return due
        while remaining:
            remaining -= updates.run(remaining)
            yield
        return due

    def store(self, rollout: Rollout) -> int:
        """Store a rollout; returns how many updates are due, and counts them as done."""
        if isinstance(self.buffer, NumpyReplay):
            self._store_in_numpy(self.buffer, rollout)
        else:
            self._store(rollout)
        self.steps += self._steps_per_rollout
        ratio = self._utd_ratio
        after_start = max(0, self.steps - self._first_step)
        total = self._updates_before + after_start * ratio.numerator // ratio.denominator
        due, self.updates = total - self.updates, total
        return due

    def _store(self, rollout: Rollout) -> None:
        stored = _copy_to_host(rollout) if self._on_host else rollout
        self._set_next_obs(stored)
        # True in the first rollout, and later for environments that were restarted between two rollouts, whose episodes
        # are truncated.
        self._starts.copy_(stored.starts[0] & ~self._ended)
        if self._on_host:
            self._add(stored, self._tasks(rollout).to(HOST))
        else:
            if id(rollout) not in self._adds:
                self._adds[id(rollout)] = self._capture(
                    "the replay buffer", lambda: self._add(rollout, self._tasks(rollout)), self.buffer.counters
                )
            self._adds[id(rollout)]()
        self._ended.copy_(stored.terminated[-1] | stored.truncated[-1])

    def _store_in_numpy(self, buffer: NumpyReplay, rollout: Rollout) -> None:
        """The same on a host, where torch's overhead would exceed the work."""
        stored = _copy_to_host(rollout) if self._on_host else rollout
        arrays, ended = stored.arrays, self._ended.numpy()
        next_obs = final_obs = arrays.obs[1:]
        if len(stored.final_at):
            self._set_next_obs(stored)
            final_obs = self._next_obs[:-1].view(*rollout.shape, -1).numpy()
        buffer.begin_rollout(arrays.obs[0], arrays.starts[0] & ~ended)
        outcomes = arrays.actions, arrays.rewards, arrays.terminated, arrays.truncated
        buffer.add_rollout(*outcomes, next_obs, final_obs)
        np.logical_or(arrays.terminated[-1], arrays.truncated[-1], out=ended)

    def _set_next_obs(self, stored: Rollout) -> None:
        self._next_obs[:-1].copy_(stored.obs[1:].flatten(0, 1))
        if len(stored.final_at):
            self._next_obs[stored.final_at] = stored.final_obs

    def _tasks(self, rollout: Rollout) -> Tensor:
        """[T, N] tasks; empty if there is only one."""
        if self._tasks_of is None:
            return torch.empty(0, device=self._device)
        return self._tasks_of(rollout.obs[:-1].flatten(0, 1)).view(rollout.shape)

    def _add(self, rollout: Rollout, tasks: Tensor) -> None:
        self.buffer.start(rollout.obs[0], self._starts)
        next_obs = self._next_obs[:-1].view(*rollout.shape, -1)
        for step in range(rollout.shape[0]):
            transition = (
                rollout.actions[step],
                rollout.rewards[step],
                rollout.terminated[step],
                rollout.truncated[step],
                rollout.obs[step + 1],
                next_obs[step],
            )
            if isinstance(self.buffer, TaskReplay):
                self.buffer.add(*transition, tasks[step])
            else:
                self.buffer.add(*transition)

    @property
    def is_warm_up(self) -> bool:
        """Whether actions are still random, because fewer than `learning_starts` steps are stored."""
        return self.steps < self._first_step and not self._updates_before

    def set_progress(self, progress: float) -> None:
        """Anneal β of prioritised replay to 1 over the run."""
        if isinstance(self.buffer, Prioritised):
            initial = self._recipe.per_beta
            self.buffer.beta.fill_(initial + (1 - initial) * progress)

    def update_priorities(self, index: Tensor, errors: Tensor) -> None:
        """Set the priorities of sampled transitions from their TD errors, if replay is prioritised."""
        if isinstance(self.buffer, Prioritised):
            self.buffer.update(index, errors)

    @property
    def changes(self) -> list[Tensor]:
        """Tensors of the buffer that an update changes."""
        return [self.buffer.highest, *self.buffer.tree.levels] if isinstance(self.buffer, Prioritised) else []

    def state_dict(self) -> dict[str, Any]:
        """The counters and the whole buffer."""
        return {
            "steps": self.steps,
            "updates": self.updates,
            "since": self._first_step,
            "before": self._updates_before,
            "ended": self._ended,
            "memory": self.buffer.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Copy a checkpoint's values into the existing tensors; without a buffer, refill it before learning resumes."""
        self.steps, self.updates = state["steps"], state["updates"]
        self._first_step, self._updates_before = state["since"], state["before"]
        if "memory" in state:
            self._ended.copy_(state["ended"])
            self.buffer.load_state_dict(state["memory"])
        else:
            self._first_step, self._updates_before = self.steps + self._recipe.learning_starts, self.updates


class Updates:
    """Runs updates, several per CUDA graph where they are captured."""

    def __init__(
        self,
        update: Callable[[torch.Generator, int], None],
        changes: list[Tensor],
        device: torch.device,
        capture: Capturer,
        n_phases: int = 1,
    ) -> None:
        """`update` takes the generator to draw from and its phase; `changes` are the tensors that it changes."""
        self._n_phases, self._done = n_phases, 0
        self._per_graph = n_phases * max(1, _UPDATES_PER_GRAPH // n_phases) if device.type == "cuda" else 1
        self._generators: list[torch.Generator] = []  # one per graph

        def captured(phases: Sequence[int]) -> Callable[[], None]:
            generator = torch.Generator(device)
            self._generators.append(generator)

            def run() -> None:
                for phase in phases:
                    update(generator, phase)

            return capture("updates", run, changes, generators=(generator,))

        # In this order: it decides the seed of each generator.
        first = captured([0])
        self._run_several = captured([number % n_phases for number in range(self._per_graph)])
        self._run_one = [first, *(captured([phase]) for phase in range(1, n_phases))]

    def begin(self, generator: torch.Generator, done: int = 0) -> None:
        """Seed the random streams from `generator`'s seed; `done` is the number of earlier updates."""
        self._done = done
        for number, own in enumerate(self._generators):
            offset = number if number < 2 else number + 1  # 2 is for prefetching
            own.manual_seed((generator.initial_seed() + offset) % 2**63)

    def run(self, count: int) -> int:
        """Run some of `count` updates, at least one; returns how many."""
        phase = self._done % self._n_phases
        if phase == 0 and count >= self._per_graph > 1:
            self._run_several()
            done = self._per_graph
        else:
            self._run_one[phase]()
            done = 1
        self._done += done
        return done


def _copy_to_host(rollout: Rollout) -> Rollout:
    """A copy on the host; waits for the device."""
    on_host = copy.copy(rollout)
    for name, value in vars(rollout).items():
        if isinstance(value, Tensor):
            setattr(on_host, name, value.to(HOST))
    return on_host


def _with_prefetch(
    due: int, updates: Updates, prefetch: Prefetch, shuffle: torch.Generator
) -> Generator[None, None, None]:
    """Run `due` updates; each batch is copied to the device during the update before it."""
    generator = torch.Generator().manual_seed((shuffle.initial_seed() + 2) % 2**63)
    for number in range(due):
        if number == 0:
            prefetch.send(generator)
        prefetch.take()
        updates.run(1)
        if number + 1 < due:
            prefetch.send(generator)
        yield
