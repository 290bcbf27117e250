"""Environments in worker processes that write into shared memory.

The lines of the block are cut into slices; each worker owns a few and steps one while another waits for its actions, so
that neither the workers nor whoever serves them stands still. Observations, rewards and actions never pass through a
pipe; a hand-over is a byte, and a bell if the other side sleeps.

When a worker dies, at whatever point, or hangs and is killed, another takes its place. Nothing of it can be left half
done that matters, because

1. the trainer touches nothing of a worker before that process is gone and reaped, and the next one is started only
   after its slices, posts and messages were put in order: so never do two processes own a slice;
2. its slices' flags say all there is to know. STEP: the step did not happen, however far it got, and its lines, half
   written or not, are written anew. DONE or TOLD: the lines were whole before the flag was set, so the step counts, but
   its episodes cannot go on: they are cut off. IDLE: nothing was asked of it; its episodes are lost all the same, and
   `renewed` says so;
3. a ring of `ready` that it did not make any more is made up for by the flags, which are looked at at least every
   LOOK_AROUND_SECONDS; one too many only causes a look. A post is one atomic addition, so `ready`, which the others use
   too, is whole. Its own `go` is made anew: it may hold posts, or count a waiter who is gone;
4. messages that it sent are read before its pipe is closed, and the next worker has a pipe of its own: an answer is
   never taken for another's. A message that it did not send any more, or half, is given up;
5. it holds no lock and no name: memory and pipe are descriptors, gone with it.

Starting a worker takes as long as its imports do, and the trainer waits for it; the other workers go on with what they
have.
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
from unidle.envs.block import Block, map_memory, shared_memory
from unidle.envs.faults import Fault, FaultTally
from unidle.envs.make import EnvMaker
from unidle.envs.pool import worker_process as process
from unidle.envs.pool.slot import episode_seed
from unidle.envs.pool.worker import DONE, FAILED, IDLE, SPIN_SECONDS, STEP, TOLD, Job, Switchboard
from unidle.envs.pool.worker_process import WorkerError, WorkerProcess
from unidle.envs.spec import EnvSpec
from unidle.errors import UsageError

_CLOSING_SECONDS = 5.0  # that all workers together have to end by themselves
_WAITING_CLOSING_SECONDS = 1.5  # the same, if all that they do is to wait for others
_STARTING_SECONDS = 120.0  # that a worker may need, beside `env_timeout`, to import and to make one environment
_DEAL_SECONDS = 0.02  # between two deals of the cores
_LOST = object()
_NAMED = 8  # environments that the message about a dead worker names at most


class ProcessPool:
    """N environments behind one block, shared out among worker processes."""

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
    ) -> None:
        """`workers` processes of `slices` slices each, as far as there are environments for them.

        A worker that is at one slice, one reset or one replayed step for more than `env_timeout` seconds is killed.
        """
        self.env_spec, self.n_envs = env_spec, n_envs
        self.workers = min(workers, n_envs)
        shares = share_out(n_envs, self.workers, slices)
        self.bounds = [bounds for share in shares for bounds in share]
        self._owner = [worker for worker, share in enumerate(shares) for _ in share]  # of each slice
        self.faults: list[Fault] = []
        self.renewed: list[int] = []
        self._seed, self._first_index = seed, first_index
        self._patience = math.inf if env_timeout is None else env_timeout
        self._waits_for_others = maker.makes == "async"
        # Trainer and workers do not have a core each; programs of others on these cores are not counted.
        self.gives_way = self.workers >= available_cores()
        self._tally = FaultTally(n_envs, first_index, max_env_restarts)
        self._spare: np.ndarray | None = None  # an observation to show where there is no environment
        self._next_look = 0.0
        try:
            cargo = cloudpickle.dumps((maker, env_spec))
        except Exception as error:
            raise UsageError(
                f"The environment factory cannot be sent to worker processes ({error}); "
                "give an id or a module-level function, or use --no-subproc."
            ) from None
        start = Block.nbytes(env_spec, n_envs)
        # Kept open for workers that are started later.
        self._descriptor = shared_memory(start + Switchboard.nbytes(len(self.bounds), self.workers))
        memory = map_memory(self._descriptor)
        self.block = Block(env_spec, n_envs, memory)
        self._board = Switchboard.over(memory, start, len(self.bounds), self.workers, initialise=True)
        self._processes: list[WorkerProcess] = []
        self._cores = _cores_for(self.workers) if pin_cores else []
        self._next_deal = 0.0 if pin_cores else math.inf
        try:
            for number in range(self.workers):
                job = Job(
                    path=list(sys.path),
                    cargo=cargo,
                    memory=self._descriptor,
                    n_envs=n_envs,
                    bounds=self.bounds,
                    worker=number,
                    workers=self.workers,
                    slices=[one for one, owner in enumerate(self._owner) if owner == number],
                    seed=seed,
                    first_index=first_index,
                    gives_way=self.gives_way,
                )
                lines = job.lines
                self._processes.append(WorkerProcess(job, self.block.beats[lines.start : lines.stop]))
                self._processes[-1].start()
            self._answers(self._patience + _STARTING_SECONDS)
            self._ask("make", [()] * self.workers, self._patience + _STARTING_SECONDS)
        except BaseException:
            self.close()
            raise

    # -- stepping ------------------------------------------------------------------------------------------------------

    def send(self, slices: Sequence[int]) -> None:
        """Set these slices going on the actions in the block."""
        go, owner = self._board.go, self._owner
        self._board.flags[list(slices)] = STEP
        for number in slices:
            go[owner[number]].ring()

    def recv(self, at_least: int, seconds: float | None = None) -> list[int]:
        """The slices that have been stepped, in order; waits until there are `at_least` of them, or so many seconds."""
        ready, flags = self._board.ready, self._board.flags

        def has_changed() -> bool:
            seen = flags.tobytes()
            return seen.count(DONE) >= at_least or max(seen) > DONE

        until = math.inf if seconds is None else time.monotonic() + seconds
        while True:
            now = time.monotonic()
            if now >= self._next_look:
                self._look_around()
                now = time.monotonic()  # it may have started a worker
                self._next_look = now + process.LOOK_AROUND_SECONDS
            if now >= self._next_deal:
                self._deal_cores()
                self._next_deal = now + _DEAL_SECONDS
            seen = flags.tobytes()
            if max(seen) > DONE:
                self._hear()  # at once, not when there are enough: the worker may be waiting to be heard
            elif seen.count(DONE) >= at_least or now >= until:
                break
            else:
                left = max(0.0, min(until, self._next_look) - now)
                ready.wait(has_changed, left, SPIN_SECONDS, gives_way=self.gives_way)
        done = np.flatnonzero(flags == DONE)
        flags[done] = IDLE
        slices: list[int] = done.tolist()
        if not self._tally.is_clean:
            for number in slices:
                self._tally.forgive(self.block, slice(*self.bounds[number]))
        return slices

    def _deal_cores(self) -> None:
        """Give each worker a core, another one each time.

        Cores differ in speed (some share theirs with another thread), and a rollout waits for the slowest worker; so
        none stays on a slow one.
        """
        self._cores.append(self._cores.pop(0))
        for worker, core in zip(self._processes, self._cores):
            worker.move_to(core)

    def _hear(self) -> None:
        """Read what is told of slices that were stepped; messages come in order, so it may be told of another first."""
        flags = self._board.flags
        for number in np.flatnonzero(flags > DONE):
            worker = self._owner[number]
            try:
                _, faults = self._processes[worker].answer(self._patience)
            except WorkerError as gone:
                if gone.kind == "exception":
                    raise
                self._replace(worker, gone)
                return
            flags[number] = DONE
            self._note(faults)

    def _note(self, faults: Iterable[Fault]) -> None:
        for fault in faults:
            self.faults.append(fault)
            self._tally.add(fault)

    # -- workers that die ----------------------------------------------------------------------------------------------

    def _look_around(self) -> None:
        flags = self._board.flags
        for number, worker in enumerate(self._processes):
            own = worker.job.slices
            try:
                worker.check(STEP in flags[own[0] : own[-1] + 1].tobytes(), self._patience)
            except WorkerError as gone:
                self._replace(number, gone)

    def _replace(self, number: int, gone: WorkerError) -> None:
        """Put a new worker in the place of one that died; as often as it takes, and may be taken."""
        worker = self._processes[number]
        lines = worker.job.lines
        kind, text = gone.kind, f"{gone}{self._in_hand(worker.job)}"
        worker.end()
        self._note(worker.last_words())
        self._release(worker.job)
        for attempt in count(1):
            fault = Fault(self._first_index + lines[0], kind, text)
            self.faults.append(fault)
            self._tally.add(fault, lines)
            try:
                faults = self._start_again(number, attempt)
                break
            except WorkerError as again:
                kind, text = again.kind, f"{worker.name} could not be started again: {again}"
                worker.end()
        self._note(faults)

    def _start_again(self, number: int, attempt: int) -> list[Fault]:
        """Start a worker and have it begin new episodes; returns what failed in that."""
        worker = self._processes[number]
        lines, patience = worker.job.lines, self._patience + _STARTING_SECONDS
        worker.hang_up()
        self._board.forget(number)
        worker.start()
        worker.answer(patience)
        # At each attempt other episodes: their seeds may be what it dies of.
        self._tell(number, "renew", (self.block.episode[lines.start : lines.stop] + attempt, self._spare))
        return worker.answer(patience)[1]

    def _in_hand(self, job: Job) -> str:
        """Which environments a worker was told to step, in words."""
        block, flags = self.block, self._board.flags
        lines = [
            line for s in job.slices if flags[s] == STEP for line in range(*self.bounds[s]) if not block.skip[line]
        ]
        if not lines:
            return " It was stepping none of them."
        named = []
        for line in lines[:_NAMED]:
            env, episode = self._first_index + line, int(block.episode[line])
            named.append(f"{env} (episode {episode}, seed {episode_seed(self._seed, env, episode)})")
        more = f" and {len(lines) - _NAMED} more" if len(lines) > _NAMED else ""
        return f" It was to step environments {', '.join(named)}{more}."

    def _release(self, job: Job) -> None:
        """Leave a dead worker's slices as if it had stepped them, and say of each line what became of its episode."""
        block, flags = self.block, self._board.flags
        for number in job.slices:
            first, end = self.bounds[number]
            lines = slice(first, end)
            waiting = block.skip[lines] if flags[number] != IDLE else np.ones(end - first, np.bool_)
            for line in first + np.flatnonzero(waiting):
                if line not in self.renewed:
                    block.final_obs[line] = block.obs[line]
                    self.renewed.append(int(line))
            if flags[number] in (STEP, FAILED):
                block.redo[lines] |= ~waiting
            elif flags[number] in (DONE, TOLD):
                cut = ~(waiting | block.redo[lines] | block.terminated[lines] | block.truncated[lines])
                block.final_obs[lines][cut] = block.obs[lines][cut]
                block.truncated[lines] |= cut
                block.episode_length[lines][cut] = -1
            if flags[number] != IDLE:
                flags[number] = DONE

    # -- commands ------------------------------------------------------------------------------------------------------

    def start(self, episodes: np.ndarray) -> None:
        """Begin the given episode in each environment."""
        spans = [job.lines for job in self._jobs()]
        parts = [(episodes[lines.start : lines.stop],) for lines in spans]
        for number, part in enumerate(self._ask("start", parts, self._patience)):
            if part is _LOST:
                self._tell(number, "start", parts[number])
                self._note(self._processes[number].answer(self._patience)[1])
        self.renewed.clear()
        self._spare = self.block.obs[0].copy()

    def states(self) -> list[dict[str, Any] | None]:
        """Each environment's own state, where it offers one; None where it was lost, as `renewed` then says."""
        parts = self._ask("states", [()] * self.workers, self._patience)
        return [
            None if part is _LOST else part[index]
            for part, job in zip(parts, self._jobs())
            for index in range(len(job.lines))
        ]

    def take_story(self) -> dict[str, Any] | None:
        """What the first environment tells of an episode; see `AsyncSlots.take_story`."""
        story = self._ask("take_story", [()] * self.workers, self._patience)[0] if self._waits_for_others else None
        return story if isinstance(story, dict) else None  # not if its worker died instead

    def resume(self, points: list[tuple[int, np.ndarray, np.ndarray, dict[str, Any] | None]]) -> list[bool]:
        """Bring each open episode back (see `EnvSlot.resume`); False where an environment did not repeat itself."""
        parts = [(points[job.lines.start : job.lines.stop],) for job in self._jobs()]
        answers = self._ask("resume", parts, self._patience)
        self._spare = self.block.obs[0].copy()
        return [
            part is not _LOST and part[index]
            for part, job in zip(answers, self._jobs())
            for index in range(len(job.lines))
        ]

    def _jobs(self) -> list[Job]:
        return [worker.job for worker in self._processes]

    def _ask(self, name: str, arguments: list[tuple[Any, ...]], patience: float) -> list[Any]:
        if self._board.flags.any():
            raise RuntimeError(f"{name} was asked for while slices are under way")
        for number, argument in enumerate(arguments):
            with contextlib.suppress(WorkerError):  # found again when its answer is due
                self._tell(number, name, argument)
        return self._answers(patience)

    def _tell(self, number: int, name: str, arguments: tuple[Any, ...]) -> None:
        # Announced first: a long message needs the worker to read along, and it would take an unannounced one for the
        # end of the trainer.
        self._board.commands[number] = 1
        self._board.go[number].ring()
        self._processes[number].send((name, arguments))

    def _answers(self, patience: float) -> list[Any]:
        """What each worker answers; _LOST where one died instead, and was replaced."""
        values = []
        for number, worker in enumerate(self._processes):
            try:
                value, faults = worker.answer(patience)
            except WorkerError as gone:
                if gone.kind == "exception" or self._spare is None:  # or it has never stepped: likely to be a mistake
                    raise
                self._replace(number, gone)
                value, faults = _LOST, []
            self._note(faults)
            values.append(value)
        return values

    def close(self) -> None:
        """Hang up on the workers and wait for them to end."""
        for worker in self._processes:
            worker.hang_up()
        self._board.commands[:] = 1  # of which there is none: they find that nobody is there
        for go in self._board.go:
            go.ring()
        until = time.monotonic() + (_WAITING_CLOSING_SECONDS if self._waits_for_others else _CLOSING_SECONDS)
        for worker in self._processes:
            worker.end(max(0.0, until - time.monotonic()))
        self._processes = []
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def share_out(n_envs: int, workers: int, slices: int) -> list[list[tuple[int, int]]]:
    """The lines (first, end) of each worker's slices; evenly, for the fullest worker sets the pace."""
    shares = np.array_split(np.arange(n_envs), workers)
    cut = [np.array_split(share, min(slices, len(share))) for share in shares]
    return [[(int(part[0]), int(part[-1]) + 1) for part in share] for share in cut]


def _cores_for(workers: int) -> list[int]:
    """As many cores as there are workers; the first is left to the trainer, as long as there are enough."""
    cores = sorted(os.sched_getaffinity(0))
    return [cores[(number + 1) % len(cores)] for number in range(workers)]
