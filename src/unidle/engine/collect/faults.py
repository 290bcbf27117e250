"""Keeps collected trajectories valid when environments fail.

A step that failed does not count. The environment is restarted, its trajectory ends (truncated) with the step before,
and the step is taken again from the first observation of a new episode. The rest of the slice waits for it.
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
    """Stores the steps of slices with failed environments, and reports the faults."""

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
        """The collector's `starts` [N] (whether the observation begins an episode) and recurrent `states` [N, S]."""
        self._envs, self._schedule, self._slots = envs, schedule, slots
        self._starts, self._states, self._stream, self.on_fault = starts, states, stream, on_fault
        self.first_env = 0  # the index in the job of environment 0 of this process
        self.retry: dict[int, np.ndarray] = {}  # slice → env indices that must repeat their step
        self._counts: defaultdict[int, Counter[str]] = defaultdict(Counter)  # rollout → faults by kind
        # Rollout → environments that begin it with a new episode because of a fault.
        self._restarted: defaultdict[int, list[int]] = defaultdict(list)

    @property
    def pending(self) -> bool:
        """Whether slices that were just received must go through `receive` instead of the fast path."""
        return bool(self._envs.faults or self._envs.restarted or self.retry)

    def receive(self, slices: Sequence[int]) -> list[int]:
        """Store the steps that did not fail; returns the slices in which every environment has now stepped.

        The other slices wait for new actions for the environments that failed.
        """
        block, envs, schedule = self._envs.block, self._envs, self._schedule
        self.report()
        for env in envs.restarted:
            self._end_restarted(env)
        envs.restarted.clear()
        stepped = []
        for index in slices:
            slot, step = self._slots[schedule.slot(index)], schedule.step[index]
            every_env = np.arange(*envs.bounds[index])
            waited_for = self.retry.pop(index, every_env)
            block.skip[every_env] = False
            failed = block.retry[waited_for]
            if not failed.all():
                done = waited_for[~failed]
                slot.staging.store(block, (np.full(len(done), step), done), self._recurrent_starts)
            if failed.any():
                for env in waited_for[failed]:
                    self._end_failed(slot, step, env)
                self.retry[index] = waited_for[failed]
                block.skip[every_env] = True
                block.skip[waited_for[failed]] = False
                schedule.waiting.append(index)
            else:
                stepped.append(index)
        return stepped

    def report(self) -> None:
        """Count the faults of the environments and pass them to `on_fault`."""
        for fault in self._envs.faults:
            rollout = self._rollout_of(fault)
            self._counts[rollout][fault.kind] += 1
            self.on_fault(fault, rollout)
        self._envs.faults.clear()

    def take_counts(self, rollout: int) -> Counter[str]:
        """Faults by kind of a complete rollout."""
        return self._counts.pop(rollout, Counter())

    def take_restarted(self, rollout: int) -> list[int]:
        """Environments that begin this rollout with a new episode because of a fault."""
        return self._restarted.pop(rollout, [])

    @property
    def _recurrent_starts(self) -> np.ndarray | None:
        return self._starts if self._states.shape[1] else None

    def _rollout_of(self, fault: Fault) -> int:
        """The rollout that a fault counts towards.

        For an exception that is the rollout of its environment, so that timing does not decide.
        """
        schedule = self._schedule
        if fault.kind != "exception":
            return schedule.oldest
        index = schedule.rollout[schedule.slice_of(fault.env - self.first_env)]
        return int(min(index, schedule.newest, schedule.n_rollouts - 1))  # one that is open

    def _end_failed(self, slot: RolloutSlot, step: int, env: int) -> None:
        """End the trajectory of `env`, whose step failed, with the step before."""
        rollout = slot.rollout
        if self._stream is not None:
            self._stream.synchronize()  # this is rare, so a wait is fine
        self._truncate(env, step - 1, rollout.obs[step, env].cpu().numpy())
        if self._states.shape[1]:
            with torch.cuda.stream(self._stream):
                self._states[env] = rollout.states[step, env]

    def _end_restarted(self, env: int) -> None:
        """End the trajectory of `env`, which was restarted while it waited, with its last step."""
        index = self._schedule.slice_of(env)
        step = self._schedule.step[index] - 1
        if index in self.retry and env not in self.retry[index]:
            step += 1  # its step is stored already: it waited for other environments of its slice
        self._truncate(env, step, self._envs.block.final_obs[env])

    def _truncate(self, env: int, step: int, final_obs: np.ndarray) -> None:
        """End the trajectory of `env` with step `step` of its rollout.

        At step −1 there is nothing to truncate: the previous rollout bootstraps from its last observation anyway.
        """
        index = self._schedule.slice_of(env)
        self._starts[env] = True
        if step < 0:
            self._restarted[self._schedule.rollout[index]].append(env)
        else:
            self._slots[self._schedule.slot(index)].staging.truncate(step, env, final_obs)
