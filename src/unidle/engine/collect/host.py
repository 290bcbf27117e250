"""Fills rollouts from environments on the host, acting for whichever slices of them are ready first.

Which slice may act in which rollout, with which weights, and why timing changes no result: engine/overlap.py.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch

from unidle.algos.capturing import Capturer, no_capture
from unidle.algos.registry import AnyPolicy
from unidle.algos.run_to_end import run_to_end
from unidle.buffers.rollout import Rollout
from unidle.engine.collect.boundary import Boundary
from unidle.engine.collect.episode_stats import EpisodeStats, FinishedEpisodes
from unidle.engine.collect.faults import FaultHandler
from unidle.engine.collect.inference import PageLock, StepEnvIndex
from unidle.engine.collect.rollout_slot import RolloutSlot
from unidle.engine.collect.step_loop import Launcher, StepLoop, Steps, loop_unsupported, runs_in_python
from unidle.engine.evaluate.play import Stopped
from unidle.engine.on_stream import OnStream
from unidle.engine.overlap import SliceSchedule
from unidle.engine.sharing import Sharing
from unidle.engine.turns import Turns
from unidle.envs.open_episode import Difference
from unidle.envs.pool.process_pool import ProcessPool
from unidle.envs.protocol import Fault, HostEnvs, StatisticsHolder
from unidle.errors import TrainingError, UsageError
from unidle.timeline import ENVIRONMENT, INFERENCE, STORAGE, Timeline, never

_LOOP_SECONDS = 0.02  # after this the loop in C lets signals and checks of the workers have their turn
_STALL_SECONDS = 0.002  # after this, act for the ready slices, however few, so that slow ones do not delay others
QUICK_SECONDS = 600e-6  # per step of a slice: four times what inference of a small network takes on a CPU


class HostCollector:
    """Collects rollout after rollout: acts in the environments and stores the results."""

    def __init__(
        self,
        envs: HostEnvs,
        policy: AnyPolicy,
        rollouts: Sequence[Rollout],
        seed: int,
        timeline: Timeline,
        capture: Capturer = no_capture,
        on_fault: Callable[[Fault, int], None] = lambda fault, rollout: None,
        sharing: Sharing | None = None,
    ) -> None:
        """One slot per rollout; with more than one, each acts with a copy of `policy`.

        `on_fault` is called with each fault and the index of the rollout it counts towards. `sharing`: with other
        runs in this process. The learner's stream is the current one.
        """
        self.envs, self.policy = envs, policy
        self._seed, self._timeline = seed, timeline
        self._device = rollouts[0].obs.device
        steps, n_envs = rollouts[0].shape
        on_gpu = self._device.type == "cuda"
        # Inference has priority over learning on the GPU: environments wait for it.
        self._learner_stream = torch.cuda.current_stream(self._device) if on_gpu else None
        own = torch.cuda.Stream(self._device, priority=-1) if on_gpu and sharing is None else None
        self._stream = own if sharing is None else sharing.next_stream()
        at_once = 1 if sharing is None else max(1, len(sharing.inference))
        self._on_stream = OnStream(self._stream)
        self._page_lock = PageLock(envs.block) if on_gpu else None
        self._state = torch.zeros(n_envs, policy.state_size, device=self._device)
        with self._on_stream:
            self._wait_for_learner()
            self._slots = [
                RolloutSlot(
                    policy, rollout, envs.block, self._state, capture, own_weights=len(rollouts) > 1, at_once=at_once
                )
                for rollout in rollouts
            ]
        self.schedule = SliceSchedule(envs.bounds, steps, len(rollouts))
        # Whether the observation in the block is the first of its episode; kept up to date for recurrent policies only.
        self._starts = np.ones(n_envs, np.bool_)
        self._recurrent_starts = self._starts if policy.state_size else None
        self.faults = FaultHandler(envs, self.schedule, self._slots, self._starts, self._state, self._stream, on_fault)
        self._min_ready = _min_ready(envs, on_gpu=on_gpu)
        # The loop in C, once each slot's inference was captured; or the reason why there is none.
        self._loop: StepLoop | str | None = loop_unsupported(envs, policy, capture, on_gpu=on_gpu)
        self._is_alone = sharing is None
        self._capture = capture
        self._completed = 0  # rollouts of this process
        self._sent_ns = 0  # when actions were last sent in Python
        self._indices = [np.arange(first, end) for first, end in envs.bounds]  # [slice] its env indices
        self._latest: tuple[list[int], np.ndarray] = [], np.zeros(0, np.int64)  # slices, and their env indices
        self._pending: list[tuple[RolloutSlot, StepEnvIndex]] = []  # steps whose outcomes are in the block only
        self._in_flight = 0
        self._has_failed = False  # the environments cannot continue
        self.is_cancelled = False  # the current rollout was cancelled
        self.boundary = Boundary(envs, rollouts[0].actions.shape[2], self._starts, self._state)
        self._statistics_of = envs if isinstance(envs, StatisticsHolder) else None
        self._env_statistics: dict[str, Any] | None = None  # at the boundary; None before the start
        self.stats = EpisodeStats(envs.env_spec.log_info)
        self.latest_episodes: FinishedEpisodes = [], [], [], []  # of the latest finished rollout

    def close(self) -> None:
        """Close all environments."""
        self._timeline.is_acting_in_c = never  # which holds the loop, and with it the rollouts
        try:
            if self._page_lock is not None:
                torch.cuda.synchronize(self._device)  # nothing may still read from the block
                self._page_lock.close()
        finally:
            self.envs.close()

    def start(self, episode: int = 0) -> None:
        """Begin this episode everywhere, and open a rollout in every slot."""
        self.envs.start(np.full(self.envs.n_envs, episode, np.int64))
        self.boundary.set_to_current()
        self._env_statistics = self._current_statistics()
        for _ in self._slots:
            self.open_rollout()

    def take_part(self, rank: int, ranks: int) -> None:
        """Act as `rank` of `ranks`, whose environments have the noise that they would have in one process."""
        self.faults.first_env = rank * self.envs.n_envs
        for slot in self._slots:
            slot.inference.noise.take_part(rank, ranks)

    # -- rollouts ------------------------------------------------------------------------------------------------------

    @property
    def n_slots(self) -> int:
        """How many rollouts may be open at once."""
        return len(self._slots)

    def open_rollout(self) -> None:
        """Publish the policy's current weights and let the next rollout begin."""
        index = self.schedule.newest + 1
        with self._on_stream:
            self._wait_for_learner()
            self._slot(index).open(len(self.envs.bounds), self._seed, index)
        self.schedule.open_next()

    def poll(self, seconds: float | None = None) -> bool:
        """`poll_in_turns`, without giving others a turn."""
        return run_to_end(self.poll_in_turns(seconds))

    def poll_in_turns(self, seconds: float | None = None) -> Turns[bool]:
        """Act for slices that wait, and receive those ready within `seconds`; False if no environment can continue.

        None: there is nothing else to do.
        """
        loop_seconds = _LOOP_SECONDS if seconds is None else seconds
        seconds = _STALL_SECONDS if seconds is None else seconds
        timeline, schedule = self._timeline, self.schedule
        if schedule.waiting:
            timeline.enter(INFERENCE)
            yield from self._act(schedule.take_waiting())
            if schedule.waiting:
                seconds = 0.0
        else:
            timeline.enter(STORAGE)
            self._flush()
        if not self._in_flight:
            return False
        timeline.enter(ENVIRONMENT)
        if (loop := self._usable_loop()) is not None:
            if not (yield from self._loop_steps(loop, loop_seconds)):
                return True
            seconds = 0.0
        at_least, until = min(self._min_ready, self._in_flight), time.monotonic() + seconds
        yield lambda: self.envs.has_finished(at_least) or time.monotonic() >= until
        stepped = self._receive_from_envs(at_least, max(0.0, until - time.monotonic()))
        timeline.enter(STORAGE)
        self._store(stepped)
        return True

    def _usable_loop(self) -> StepLoop | None:
        """The loop in C, if it may step now."""
        if isinstance(self._loop, str):
            return None
        envs = self.envs
        assert isinstance(envs, ProcessPool)
        with self._noting_failures():
            envs.maintain()
        if self.schedule.waiting or self.faults.retry or not envs.has_no_faults:
            return None
        return self._loop

    def _new_loop(self) -> StepLoop | str:
        graphs = [slot.inference.graph for slot in self._slots]
        if None in graphs:
            return "inference was not captured as a CUDA graph"  # of which a message has said why
        assert self._stream is not None
        assert isinstance(self.envs, ProcessPool)
        try:
            launcher = Launcher.cuda(self._stream)
        except (OSError, AttributeError) as error:  # another platform's GPU
            runs_in_python(self._capture, str(error))
            return str(error)
        loop = StepLoop(self.envs, self.schedule, self._slots, graphs, launcher, self._min_ready, _STALL_SECONDS)
        self._timeline.is_acting_in_c = lambda: loop.is_acting
        return loop

    def _loop_steps(self, loop: StepLoop, seconds: float) -> Turns[bool]:
        """Let the loop step for about so long; returns whether the next step needs Python."""
        self._flush()
        loop.begin(self._sent_ns, records=self._timeline.is_recording)
        if self._is_alone:
            loop.run(seconds)
        else:
            yield Steps(loop, time.monotonic() + seconds)
            if not loop.needs_python:  # it may not have been looked at yet
                loop.run(0.0)
        needs_python, times = loop.needs_python, loop.end()
        self._timeline.add_inference(times.inference_ns, times.intervals, self._slots[0].inference.device_ns)
        return needs_python

    def _receive_from_envs(self, at_least: int, seconds: float | None) -> list[int]:
        with self._noting_failures():
            return self.envs.recv(at_least, seconds)

    @contextlib.contextmanager
    def _noting_failures(self) -> Iterator[None]:
        try:
            yield
        except (TrainingError, UsageError):
            self._has_failed = True
            self.faults.report()  # including the fault that exceeded the limit
            raise

    def _store(self, stepped: list[int]) -> None:
        """Store the outcomes of received slices, and move on those in which every environment has stepped."""
        self._in_flight -= len(stepped)
        if self.faults.pending:
            self._flush()
            stepped = self.faults.receive(stepped)
        else:
            self._receive(stepped)
        self._advance(stepped)

    def finish(self) -> RolloutSlot:
        """`finish_in_turns`, without giving others a turn."""
        return run_to_end(self.finish_in_turns())

    def finish_in_turns(self) -> Turns[RolloutSlot]:
        """Collect until the oldest open rollout is complete; returns its slot, ready to learn from."""
        yield from self.fill_in_turns()
        slot = self._slot(self.schedule.oldest)
        self._complete(slot)
        return slot

    def fill_in_turns(self) -> Turns[None]:
        """Collect until every slice has finished the oldest open rollout; a checkpoint still stores its beginning.

        Raises Stopped if cancelled before.
        """
        slot = self._slot(self.schedule.oldest)
        while slot.unfinished:
            if self.is_cancelled:
                raise Stopped
            yield from self.poll_in_turns()

    def metrics(self) -> dict[str, float]:
        """Statistics of the episodes, faults and requests so far."""
        requests = {f"requests/{kind}": count for kind, count in self.envs.block.request_counts().items()}
        return self.stats.metrics() | requests

    def read_episode_stats(self) -> None:
        """Do nothing: on the host, statistics are always up to date."""

    def _slot(self, rollout: int) -> RolloutSlot:
        return self._slots[rollout % len(self._slots)]

    def _wait_for_learner(self) -> None:
        """Let the collector's stream continue after what is queued on the learner's."""
        if self._stream is not None:
            assert self._learner_stream is not None
            self._stream.wait_stream(self._learner_stream)

    # -- one step of some slices ---------------------------------------------------------------------------------------

    def _where(self, slices: list[int]) -> StepEnvIndex:
        """[step, env] of each slice's current observation."""
        step, retry = self.schedule.step, self.faults.retry
        if not retry:  # basic slices where possible: faster than gather and scatter
            first = step[slices[0]]
            if len(slices) == 1:
                return first, slice(*self.envs.bounds[slices[0]])
            if len(slices) == len(self._indices) and step.count(first) == len(step):
                return first, slice(0, self.envs.n_envs)
            if slices != self._latest[0]:  # usually the slices that were just received
                self._latest = slices, np.concatenate([self._indices[index] for index in slices])
            envs = self._latest[1]
        else:
            envs = np.concatenate([retry.get(index, self._indices[index]) for index in slices])
        return np.array(step)[self.schedule.slices[envs]], envs

    def _act(self, slices: list[int]) -> Turns[None]:
        """Infer and send actions for these slices, which are in the same rollout; store outcomes meanwhile."""
        where, timeline = self._where(slices), self._timeline
        slot = self._slots[self.schedule.slot(slices[0])]
        if self.policy.state_size:
            self._flush()  # inference needs to know which environments begin an episode
        with self._on_stream:
            slot.inference.launch(where, self._recurrent_starts)
        timeline.enter(STORAGE)
        self._flush()
        timeline.enter(INFERENCE)
        yield slot.inference.is_done
        slot.inference.wait(where)
        if self._stream is not None:
            timeline.add_device_work(INFERENCE, slot.inference.device_ns)
        self.envs.send(slices)
        self._sent_ns = time.perf_counter_ns()
        self._in_flight += len(slices)
        slot.staging.actions[where] = self.envs.block.actions[where[1]]  # environments only read their actions

    def _receive(self, slices: list[int]) -> None:
        """Mark these slices' outcomes as still to be stored."""
        for rollout, group in self.schedule.by_rollout(slices):
            self._pending.append((self._slot(rollout), self._where(group)))

    def _flush(self) -> None:
        """Store received outcomes, before their slices are sent again or environments are asked for their states."""
        for slot, where in self._pending:
            slot.staging.store(self.envs.block, where, self._recurrent_starts)
        self._pending.clear()

    def _advance(self, slices: list[int]) -> None:
        """Move slices that have stepped on to their next step, or their next rollout."""
        for index in self.schedule.take_step(slices):
            self._finish_slice(index)
        self.schedule.enqueue(slices)

    def _finish_slice(self, index: int) -> None:
        slot, envs = self._slots[self.schedule.slot(index)], slice(*self.envs.bounds[index])
        slot.staging.store_last(self.envs.block, envs)
        if self.policy.state_size:
            with self._on_stream:
                slot.last_states[envs] = self._state[envs]
        if self._statistics_of is not None:  # now: later, they depend on how far the next rollout is
            self._flush()  # if the worker is found dead, the rows of its environments are overwritten
            slot.env_statistics = self._current_statistics()
        slot.unfinished -= 1
        self.schedule.enter_next_rollout(index)

    def _complete(self, slot: RolloutSlot) -> None:
        """Upload a rollout that every slice has finished, and move the boundary to its end."""
        self._flush()
        staging, rollout, index = slot.staging, slot.rollout, self.schedule.oldest
        if self._stream is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)
        starts = self.boundary.starts.copy()
        starts[self.faults.take_restarted(index)] = True
        staging.upload(rollout, starts)
        rollout.states[-1].copy_(slot.last_states)
        self.boundary.advance(staging, rollout.states[-1])
        self._env_statistics = slot.env_statistics
        self.latest_episodes = staging.finished_episodes()
        self.stats.add(*self.latest_episodes)
        self.stats.faults.update(self.faults.take_counts(index))
        self.schedule.oldest += 1
        self._completed += 1
        if self._loop is None and self._completed == len(self._slots):  # each slot has inferred
            self._loop = self._new_loop()

    # -- checkpoints ---------------------------------------------------------------------------------------------------

    def env_statistics(self) -> dict[str, Any]:
        """The running means that wrappers around the environments normalised with at the end of the last rollout."""
        return self._current_statistics() if self._env_statistics is None else self._env_statistics

    def _current_statistics(self) -> dict[str, Any]:
        return {} if self._statistics_of is None else self._statistics_of.statistics()

    def load_env_statistics(self, state: dict[str, Any]) -> None:
        """Continue from `env_statistics`; before `load_state_dict`, which resets environments."""
        if self._statistics_of is not None:
            self._statistics_of.load_statistics(state)

    def state_dict(self) -> dict[str, Any]:
        """Where each environment stood at the end of the last finished rollout, and the weights of open rollouts."""
        self._flush()  # first: if a worker is found dead, the rows of its environments are overwritten
        env_states, schedule = self._env_states(), self.schedule
        return {
            "number": schedule.oldest,
            **self.boundary.state_dict(env_states),
            # Of every open rollout but the newest, which is collected with the learner's current weights.
            "weights": [self._slot(index).policy.state_dict() for index in range(schedule.oldest, schedule.newest)],
            **self.stats.state_dict(),
        }

    def _env_states(self) -> list[dict[str, Any] | None]:
        is_needed = bool(self.envs.env_spec.stateful_wrappers) and not self._has_failed
        while is_needed and self._in_flight:  # environments can only be asked between steps
            self._store(self._receive_from_envs(self._in_flight, None))
            self._flush()
        is_at_boundary = self.schedule.is_at_boundary() and not self.faults.retry
        states: list[dict[str, Any] | None] = [None] * self.envs.n_envs
        if is_at_boundary or is_needed:
            states = self.envs.states()
            self.faults.receive([])  # `states` may have found a dead worker
        return self.boundary.states_to_save(states, is_current=is_at_boundary)

    def load_state_dict(self, state: dict[str, Any]) -> dict[int, Difference]:
        """Restore every environment's state; returns those that differ from before.

        The policy's weights must be restored before.
        """
        differences = self.boundary.load_state_dict(state)
        self._env_statistics = self._current_statistics()
        self.stats.load_state_dict(state)
        self.schedule.restart_at(state["number"])
        for _ in self._slots:
            self.open_rollout()
        for index, weights in enumerate(state["weights"], state["number"]):
            with self._on_stream:
                self._slot(index).load(weights)
        return differences


def _min_ready(envs: HostEnvs, *, on_gpu: bool) -> int:
    """How many slices must be ready before acting for them.

    A quarter, so that the others are stepped during inference. On a CPU with quick environments all, because one
    inference takes as long as many of their steps, and as long for a few environments as for all.
    """
    slices = len(envs.bounds)
    seconds = envs.env_spec.step_seconds * envs.n_envs / slices
    return slices if not on_gpu and seconds < QUICK_SECONDS else max(1, slices // 4)
