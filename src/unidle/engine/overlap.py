"""Overlap: environments collect the next rollout while the GPU learns from the last one.

With `--overlap strict` there are two rollout slots, with `off` there is one. k counts rollouts and updates; update k
learns from rollout k; weights w_k are those after k updates. Two slots, in time:

    collect   | rollout 0 | rollout 1 | rollout 2 | rollout 3 | …
    act with  |    w_0    |    w_0    |    w_1    |    w_2    |
    learn     |           | update 0  | update 1  | update 2  |
                                      ↑ w_1 is published: rollout 2 opens in the slot of rollout 0

The environments are divided into slices, which are stepped together. Invariants, with S slots:

1. *Which weights act.* Rollout k is collected with w_max(0, k + 1 − S), in every environment and at every step, however
   fast or slow anything was. For S = 1 that is w_k: textbook PPO.
2. *When a slice may continue.* A slice takes T steps in rollout k, then T in rollout k + 1, without waiting for other
   slices. All it needs is that its rollout is open. If it is not, the slice is parked until it opens.
3. *When weights are published.* Only by `open_rollout`, after update k and its check for NaN: it copies w_{k+1} into
   the slot of rollout k + S, on the collector's stream, which first waits for the learner's stream. It never runs
   during inference, so the weights of an open rollout do not change.
4. *Slot ownership.* Rollouts `oldest` … `newest` are open, and newest < oldest + S. The slot of rollout k is handed to
   the learner when every slice has finished rollout k, and reopens only after update k. A slot is never
   written while it is learned from.
5. *Why it is reproducible bit for bit.* The action of environment i at step t of rollout k is a function of its
   observation, the slot's weights (normaliser statistics included) and noise[t, i], drawn from (seed, k). Inference
   always has the full batch shape (results of environments that are not ready go to a trash row), so it does not matter
   which slices are ready together. Results are stored at (t, i), and lists are sorted by (t, i). Timing decides when
   something is computed, never what.
6. *What a checkpoint holds.* Where every environment stood when rollout `oldest` began, and the weights of the open
   rollouts. Steps taken since are not saved; by 5, a resumed run takes the same steps again.
7. *Failures.* If the environments cannot continue during an update, the update is still completed, so that there is a
   consistent state to save. Then the failure is raised.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch

from unidle.engine.collect.rollout_slot import FinishedRollout, RolloutSlot
from unidle.engine.learn.learner import Learner
from unidle.engine.turns import Turns
from unidle.errors import TrainingError, UsageError
from unidle.timeline import LEARN, SYNC, Timeline

ENV_FAILURES = TrainingError, UsageError  # raised by environments that cannot continue
_POLL_SECONDS = 0.0005  # wait this long for environments before checking on the learner again


class SliceSchedule:
    """Which rollout and step each slice of environments is at, and which slices may act (invariants 2 and 4)."""

    def __init__(self, bounds: Sequence[tuple[int, int]], n_steps: int, n_slots: int) -> None:
        """`bounds` are the first and end env index of each slice."""
        self._n_steps, self.n_slots, self._n_slices = n_steps, n_slots, len(bounds)
        self.slices = np.repeat(np.arange(len(bounds)), np.diff(bounds)[:, 0])  # [env] → its slice
        self.rollout = [0] * len(bounds)  # [slice] the rollout it is in
        self.slots = np.zeros(len(bounds), np.int64)  # [slice] the slot of that rollout
        self.step = np.zeros(len(bounds), np.int64)  # [slice] steps it has taken there
        self.oldest, self.newest = 0, -1  # open rollouts: the next one to be learned from, and the last one to open
        self.n_rollouts: float = float("inf")  # of the whole run: no environment acts in a later one
        self.waiting: list[int] = []  # slices whose observations wait for actions
        self.parked = list(range(len(bounds)))  # slices whose next rollout is not open yet

    def slice_of(self, env: int) -> int:
        """The slice of an environment."""
        return int(self.slices[env])

    def slot(self, index: int) -> int:
        """The slot that slice `index` acts in."""
        return self.rollout[index] % self.n_slots

    def open_next(self) -> int:
        """Open one more rollout, whose weights are now published; returns its index."""
        self.newest += 1
        parked, self.parked = self.parked, []
        self.enqueue(parked)
        return self.newest

    def enqueue(self, slices: list[int]) -> None:
        """Queue slices for actions, or park them if their rollout is not open."""
        last = min(self.newest, self.n_rollouts - 1)
        for rollout, group in self.by_rollout(slices):
            (self.waiting if rollout <= last else self.parked).extend(group)

    def take_waiting(self) -> list[int]:
        """The slices to act for next: one rollout at a time, the oldest first, because learning waits for it."""
        (_, taken), *others = self.by_rollout(self.waiting)
        self.waiting = [index for _, group in others for index in group]
        return taken

    def by_rollout(self, slices: list[int]) -> list[tuple[int, list[int]]]:
        """These slices grouped by the rollout they are in, the oldest first; fast for the usual single group."""
        rollouts = set(map(self.rollout.__getitem__, slices))
        if len(rollouts) == 1:
            return [(rollouts.pop(), slices)]
        return [(number, [index for index in slices if self.rollout[index] == number]) for number in sorted(rollouts)]

    def take_step(self, slices: Sequence[int]) -> list[int]:
        """Count one more step of these slices; returns those that have now finished their rollout."""
        self.step[slices] += 1
        return np.flatnonzero(self.step == self._n_steps).tolist() if self.step.max() == self._n_steps else []

    def enter_next_rollout(self, index: int) -> None:
        """Move a slice that finished its rollout on to the next one."""
        self.rollout[index] += 1
        self.slots[index] = self.slot(index)
        self.step[index] = 0

    def is_at_boundary(self) -> bool:
        """Whether no slice has taken a step beyond the last finished rollout, nor is taking one."""
        are_idle = len(self.parked) + len(self.waiting) == self._n_slices and not self.step.any()
        return are_idle and all(rollout == self.oldest for rollout in self.rollout)

    def restart_at(self, rollout: int) -> None:
        """Resume with every slice at the beginning of `rollout`."""
        self.rollout = [rollout] * self._n_slices
        self.slots[:] = rollout % self.n_slots
        self.oldest, self.newest = rollout, rollout - 1


class RolloutCollector(Protocol):
    """What the loop needs of a collector, on the host or on the device."""

    @property
    def n_slots(self) -> int:
        """How many rollouts may be open at once."""

    def finish_in_turns(self) -> Turns[RolloutSlot | FinishedRollout]:
        """Collect until the oldest open rollout is complete, and hand it to the learner."""

    def poll_in_turns(self, seconds: float) -> Turns[bool]:
        """Act for slices that wait and receive those that are ready; False if no environment can continue."""

    def open_rollout(self) -> None:
        """Publish the policy's current weights and let the next rollout begin."""


class Overlap:
    """Runs updates; with a second slot, the environments continue during an update."""

    def __init__(self, collector: RolloutCollector, learner: Learner, timeline: Timeline) -> None:
        self._collector, self._learner, self._timeline = collector, learner, timeline

    def learn(
        self, finished: RolloutSlot | FinishedRollout, progress: float, shuffle: torch.Generator
    ) -> Turns[tuple[dict[str, float], Exception | None]]:
        """Run one update; returns its metrics, and the failure if the environments cannot continue (invariant 7)."""
        self._timeline.enter(LEARN)
        self._learner.begin(finished, progress, shuffle)
        failure = yield from self._learn_while_collecting()
        self._timeline.enter(SYNC)
        yield self._learner.is_done
        return self._learner.metrics(), failure

    def _learn_while_collecting(self) -> Turns[Exception | None]:
        """Alternate between keeping the GPU's queue full and polling the environments, until the update is done."""
        learner, collector = self._learner, self._collector
        failure: Exception | None = None
        is_collecting, has_more = collector.n_slots > 1, True
        while has_more or (is_collecting and not learner.is_done()):
            queue_is_full = is_collecting and (not has_more or learner.queue_is_full())
            if not queue_is_full:
                self._timeline.enter(LEARN)
                has_more = learner.advance()
                yield None
                queue_is_full = not has_more or learner.queue_is_full()
            if is_collecting:
                try:
                    # False: every slice is parked until the weights of this update are published.
                    is_collecting = yield from collector.poll_in_turns(_POLL_SECONDS if queue_is_full else 0.0)
                except ENV_FAILURES as error:
                    failure, is_collecting = error, False
        return failure
