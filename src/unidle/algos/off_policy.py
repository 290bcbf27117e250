"""What off-policy algorithms have in common: a memory of what happened, and how often to learn from it.

After each fragment of n_steps × n_envs steps the number of updates ever made is ⌊utd_ratio × (steps −
learning_starts)⌋, exactly, however the steps were collected. Between two fragments it is behind by at most one
fragment's updates.

A memory lies on the device of the networks, or, if there is no room for it there, on the host: then fragments are
copied there, and batches are sent back ahead of their updates (`Prefetch`).
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Generator
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor

from unidle.algos.capturing import Capturer
from unidle.buffers.multitask import TaskReplay
from unidle.buffers.prefetch import Prefetch, choose_place, in_gib
from unidle.buffers.prioritised import Prioritised
from unidle.buffers.replay import Replay
from unidle.buffers.rollout import Rollout
from unidle.config import Recipe
from unidle.config.machine import free_memory
from unidle.errors import UsageError

_MAY_BE_SPENT = 0.9  # of what is free; networks, their graphs and workers need some as well
_HOST = torch.device("cpu")


class Experience:
    """The memory of one run; `take` puts a fragment into it and says how many updates are due.

    `replay` is what is remembered, `memory` what updates draw from: the same, unless batches are sent from the host.
    """

    def __init__(
        self,
        recipe: Recipe,
        obs_bytes: int,
        width: int,
        device: torch.device,
        capture: Capturer,
        tasks_of: Callable[[Tensor], Tensor] = lambda obs: obs,
        fall_back: Callable[[str, Exception, str], None] = lambda name, error, to: None,
    ) -> None:
        """`tasks_of` tells which tasks rows [N, obs_bytes] are of, where there are several.

        `fall_back` is told what takes a slower way, why, and which.
        """
        self._recipe, self._capture, self._tasks_of, self._device = recipe, capture, tasks_of, device
        self._is_apart = _must_lie_apart(recipe, obs_bytes, width, device, fall_back)
        place = _HOST if self._is_apart else device
        self.replay = _new_replay(recipe, obs_bytes, width, place, fall_back)
        self.memory: Replay | TaskReplay | Prioritised | Prefetch = self.replay
        if self._is_apart:
            assert isinstance(recipe.batch_size, int)
            self.memory = Prefetch(self.replay, recipe.batch_size, device)
        self._ended = torch.zeros(recipe.n_envs, dtype=torch.bool, device=device)  # with the step that was added last
        self._begins = torch.zeros(recipe.n_envs, dtype=torch.bool, device=place)
        # What follows each step, the true last observation where an episode was cut off; one place for what is none.
        self._finals = torch.zeros(recipe.total_batch + 1, obs_bytes, dtype=torch.uint8, device=place)
        self._adds: dict[int, Any] = {}  # for each rollout what adds it: it may be captured, and a graph knows tensors
        self._ratio = Fraction(str(recipe.utd_ratio))  # as it is written: 0.29 × 100 is 29
        self.steps = self.updates = 0
        self._since, self._before = recipe.learning_starts, 0  # updates are due from that step on, after so many others

    def rehearse(self, rollout: Rollout, updates: Updates, shuffle: torch.Generator) -> Generator[None, None, int]:
        """Remember a fragment and make the updates that are due, pausing after each piece; returns how many.

        No pause before the first of them: a GPU would wait meanwhile.
        """
        due = left = self.take(rollout)
        updates.begin(shuffle)
        if isinstance(self.memory, Prefetch):
            yield from _one_by_one(due, updates, self.memory, shuffle)
            return due
        while left:
            left -= updates.run(left)
            yield
        return due

    def told(self, due: int) -> dict[str, Tensor]:
        """What is logged of the updates: those of this fragment, and all."""
        return {
            "updates": torch.full((), float(due), device=self._device),
            "updates_in_all": torch.full((), float(self.updates), device=self._device),
        }

    def take(self, rollout: Rollout) -> int:
        """Remember a fragment; returns how many updates are due now, and counts them as made."""
        kept = _on_host(rollout) if self._is_apart else rollout
        self._finals[:-1].copy_(kept.obs[1:].flatten(0, 1))
        self._finals[kept.final_at] = kept.final_obs
        # At first; and where an environment had to begin anew between two fragments: what was open there is cut off.
        self._begins.copy_(rollout.starts[0] & ~self._ended)
        if self._is_apart:
            self._add(kept, self._tasks(rollout).to(_HOST))
        else:
            if id(rollout) not in self._adds:
                self._adds[id(rollout)] = self._capture(
                    "the replay", lambda: self._add(rollout, self._tasks(rollout)), self.replay.counters
                )
            self._adds[id(rollout)]()
        self._ended.copy_(rollout.terminated[-1] | rollout.truncated[-1])
        self.steps += self._recipe.total_batch
        due = self._before + math.floor(self._ratio * max(0, self.steps - self._since))
        count, self.updates = due - self.updates, due
        return count

    def _tasks(self, rollout: Rollout) -> Tensor:
        """[T, N] what was played; empty if there is but one."""
        if self._recipe.n_tasks == 1:
            return torch.empty(0, device=self._device)
        return self._tasks_of(rollout.obs[:-1].flatten(0, 1)).view(rollout.shape)

    def _add(self, rollout: Rollout, tasks: Tensor) -> None:
        self.replay.start(rollout.obs[0], self._begins)
        finals = self._finals[:-1].view(*rollout.shape, -1)
        for step in range(rollout.shape[0]):
            happened = (
                rollout.actions[step],
                rollout.rewards[step],
                rollout.terminated[step],
                rollout.truncated[step],
                rollout.obs[step + 1],
                finals[step],
            )
            if isinstance(self.replay, TaskReplay):
                self.replay.add(*happened, tasks[step])
            else:
                self.replay.add(*happened)

    @property
    def is_at_random(self) -> bool:
        """Whether actions are random: until something can be learned for the first time."""
        return self.steps < self._since and not self._before

    def set_progress(self, progress: float) -> None:
        """From 0 to 1 of the run: importance weights correct in full at its end."""
        if isinstance(self.replay, Prioritised):
            first = self._recipe.per_beta
            self.replay.beta.fill_(first + (1 - first) * progress)

    def note_errors(self, index: Tensor, errors: Tensor) -> None:
        """Remember how wrong the values of a batch's transitions were, if that decides how often they are drawn."""
        if isinstance(self.replay, Prioritised):
            self.replay.update(index, errors)

    @property
    def changes(self) -> list[Tensor]:
        """What an update changes here."""
        return [self.replay.highest, *self.replay.tree.levels] if isinstance(self.replay, Prioritised) else []

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint holds: all of it."""
        counts = {"steps": self.steps, "updates": self.updates, "since": self._since, "before": self._before}
        return {**counts, "ended": self._ended, "memory": self.replay.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Put a checkpoint's values into the tensors that are here; without a memory, collect anew before learning."""
        self.steps, self.updates = state["steps"], state["updates"]
        self._since, self._before = state["since"], state["before"]
        if "memory" in state:
            self._ended.copy_(state["ended"])
            self.replay.load_state_dict(state["memory"])
        else:
            self._since, self._before = self.steps + self._recipe.learning_starts, self.updates


def _must_lie_apart(
    recipe: Recipe,
    obs_bytes: int,
    width: int,
    device: torch.device,
    fall_back: Callable[[str, Exception, str], None],
) -> bool:
    """Whether there is room for the memory on the host only; a UsageError, before any is taken, if not even there."""
    size = recipe.buffer_size
    kind: Any = TaskReplay if recipe.n_tasks > 1 else Prioritised if recipe.per else Replay
    each, on_gpu = kind.bytes_per_place(obs_bytes, width), device.type == "cuda"
    room = int(_MAY_BE_SPENT * torch.cuda.mem_get_info(device)[0]) if on_gpu else 0
    why = f"{size:,} steps take {in_gib(size * each)}, and there is room for {in_gib(room)} on the GPU"
    if kind is Prioritised and on_gpu and size * each > room:
        raise UsageError(
            f"A prioritised memory lies where the networks do: {why}; give --buffer-size at most {room // each:,}, or "
            "leave out --per."
        )
    if choose_place(size, each, device, room, int(_MAY_BE_SPENT * free_memory())) == "device":
        return False
    fall_back("The memory", UsageError(f"{why}."), "lies on the host, from where each batch is sent to the GPU")
    return True


def _new_replay(
    recipe: Recipe, obs_bytes: int, width: int, place: torch.device, fall_back: Callable[[str, Exception, str], None]
) -> Replay | TaskReplay | Prioritised:
    size, n_envs, gamma = recipe.buffer_size, recipe.n_envs, recipe.gamma
    of_lines, of_tasks = _kinds(place, fall_back)
    if recipe.n_tasks > 1:
        return of_tasks(size, recipe.n_tasks, n_envs, obs_bytes, width, place, gamma)
    replay = of_lines(size, n_envs, obs_bytes, width, place, gamma, n_steps=recipe.n_step)
    return Prioritised(replay, recipe.per_alpha, recipe.per_beta) if recipe.per else replay


def _kinds(
    place: torch.device, fall_back: Callable[[str, Exception, str], None]
) -> tuple[type[Replay], type[TaskReplay]]:
    """Those with kernels of their own, where these run and draw what the plain ones do."""
    if place.type == "cuda":
        try:
            from unidle.buffers.fused_replay import FusedReplay, FusedTaskReplay, prove

            prove(place)
            return FusedReplay, FusedTaskReplay
        except ImportError:  # torch comes without Triton on some platforms
            pass
        except Exception as error:
            fall_back("The memory", error, "does without kernels of its own")
    return Replay, TaskReplay


def _on_host(rollout: Rollout) -> Rollout:
    """A copy there; waits for it."""
    there = copy.copy(rollout)
    for name, value in vars(rollout).items():
        setattr(there, name, value.to(_HOST))
    return there


def _one_by_one(due: int, updates: Updates, memory: Prefetch, shuffle: torch.Generator) -> Generator[None, None, None]:
    """So many updates, each from a batch that was sent while the device learned from the one before it."""
    draws = torch.Generator().manual_seed((shuffle.initial_seed() + 2) % 2**63)  # those of `Updates` come before it
    for number in range(due):
        if number == 0:
            memory.send(draws)
        memory.take()
        updates.run(1)
        if number + 1 < due:
            memory.send(draws)
        yield


class Updates:
    """Calls `update` so many times, several to a graph where it is captured."""

    def __init__(self, update: Any, changes: list[Tensor], device: torch.device, capture: Capturer) -> None:
        """`update` takes a generator to draw from; `changes` are the tensors that it changes."""
        self._at_once = 8 if device.type == "cuda" else 1
        self._generators = [torch.Generator(device) for _ in range(2)]  # each graph has its own

        def several(count: int, generator: torch.Generator) -> Any:
            def run() -> None:
                for _ in range(count):
                    update(generator)

            return capture("updates", run, changes, generators=(generator,))

        self._one, self._several = several(1, self._generators[0]), several(self._at_once, self._generators[1])

    def begin(self, generator: torch.Generator) -> None:
        """Draw from streams that this generator's seed stands for."""
        for number, own in enumerate(self._generators):
            own.manual_seed((generator.initial_seed() + number) % 2**63)

    def run(self, count: int) -> int:
        """Do some of `count` updates, at least one; returns how many."""
        if count >= self._at_once > 1:
            self._several()
            return self._at_once
        self._one()
        return 1
