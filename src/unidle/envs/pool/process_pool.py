"""Environments in worker processes that write into shared memory.

The environments of the block are divided into slices. Each worker owns a few slices and steps one while another waits
for its actions, so that neither workers nor policy are idle. Observations, rewards and actions never pass
through a pipe; a slice is handed over by setting a flag byte, and a doorbell if the other side sleeps.

When a worker dies at any point, or hangs and is killed, a new one replaces it. No partial state can survive, because

1. the trainer touches nothing of a worker before its process is gone and reaped, and starts the next one only after its
   slices, semaphores and messages are in order: two processes never own the same slice;
2. the flags of its slices hold the complete state. STEP: the step did not happen, however far it got, and its
   environments, partly written or not, are written again. DONE or DONE_WITH_FAULTS: the results were complete before
   the flag was set, so the step counts, but its episodes cannot continue: they are truncated. IDLE: no step was
   requested; its episodes are lost too, and `restarted` reports them;
3. if it died before ringing `ready`, the flags make up for it, because they are checked at least every POLL_SECONDS; an
   extra ring only causes an extra check. A post is one atomic addition, so `ready`, which other workers use too, stays
   consistent. Its own `go` is initialised again: it may hold posts, or count a waiter that no longer exists;
4. messages that it sent are read before its pipe is closed, and the next worker has a new pipe: a reply is never
   attributed to another worker. A message that it did not send, or sent in part, is dropped;
5. it holds no lock and no name: memory and pipe are descriptors, which the kernel closes with it.

Starting a worker takes as long as its imports, and the trainer waits for it; the other workers continue with the steps
they have.
"""

from __future__ import annotations

import contextlib
import math
import os
import sys
import time
from collections.abc import Iterable, Sequence
from itertools import count
from typing import Any

import cloudpickle
import numpy as np

from unidle.config.machine import available_cores
from unidle.envs.faults import Fault, FaultCounter
from unidle.envs.make import EnvMaker
from unidle.envs.open_episode import Difference, OpenEpisode
from unidle.envs.pool import worker_process as process
from unidle.envs.pool.dead_worker import pending_steps, release_slices
from unidle.envs.pool.shared import SharedPools
from unidle.envs.pool.signals import WakeUp
from unidle.envs.pool.worker import DONE, IDLE, SPIN_SECONDS, STEP, WorkerJob, WorkerSignals
from unidle.envs.pool.worker_cores import ROTATE_SECONDS
from unidle.envs.pool.worker_process import WorkerError, WorkerProcess
from unidle.envs.shared_block import SharedBlock, map_memory, shared_memory
from unidle.envs.spec import EnvSpec
from unidle.errors import UsageError

_CLOSING_SECONDS = 5.0  # for all workers together to exit; the rest are killed
_WAITING_CLOSING_SECONDS = 1.5  # the same for AsyncEnvs, which only wait for I/O
_STARTING_SECONDS = 120.0  # on top of `env_timeout`: a worker imports and creates its environments
_DIED = object()


class ProcessPool:
    """N environments on one shared block, divided among worker processes."""

    def __init__(
        self,
        maker: EnvMaker,
        env_spec: EnvSpec,
        n_envs: int,
        seed: int,
        workers: int,
        first_index: int = 0,
        slices: int = 1,
        *,
        env_timeout: float | None = None,
        max_env_restarts: int = 10,
        pin_cores: bool = False,
        shared: SharedPools | None = None,
    ) -> None:
        """Start `workers` processes with `slices` slices each, or fewer if there are not enough environments.

        A worker that spends more than `env_timeout` seconds on one slice, reset or replayed step is killed. `shared`:
        with other pools that this process serves in turns; then `pin_cores` is not used.
        """
        self.env_spec, self.n_envs = env_spec, n_envs
        try:
            pickled_envs = cloudpickle.dumps((maker, env_spec))
        except Exception as error:
            raise UsageError(
                f"The environment factory cannot be sent to worker processes ({error}); "
                "use an environment id or a module-level function, or --no-subproc."
            ) from None
        self.workers = min(workers, n_envs)
        self._is_async = maker.kind == "async"
        # Asynchronous environments only wait, so that many workers of them can share a core without these rules; and
        # vector environments may use several cores.
        roams = self._is_async or env_spec.vectorised
        self._shared_cores = None if shared is None or roams else shared.cores
        self._places = [] if self._shared_cores is None else self._shared_cores.take(self.workers)
        self.workers = len(self._places) or self.workers
        shares = split_envs(n_envs, self.workers, slices)
        self.bounds = [bounds for share in shares for bounds in share]
        self._owner = [worker for worker, share in enumerate(shares) for _ in share]  # of each slice
        self.faults: list[Fault] = []
        self.restarted: list[int] = []
        self._seed, self._first_index = seed, first_index
        self._timeout = math.inf if env_timeout is None else env_timeout
        # Trainer and workers have to share cores; other programs on these cores are not counted.
        in_all = self.workers * (1 if shared is None else shared.count)
        self.yields_core = in_all >= available_cores()
        self._fault_counter = FaultCounter(n_envs, first_index, max_env_restarts)
        self._fallback_obs: np.ndarray | None = None  # shown for an environment that could not be reset
        self._have_envs = False
        self._next_check = 0.0
        start = SharedBlock.nbytes(env_spec, n_envs)
        # Kept open for replacement workers.
        self._descriptor = shared_memory(start + WorkerSignals.nbytes(len(self.bounds), self.workers))
        memory = map_memory(self._descriptor)
        self.block = SharedBlock(env_spec, n_envs, memory)
        self._signals = WorkerSignals.over(memory, start, len(self.bounds), self.workers, initialise=True)
        if shared is not None:
            self._signals.ready = shared.ready
        self._processes: list[WorkerProcess] = []
        self._cores = _cores_for(self.workers) if pin_cores and shared is None else []
        self._next_rotation = 0.0 if self._cores or self._places else math.inf
        try:
            for number in range(self.workers):
                job = WorkerJob(
                    path=list(sys.path),
                    pickled_envs=pickled_envs,
                    memory=self._descriptor,
                    n_envs=n_envs,
                    bounds=self.bounds,
                    worker=number,
                    workers=self.workers,
                    slices=[one for one, owner in enumerate(self._owner) if owner == number],
                    seed=seed,
                    first_index=first_index,
                    yields_core=self.yields_core,
                    ready=None if shared is None else shared.ready.descriptor,
                )
                env_ids = job.env_ids
                self._processes.append(WorkerProcess(job, self.block.heartbeats[env_ids.start : env_ids.stop]))
                self._start(number)
            if shared is None:  # several pools start their workers side by side, and wait for them when they are used
                self._make_envs()
        except BaseException:
            self.close()
            raise

    # -- stepping ------------------------------------------------------------------------------------------------------

    def send(self, slices: Sequence[int]) -> None:
        """Step these slices with the actions in the block."""
        go, owner = self._signals.go, self._owner
        self._signals.flags[list(slices)] = STEP
        for number in slices:
            go[owner[number]].ring()

    def has_finished(self, at_least: int) -> bool:
        """Whether `recv` of so many slices would return at once, or has a fault or a check of the workers to handle."""
        seen = self._signals.flags.tobytes()
        return seen.count(DONE) >= at_least or max(seen) > DONE or time.monotonic() >= self._next_check

    def recv(self, at_least: int, seconds: float | None = None) -> list[int]:
        """Wait for `at_least` finished slices, or for that many seconds, and return the finished ones in order."""
        ready, flags = self._signals.ready, self._signals.flags

        def has_changed() -> bool:
            seen = flags.tobytes()
            return seen.count(DONE) >= at_least or max(seen) > DONE

        until = math.inf if seconds is None else time.monotonic() + seconds
        while True:
            now = self.maintain()
            seen = flags.tobytes()
            if max(seen) > DONE:
                self._read_faults()  # at once: the worker may be blocked until its message is read
            elif seen.count(DONE) >= at_least or now >= until:
                break
            else:
                left = max(0.0, min(until, self._next_check) - now)
                ready.wait(has_changed, left, SPIN_SECONDS, yields_core=self.yields_core)
        done = np.flatnonzero(flags == DONE)
        flags[done] = IDLE
        slices: list[int] = done.tolist()
        if not self._fault_counter.is_zero:
            for number in slices:
                self._fault_counter.reset_finished(self.block, slice(*self.bounds[number]))
        return slices

    def maintain(self) -> float:
        """Check and rotate the workers if that is due; returns the time of `time.monotonic`."""
        now = time.monotonic()
        if now >= self._next_check:
            self._check_workers()
            now = time.monotonic()  # it may have taken long: it replaces dead workers
            self._next_check = now + process.POLL_SECONDS
        if now >= self._next_rotation:
            self._rotate_cores(now)
            self._next_rotation = (math.floor(now / ROTATE_SECONDS) + 1) * ROTATE_SECONDS
        return now

    @property
    def flags(self) -> np.ndarray:
        """[slices] uint8, one per cache line: who owns each slice (see `WorkerSignals`)."""
        return self._signals.flags

    @property
    def ready(self) -> WakeUp:
        """How the workers wake the trainer."""
        return self._signals.ready.wake_up

    def wake_ups(self) -> list[WakeUp]:
        """[slices] how the trainer wakes the worker of each slice; also its replacements."""
        return [self._signals.go[owner].wake_up for owner in self._owner]

    @property
    def has_no_faults(self) -> bool:
        """Whether no environment has failed since its slice last stepped without a failure."""
        return self._fault_counter.is_zero and not self.faults and not self.restarted

    def _start(self, number: int) -> None:
        worker = self._processes[number]
        worker.start()
        if self._places:
            worker.move_to(self._core_at(number, time.monotonic()))
        elif self._cores:
            worker.move_to(self._cores[number])

    def _core_at(self, number: int, now: float) -> int:
        assert self._shared_cores is not None
        return self._shared_cores.core_of(self._places[number], now)

    def _rotate_cores(self, now: float) -> None:
        """Move each worker to the next core.

        Cores differ in speed (hyper-threads share one), and a rollout waits for the slowest worker; rotating keeps any
        worker from staying on a slow core.
        """
        if self._places:
            cores = [self._core_at(number, now) for number in range(self.workers)]
        else:
            cores = self._cores
            cores.append(cores.pop(0))
        for worker, core in zip(self._processes, cores):
            worker.move_to(core)

    def _read_faults(self) -> None:
        """Read the fault messages of finished slices; one worker's messages may arrive for another slice first."""
        flags = self._signals.flags
        for number in np.flatnonzero(flags > DONE):
            worker = self._owner[number]
            try:
                _, faults = self._processes[worker].receive(self._timeout)
            except WorkerError as error:
                if error.kind == "exception":
                    raise
                self._replace(worker, error)
                return
            flags[number] = DONE
            self._record(faults)

    def _record(self, faults: Iterable[Fault]) -> None:
        for fault in faults:
            self.faults.append(fault)
            self._fault_counter.add(fault)

    # -- dead workers --------------------------------------------------------------------------------------------------

    def _check_workers(self) -> None:
        flags = self._signals.flags
        for number, worker in enumerate(self._processes):
            own = worker.job.slices
            try:
                worker.check(STEP in flags[own[0] : own[-1] + 1].tobytes(), self._timeout)
            except WorkerError as error:
                self._replace(number, error)

    def _replace(self, number: int, error: WorkerError) -> None:
        """Replace a dead worker, repeatedly if the new one dies too, up to the fault limit."""
        worker = self._processes[number]
        env_ids = worker.job.env_ids
        kind, text = error.kind, f"{error}{pending_steps(worker.job, self.block, self._signals.flags)}"
        worker.stop()
        self._record(worker.drain_faults())
        for env_id in release_slices(worker.job, self.block, self._signals.flags):
            if env_id not in self.restarted:
                self.block.final_obs[env_id] = self.block.obs[env_id]
                self.restarted.append(env_id)
        for attempt in count(1):
            fault = Fault(self._first_index + env_ids[0], kind, text)
            self.faults.append(fault)
            self._fault_counter.add(fault, env_ids)
            try:
                faults = self._restart(number, attempt)
                break
            except WorkerError as next_error:
                kind, text = next_error.kind, f"{worker.name} could not be restarted: {next_error}"
                worker.stop()
        self._record(faults)

    def _restart(self, number: int, attempt: int) -> list[Fault]:
        """Start a worker and new episodes in it; return the faults that occurred meanwhile."""
        worker = self._processes[number]
        env_ids, timeout = worker.job.env_ids, self._timeout + _STARTING_SECONDS
        worker.close_pipe()
        self._signals.reset_worker(number)
        self._start(number)
        worker.receive(timeout)
        self._prepare(number, timeout)
        if self._fallback_obs is None:  # no episode was started yet
            self._send_command(number, "make", ())
            return worker.receive(timeout)[1]
        # Each attempt starts other episodes: the crash may depend on their seeds.
        self._send_command(
            number, "restart", (self.block.episode[env_ids.start : env_ids.stop] + attempt, self._fallback_obs)
        )
        return worker.receive(timeout)[1]

    def _prepare(self, number: int, timeout: float) -> None:
        """What a replaced worker does before it starts episodes."""

    # -- commands ------------------------------------------------------------------------------------------------------

    def _make_envs(self) -> None:
        """Create the environments in the workers, once these run; without effect if that was done."""
        if not self._have_envs:
            self._have_envs = True
            timeout = self._timeout + _STARTING_SECONDS
            self._receive_all(timeout)
            self._call_all("make", [()] * self.workers, timeout)

    def start(self, episodes: np.ndarray) -> None:
        """Start the given episode in each environment."""
        self._make_envs()
        spans = [job.env_ids for job in self._jobs()]
        parts = [(episodes[env_ids.start : env_ids.stop],) for env_ids in spans]
        self._repeat_all("start", parts)
        self._fallback_obs = self.block.obs[0].copy()

    def states(self) -> list[dict[str, Any] | None]:
        """Return what a checkpoint holds of each environment (see `EnvSlot.state`); None for those just restarted."""
        parts = self._call_all("states", [()] * self.workers, self._timeout)
        return [
            None if part is _DIED else part[index]
            for part, job in zip(parts, self._jobs())
            for index in range(len(job.env_ids))
        ]

    def take_episode_record(self) -> dict[str, Any] | None:
        """See `AsyncSlots.take_episode_record`."""
        record = (
            self._call_all("take_episode_record", [()] * self.workers, self._timeout)[0] if self._is_async else None
        )
        return record if isinstance(record, dict) else None  # its worker may have died

    def resume(self, points: Sequence[OpenEpisode]) -> list[Difference | None]:
        """Restore each open episode (see `EnvSlot.resume`)."""
        self._make_envs()
        parts = [(points[job.env_ids.start : job.env_ids.stop],) for job in self._jobs()]
        answers = self._repeat_all("resume", parts)
        self._fallback_obs = self.block.obs[0].copy()
        return [part[index] for part, job in zip(answers, self._jobs()) for index in range(len(job.env_ids))]

    def _jobs(self) -> list[WorkerJob]:
        return [worker.job for worker in self._processes]

    def _call_all(self, name: str, arguments: list[tuple[Any, ...]], timeout: float) -> list[Any]:
        if self._signals.flags.any():
            raise RuntimeError(f"{name} was called while slices are in flight")
        for number, argument in enumerate(arguments):
            with contextlib.suppress(WorkerError):  # detected again when its reply is due
                self._send_command(number, name, argument)
        return self._receive_all(timeout)

    def _repeat_all(self, name: str, arguments: list[tuple[Any, ...]]) -> list[Any]:
        """`_call_all`, repeated in each worker that replaced a dead one."""
        values = self._call_all(name, arguments, self._timeout)
        for number, argument in enumerate(arguments):
            while values[number] is _DIED:
                with contextlib.suppress(WorkerError):  # detected again when its reply is due
                    self._send_command(number, name, argument)
                values[number] = self._receive(number, self._timeout)
        self.restarted.clear()
        return values

    def _send_command(self, number: int, name: str, arguments: tuple[Any, ...]) -> None:
        # Announced first: a long message blocks until the worker reads it, and the worker takes a readable pipe without
        # an announcement for the exit of the trainer.
        self._signals.commands[number] = 1
        self._signals.go[number].ring()
        self._processes[number].send((name, arguments))

    def _receive_all(self, timeout: float) -> list[Any]:
        """Return the reply of each worker; _DIED for one that died and was replaced."""
        return [self._receive(number, timeout) for number in range(self.workers)]

    def _receive(self, number: int, timeout: float) -> Any:
        try:
            value, faults = self._processes[number].receive(timeout)
        except WorkerError as error:
            # A worker that hangs before anything was stepped probably always does.
            if error.kind == "exception" or (error.kind == "hung" and self._fallback_obs is None):
                raise
            self._replace(number, error)
            return _DIED
        self._record(faults)
        return value

    def close(self) -> None:
        """Close the workers' pipes and wait for them to exit."""
        for worker in self._processes:
            worker.close_pipe()
        self._signals.commands[:] = 1  # they find no message but a closed pipe, and exit
        for go in self._signals.go:
            go.ring()
        until = time.monotonic() + (_WAITING_CLOSING_SECONDS if self._is_async else _CLOSING_SECONDS)
        try:
            for worker in self._processes:
                worker.stop(max(0.0, until - time.monotonic()))
        finally:
            self._processes, self._signals.go = [], []
            if self._shared_cores is not None and self._places:
                self._shared_cores.give_back(self._places)
                self._places = []
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def split_envs(n_envs: int, workers: int, slices: int) -> list[list[tuple[int, int]]]:
    """Divide env ids evenly into the slices (first, end) of each worker: the one with most environments is slowest."""
    shares = np.array_split(np.arange(n_envs), workers)
    cut = [np.array_split(share, min(slices, len(share))) for share in shares]
    return [[(int(part[0]), int(part[-1]) + 1) for part in share] for share in cut]


def _cores_for(workers: int) -> list[int]:
    """Choose a core per worker; the first core is left to the trainer if there are enough."""
    cores = sorted(os.sched_getaffinity(0))
    return [cores[(number + 1) % len(cores)] for number in range(workers)]
