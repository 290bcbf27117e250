"""What off-policy algorithms have in common: a memory of what happened, and how often to learn from it.

After each fragment of n_steps × n_envs steps the number of updates ever made is ⌊updates_per_step × (steps −
learning_starts)⌋, exactly, however the steps were collected. Between two fragments it is behind by at most one
fragment's updates.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor

from unidle.algos.capturing import Capturer
from unidle.config import Recipe
from unidle.config.machine import available_memory
from unidle.errors import UsageError
from unidle.memory.priority import Prioritised
from unidle.memory.replay import Replay, TaskReplay, choose_place
from unidle.memory.rollout import Rollout


class Experience:
    """The memory of one run; `take` puts a fragment into it and says how many updates are due."""

    def __init__(
        self,
        recipe: Recipe,
        row_bytes: int,
        width: int,
        device: torch.device,
        capture: Capturer,
        tasks_of: Callable[[Tensor], Tensor] = lambda rows: rows,
    ) -> None:
        """`tasks_of` tells which tasks rows [N, row_bytes] are of, where there are several."""
        self._recipe, self._capture, self._tasks_of = recipe, capture, tasks_of
        self.memory = _new_memory(recipe, row_bytes, width, device)
        self._has_begun = False
        self._ended = torch.ones(recipe.n_envs, dtype=torch.bool, device=device)  # with the step that was added last
        # What follows each step, the true last observation where an episode ended; and one place for what is none.
        self._finals = torch.zeros(recipe.total_batch + 1, row_bytes, dtype=torch.uint8, device=device)
        self._adds: dict[int, Any] = {}  # for each rollout what adds it: it may be captured, and a graph knows tensors
        self._ratio = Fraction(str(recipe.updates_per_step))  # as it is written: 0.29 × 100 is 29
        self.steps = self.updates = 0
        self._since, self._before = recipe.learning_starts, 0  # updates are due from that step on, after so many others

    def rehearse(self, rollout: Rollout, updates: Updates, shuffle: torch.Generator) -> Generator[None, None, int]:
        """Remember a fragment and make the updates that are due, pausing after each piece; returns how many."""
        due = left = self.take(rollout)
        updates.begin(shuffle)
        yield
        while left:
            left -= updates.run(left)
            yield
        return due

    def told(self, due: int) -> dict[str, Tensor]:
        """What is logged of the updates: those of this fragment, and all."""
        device = self._finals.device
        return {
            "updates": torch.full((), float(due), device=device),
            "updates_in_all": torch.full((), float(self.updates), device=device),
        }

    def take(self, rollout: Rollout) -> int:
        """Remember a fragment; returns how many updates are due now, and counts them as made."""
        # Also where an environment had to begin anew between two fragments: what was open there is cut off.
        if not self._has_begun or (rollout.starts[0] & ~self._ended).any():
            self._has_begun = True
            self.memory.start(rollout.rows[0])
        self._finals[:-1].copy_(rollout.rows[1:].flatten(0, 1))
        self._finals[rollout.final_at] = rollout.final_rows
        if id(rollout) not in self._adds:
            self._adds[id(rollout)] = self._capture("the replay", lambda: self._add(rollout), self.memory.counters)
        self._adds[id(rollout)]()
        self._ended.copy_(rollout.terminated[-1] | rollout.truncated[-1])
        self.steps += self._recipe.total_batch
        due = self._before + math.floor(self._ratio * max(0, self.steps - self._since))
        count, self.updates = due - self.updates, due
        return count

    def _add(self, rollout: Rollout) -> None:
        finals = self._finals[:-1].view(*rollout.shape, -1)
        for step in range(rollout.shape[0]):
            happened = (
                rollout.actions[step],
                rollout.rewards[step],
                rollout.terminated[step],
                rollout.truncated[step],
                rollout.rows[step + 1],
                finals[step],
            )
            if isinstance(self.memory, TaskReplay):
                self.memory.add(*happened, self._tasks_of(rollout.rows[step]))
            else:
                self.memory.add(*happened)

    @property
    def is_at_random(self) -> bool:
        """Whether actions are random: until something can be learned for the first time."""
        return self.steps < self._since and not self._before

    def set_progress(self, progress: float) -> None:
        """From 0 to 1 of the run: importance weights correct in full at its end."""
        if isinstance(self.memory, Prioritised):
            first = self._recipe.priority_beta
            self.memory.beta.fill_(first + (1 - first) * progress)

    def note_errors(self, index: Tensor, errors: Tensor) -> None:
        """Remember how wrong the values of a batch's transitions were, if that decides how often they are drawn."""
        if isinstance(self.memory, Prioritised):
            self.memory.update(index, errors)

    @property
    def changes(self) -> list[Tensor]:
        """What an update changes here."""
        return [self.memory.highest, *self.memory.tree.levels] if isinstance(self.memory, Prioritised) else []

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint holds: all of it."""
        counts = {"steps": self.steps, "updates": self.updates, "since": self._since, "before": self._before}
        return {**counts, "ended": self._ended, "memory": self.memory.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Put a checkpoint's values into the tensors that are here; without a memory, collect anew before learning."""
        self.steps, self.updates = state["steps"], state["updates"]
        self._since, self._before = state["since"], state["before"]
        if "memory" in state:
            self._ended.copy_(state["ended"])
            self.memory.load_state_dict(state["memory"])
            self._has_begun = True
        else:
            self._since, self._before = self.steps + self._recipe.learning_starts, self.updates


def _new_memory(recipe: Recipe, row_bytes: int, width: int, device: torch.device) -> Replay | TaskReplay | Prioritised:
    """A memory that fits; a UsageError, before anything is taken, if none of that size does."""
    size, n_envs, gamma = recipe.buffer_size, recipe.n_envs, recipe.gamma
    kind: Any = TaskReplay if recipe.n_tasks > 1 else Prioritised if recipe.prioritised else Replay
    each, on_gpu = kind.bytes_per_place(row_bytes, width), device.type == "cuda"
    free = torch.cuda.mem_get_info(device)[0] if on_gpu else 0
    if choose_place(size, each, device, free, available_memory()) == "host":
        raise UsageError(
            f"A memory of {size:,} steps takes {size * each / 2**30:,.1f} GiB, and the GPU has {free / 2**30:,.1f} GiB "
            f"free; give --buffer-size at most {free // each:,}."
        )
    if recipe.n_tasks > 1:
        return TaskReplay(size, recipe.n_tasks, n_envs, row_bytes, width, device, gamma)
    replay = Replay(size, n_envs, row_bytes, width, device, gamma, n_steps=recipe.return_steps)
    return Prioritised(replay, recipe.priority_alpha, recipe.priority_beta) if recipe.prioritised else replay


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
