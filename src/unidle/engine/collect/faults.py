"""Keeps collected trajectories valid when environments fail.

A step that failed did not happen. The environment was restarted, its trajectory ends (truncated) at the step before,
and the step is taken again from the first observation of a new episode. The rest of its slice waits for it.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from unidle.engine.collect.rollout_slot import RolloutSlot
from unidle.engine.overlap import SliceSchedule
from unidle.envs.protocol import Fault, HostEnvs


class FaultHandler:
    """Stores what slices with failed environments returned, and reports the faults."""

    def __init__(
        self,
        envs: HostEnvs,
        schedule: SliceSchedule,
        slots: Sequence[RolloutSlot],
        starts: np.ndarray,
        states: Tensor,
        stream: torch.cuda.Stream | None,
        on_fault: Callable[[Fault, int], None],
    ) -> None:
        """`starts` [N] (whose observation begins an episode) and `states` [N, S] (recurrent) are the collector's."""
        self._envs, self._schedule, self._slots = envs, schedule, slots
        self._starts, self._states, self._stream, self.on_fault = starts, states, stream, on_fault
        self.retry: dict[int, np.ndarray] = {}  # slice → the env indices that must take their step again
        self._counts: defaultdict[int, Counter[str]] = defaultdict(Counter)  # rollout → faults by kind
        self._restarted: defaultdict[int, list[int]] = defaultdict(list)  # rollout → envs that begin it after a fault

    @property
    def pending(self) -> bool:
        """Whether the slices just received need `receive` instead of the fast path."""
        return bool(self._envs.faults or self._envs.restarted or self.retry)

    def receive(self, slices: Sequence[int]) -> list[int]:
        """Store the steps that happened; returns the slices of which every environment has now stepped.

        The others wait for new actions for the environments that failed.
        """
        block, envs, schedule = self._envs.block, self._envs, self._schedule
        self.report()
        for env in envs.restarted:
            self._renew(env)
        envs.restarted.clear()
        stepped = []
        for index in slices:
            slot, step = self._slots[schedule.slot(index)], int(schedule.step[index])
            every_env = np.arange(*envs.bounds[index])
            waited_for = self.retry.pop(index, every_env)
            block.skip[every_env] = False
            failed = block.retry[waited_for]
            if not failed.all():
                done = waited_for[~failed]
                slot.staging.store(block, (np.full(len(done), step), done), self._recurrent_starts)
            if failed.any():
                for env in waited_for[failed]:
                    self._cut(slot, step, env)
                self.retry[index] = waited_for[failed]
                block.skip[every_env] = True
                block.skip[waited_for[failed]] = False
                schedule.waiting.append(index)
            else:
                stepped.append(index)
        return stepped

    def report(self) -> None:
        """Count the faults of the environments and pass them on."""
        for fault in self._envs.faults:
            rollout = self._rollout_of(fault)
            self._counts[rollout][fault.kind] += 1
            self.on_fault(fault, rollout)
        self._envs.faults.clear()

    def take_counts(self, rollout: int) -> Counter[str]:
        """Faults by kind of a rollout that is now complete."""
        return self._counts.pop(rollout, Counter())

    def take_restarted(self, rollout: int) -> list[int]:
        """Environments that begin a rollout with a new episode because of a fault."""
        return self._restarted.pop(rollout, [])

    @property
    def _recurrent_starts(self) -> np.ndarray | None:
        return self._starts if self._states.shape[1] else None

    def _rollout_of(self, fault: Fault) -> int:
        """The rollout a fault counts towards.

        For an exception, the one its environment is in: timing must not decide it.
        """
        schedule = self._schedule
        if fault.kind != "exception":
            return schedule.oldest
        index = schedule.rollout[schedule.slice_of(fault.env)]
        return int(min(index, schedule.newest, schedule.n_rollouts - 1))  # one that is not complete yet

    def _cut(self, slot: RolloutSlot, step: int, env: int) -> None:
        """The step of `env` did not happen: its trajectory ends, truncated, with the one before."""
        rollout = slot.rollout
        if self._stream is not None:
            self._stream.synchronize()  # rare, so a plain wait will do
        self._truncate(env, step - 1, rollout.obs[step, env].cpu().numpy())
        if self._states.shape[1]:
            with torch.cuda.stream(self._stream):
                self._states[env] = rollout.states[step, env]

    def _renew(self, env: int) -> None:
        """An environment had to begin a new episode while it waited: its trajectory ends with its last stored step."""
        index = self._schedule.slice_of(env)
        step = int(self._schedule.step[index]) - 1
        if index in self.retry and env not in self.retry[index]:
            step += 1  # its own step is stored already; it waited for others of its slice
        self._truncate(env, step, self._envs.block.final_obs[env])

    def _truncate(self, env: int, step: int, final_obs: np.ndarray) -> None:
        """End the trajectory of `env` with this step of the rollout it is in.

        At step −1 there is nothing to truncate: the rollout before bootstraps from its last observation anyway.
        """
        index = self._schedule.slice_of(env)
        self._starts[env] = True
        if step < 0:
            self._restarted[self._schedule.rollout[index]].append(env)
        else:
            self._slots[self._schedule.slot(index)].staging.truncate(step, env, final_obs)
