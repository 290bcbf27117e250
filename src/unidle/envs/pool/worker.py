"""A worker process of the pool: steps its slices of environments whenever the trainer hands one over.

Started as `python -m unidle.envs.pool.worker <socket>`, not by multiprocessing: it never imports the user's `__main__`,
so scripts without an `if __name__ == "__main__":` guard, notebooks and lambdas all work. It does not import torch. When
the trainer exits for any reason, the socket closes and the worker exits too.
"""

from __future__ import annotations

import contextlib
import random
import sys
import traceback
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import cloudpickle
import numpy as np

from unidle.envs.pool.signals import SEMAPHORE_BYTES, Doorbell
from unidle.envs.pool.slots import Slots
from unidle.envs.shared_block import SharedBlock, map_memory
from unidle.envs.spec import EnvSpec
from unidle.errors import UsageError
from unidle.output import guard_output
from unidle.subprocesses import end_with_trainer

# Values of a slice's flag. The trainer writes STEP, and IDLE once it has received the slice; the worker writes DONE,
# DONE_WITH_FAULTS (a message in the pipe has the faults) or FAILED (a message in the pipe has the error).
IDLE, STEP, DONE, DONE_WITH_FAULTS, FAILED = range(5)
SPIN_SECONDS = 2e-4  # before sleeping: a wake-up takes about as long as a step
# The same for workers that share cores: after a sleep their next steps are slower too, and spinning yields the core.
_SHARING_SPIN_SECONDS = 1e-3
_CACHE_LINE = 64  # bytes
_PARENT_CHECK_SECONDS = 1.0  # how often an idle worker checks that the trainer still runs


@dataclass
class WorkerSignals:
    """The signals between trainer and workers, in the same shared memory as the block.

    Invariants: a slice belongs to its worker (STEP) or to the trainer (all other flags), and only its owner touches its
    entries of the block. After setting a flag to STEP, or a command, the trainer rings the worker's `go`; after
    handing a slice back, the worker rings `ready`. A ring carries no information, the flags do. A flag DONE_WITH_FAULTS
    or FAILED means exactly one message, sent after it: a pipe has a limited capacity, and the trainer reads it
    when it sees the flag. A process that sees a flag also sees everything written before it: x86-64 orders stores.
    """

    flags: np.ndarray  # [slices] uint8, one per cache line to avoid false sharing
    commands: np.ndarray  # [workers] uint8: 1 if a command is in the worker's pipe, or about to be
    ready: Doorbell
    go: list[Doorbell]  # one per worker
    memory: Any  # it starts at byte `begin`
    begin: int

    @staticmethod
    def nbytes(slices: int, workers: int) -> int:
        """Bytes needed after the block."""
        return SEMAPHORE_BYTES * (1 + workers) + _CACHE_LINE * slices + workers

    @staticmethod
    def over(memory: Any, start: int, slices: int, workers: int, *, initialise: bool) -> WorkerSignals:
        """Create the views on `memory`, starting at byte `start` (a multiple of 64)."""
        doorbells = [Doorbell(memory, start + SEMAPHORE_BYTES * i, initialise=initialise) for i in range(1 + workers)]
        flags_start = start + SEMAPHORE_BYTES * (1 + workers)
        flags = np.ndarray((slices,), np.uint8, memory, flags_start, strides=(_CACHE_LINE,))
        commands = np.ndarray((workers,), np.uint8, memory, flags_start + _CACHE_LINE * slices)
        return WorkerSignals(flags, commands, doorbells[0], doorbells[1:], memory, start)

    def reset_worker(self, worker: int) -> None:
        """Clear the command and the doorbell of a dead worker."""
        self.commands[worker] = 0
        self.go[worker] = Doorbell(self.memory, self.begin + SEMAPHORE_BYTES * (1 + worker), initialise=True)


@dataclass
class WorkerJob:
    """What a worker needs to know to start."""

    path: list[str]  # sys.path of the trainer
    pickled_envs: bytes  # (EnvMaker, EnvSpec), pickled: unpickled after `path` is set
    memory: int  # descriptor of the shared memory
    n_envs: int  # of the whole block
    bounds: list[tuple[int, int]]  # env ids of each slice of the pool
    worker: int
    workers: int
    slices: list[int]  # those of this worker
    seed: int
    first_index: int
    yields_core: bool  # while it waits for work, because it shares its core
    ready: int | None = None  # descriptor of a doorbell to ring instead of the pool's own

    @property
    def descriptors(self) -> list[int]:
        """What its process inherits."""
        return [self.memory] if self.ready is None else [self.memory, self.ready]

    @property
    def env_ids(self) -> range:
        """The env ids of this worker."""
        return range(self.bounds[self.slices[0]][0], self.bounds[self.slices[-1]][1])


def main() -> None:
    """Work for one pool until it closes the pipe."""
    end_with_trainer()
    guard_output()  # an environment that prints must not fail because nobody reads it
    pipe = Connection(int(sys.argv[1]))
    try:
        job: WorkerJob = cloudpickle.loads(pipe.recv_bytes())
        sys.path[:] = job.path
        # For environments that use the global random generators.
        random.seed(job.seed + job.worker)
        np.random.seed((job.seed + job.worker) % 2**32)  # noqa: NPY002
        maker, env_spec = cloudpickle.loads(job.pickled_envs)
        kind = Worker
        if maker.kind == "async":
            from unidle.envs.aio.worker import AsyncWorker  # imports asyncio

            kind = AsyncWorker
        with contextlib.closing(kind(pipe, job, maker, env_spec)) as worker:
            pipe.send_bytes(cloudpickle.dumps(("ok", None, [])))
            worker.run()
    except (EOFError, ConnectionError):
        pass  # the trainer has exited
    except Exception as error:
        with contextlib.suppress(OSError):
            pipe.send_bytes(error_message(error))


class Worker:
    """Steps its slices one after the other."""

    def __init__(self, pipe: Connection, job: WorkerJob, maker: Any, env_spec: EnvSpec) -> None:
        memory = map_memory(job.memory)
        block = SharedBlock(env_spec, job.n_envs, memory)
        start = SharedBlock.nbytes(env_spec, job.n_envs)
        signals = WorkerSignals.over(memory, start, len(job.bounds), job.workers, initialise=False)
        if job.ready is not None:
            signals.ready = Doorbell(map_memory(job.ready), 0, initialise=False)
        self._pipe, self._number, self._signals, self._block = pipe, job.worker, signals, block
        self._yields_core = job.yields_core
        self._spin_seconds = _SHARING_SPIN_SECONDS if job.yields_core else SPIN_SECONDS
        self._first = job.env_ids.start
        self._envs = self._make_slots(maker, env_spec, job)
        # Slice → its environments, counted from this worker's first.
        self._own = {s: (job.bounds[s][0] - self._first, job.bounds[s][1] - self._first) for s in job.slices}
        self._own_flags = signals.flags[job.slices[0] : job.slices[-1] + 1]

    def _make_slots(self, maker: Any, env_spec: EnvSpec, job: WorkerJob) -> Any:
        arguments = maker, env_spec, self._block, job.env_ids, job.seed, job.first_index
        if env_spec.vectorised:
            from unidle.envs.vector.slots import VectorSlots  # imports the adapters

            return VectorSlots(*arguments)
        return Slots(*arguments)

    def run(self) -> None:
        """Run commands and step slices; wait if there are none."""
        signals, number = self._signals, self._number
        go, commands = signals.go[number], signals.commands
        while True:
            if commands[number]:
                commands[number] = 0
                self._run_command()
            elif not self._step_next():
                go.wait(self._has_work, _PARENT_CHECK_SECONDS, self._spin_seconds, yields_core=self._yields_core)
                if not self._has_work() and self._pipe.poll() and not commands[number]:
                    # Commands are announced before they are sent, so a readable pipe without a command has been closed.
                    self._pipe.recv_bytes()  # raises EOFError

    def _has_work(self) -> bool:
        """Whether there is a command or a slice to step."""
        return bool(self._signals.commands[self._number]) or STEP in self._own_flags.tobytes()

    def _step_next(self) -> bool:
        """Step a slice that the trainer handed over; False if there is none."""
        signals = self._signals
        for number in self._own:
            if signals.flags[number] == STEP:
                self._step_slice(number)
                # Round-robin: the slice goes to the end of the queue.
                self._own[number] = self._own.pop(number)
                return True
        return False

    def _step_slice(self, number: int) -> None:
        """Step a slice and hand it back to the trainer."""
        signals, (first, end) = self._signals, self._own[number]
        flag, message = DONE, b""
        try:
            self._envs.step(first, end)
        except Exception as error:
            flag, message = FAILED, error_message(error)
        else:
            if faults := self._envs.take_faults():
                flag, message = DONE_WITH_FAULTS, cloudpickle.dumps(("ok", None, faults))
        self._block.heartbeats[self._first] += 1
        signals.flags[number] = flag
        signals.ready.ring()
        if message:
            self._pipe.send_bytes(message)

    def _run_command(self) -> None:
        """Run make, start, restart, states or resume; they are rare, so pickling is fine."""
        method, arguments = cloudpickle.loads(self._pipe.recv_bytes())
        try:
            value = getattr(self._envs, method)(*arguments)
            reply = cloudpickle.dumps(("ok", value, self._envs.take_faults()))
        except Exception as error:
            reply = error_message(error)
        self._pipe.send_bytes(reply)

    def close(self) -> None:
        """Close every environment."""
        self._envs.close()


def error_message(error: Exception) -> bytes:
    """The message for an error, as text: exceptions of the user's own classes may not unpickle in the trainer."""
    kind = "usage" if isinstance(error, UsageError) else "failure"
    return cloudpickle.dumps((kind, str(error) or "".join(traceback.format_exception(error)), []))


if __name__ == "__main__":
    main()
