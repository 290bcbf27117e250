"""A worker process: a few slices of environments, each stepped whenever the pool hands it over.

Started as `python -m unidle.envs.pool.worker <socket>`, not by multiprocessing: it never imports the user's `__main__`,
so scripts without an `if __name__ == "__main__":` guard, notebooks and lambdas all work. It imports no torch. When the
trainer goes, however it goes, the socket closes and the worker ends.
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

from unidle.envs.block import Block, map_memory
from unidle.envs.pool.signals import SEMAPHORE_BYTES, Bell
from unidle.envs.pool.slots import Slots
from unidle.envs.spec import EnvSpec
from unidle.errors import UsageError
from unidle.subprocesses import end_with_trainer

# What a slice's flag says. The trainer writes STEP, and IDLE once it has taken a slice back; the worker writes DONE, or
# TOLD (stepped, and a message in the pipe tells of faults), or FAILED (a message tells why it cannot be stepped).
IDLE, STEP, DONE, TOLD, FAILED = range(5)
SPIN_SECONDS = 2e-4  # before sleeping: being woken takes about as long as a step
# The same of workers that share their cores. After a sleep their next steps take longer too; and while they spin they
# give way.
_SHARING_SPIN_SECONDS = 1e-3
_LINE = 64  # bytes that cores hand to each other at a time
_LOOK_AROUND_SECONDS = 1.0  # how often an idle worker looks whether the trainer is still there


@dataclass
class Switchboard:
    """The signals between trainer and workers, in the same shared memory as the block.

    Invariants: a slice belongs to its worker (STEP) or to the trainer (all other flags), and only its owner touches its
    lines of the block. Who sets a flag STEP, or a command, rings the worker's `go` after it; who hands a slice back
    rings `ready` after it. A ring says nothing, the flags do. A flag TOLD or FAILED stands for exactly one message,
    sent after it: a pipe holds only so much, and the trainer comes to read when it sees the flag. Whoever sees a flag
    also sees what was written before it: so x86-64 orders memory.
    """

    flags: np.ndarray  # [slices] uint8, far enough apart that nobody who waits for one hears of others
    commands: np.ndarray  # [workers] uint8: 1 if a message waits, or is about to, in the worker's pipe
    ready: Bell
    go: list[Bell]  # one per worker
    memory: Any  # what it lies over, from `begin` on
    begin: int

    @staticmethod
    def nbytes(slices: int, workers: int) -> int:
        """Bytes it takes behind the block."""
        return SEMAPHORE_BYTES * (1 + workers) + _LINE * slices + workers

    @staticmethod
    def over(memory: Any, start: int, slices: int, workers: int, *, initialise: bool) -> Switchboard:
        """Lay it over `memory` from `start` (a multiple of 64) on."""
        bells = [Bell(memory, start + SEMAPHORE_BYTES * i, initialise=initialise) for i in range(1 + workers)]
        behind = start + SEMAPHORE_BYTES * (1 + workers)
        flags = np.ndarray((slices,), np.uint8, memory, behind, strides=(_LINE,))
        commands = np.ndarray((workers,), np.uint8, memory, behind + _LINE * slices)
        return Switchboard(flags, commands, bells[0], bells[1:], memory, start)

    def forget(self, worker: int) -> None:
        """Take back what a worker, now dead, was told, and that it may have waited for a ring."""
        self.commands[worker] = 0
        self.go[worker] = Bell(self.memory, self.begin + SEMAPHORE_BYTES * (1 + worker), initialise=True)


@dataclass
class Job:
    """What a worker is told at its start."""

    path: list[str]  # sys.path of the trainer
    cargo: bytes  # (EnvMaker, EnvSpec), pickled: unpickled once the path is set
    memory: int  # descriptor of the shared memory
    n_envs: int  # lines of the whole block
    bounds: list[tuple[int, int]]  # lines of each slice of the pool
    worker: int
    workers: int
    slices: list[int]  # those of this worker
    seed: int
    first_index: int
    gives_way: bool  # to whoever else wants its core, while it waits for work

    @property
    def lines(self) -> range:
        """The lines of the block that are this worker's."""
        return range(self.bounds[self.slices[0]][0], self.bounds[self.slices[-1]][1])


def main() -> None:
    """Serve one pool until it hangs up."""
    end_with_trainer()
    pipe = Connection(int(sys.argv[1]))
    try:
        job: Job = cloudpickle.loads(pipe.recv_bytes())
        sys.path[:] = job.path
        # For environments that draw from the global streams.
        random.seed(job.seed + job.worker)
        np.random.seed((job.seed + job.worker) % 2**32)  # noqa: NPY002
        maker, env_spec = cloudpickle.loads(job.cargo)
        kind = Worker
        if maker.makes == "async":
            from unidle.envs.aio.worker import AsyncWorker  # which others do without

            kind = AsyncWorker
        with contextlib.closing(kind(pipe, job, maker, env_spec)) as worker:
            pipe.send_bytes(cloudpickle.dumps(("ok", None, [])))
            worker.serve()
    except (EOFError, ConnectionError):
        pass  # the trainer is gone
    except Exception as error:
        with contextlib.suppress(OSError):
            pipe.send_bytes(in_words(error))


class Worker:
    """Steps its slices one after the other."""

    def __init__(self, pipe: Connection, job: Job, maker: Any, env_spec: EnvSpec) -> None:
        memory = map_memory(job.memory)
        block = Block(env_spec, job.n_envs, memory)
        start = Block.nbytes(env_spec, job.n_envs)
        board = Switchboard.over(memory, start, len(job.bounds), job.workers, initialise=False)
        self._pipe, self._number, self._board, self._block = pipe, job.worker, board, block
        self._gives_way = job.gives_way
        self._spin_seconds = _SHARING_SPIN_SECONDS if job.gives_way else SPIN_SECONDS
        self._first = job.lines.start
        self._envs = self._make_slots(maker, env_spec, job)
        # Slice → its environments, counted from this worker's first.
        self._own = {s: (job.bounds[s][0] - self._first, job.bounds[s][1] - self._first) for s in job.slices}
        self._own_flags = board.flags[job.slices[0] : job.slices[-1] + 1]

    def _make_slots(self, maker: Any, env_spec: EnvSpec, job: Job) -> Any:
        return Slots(maker, env_spec, self._block, job.lines, job.seed, job.first_index)

    def serve(self) -> None:
        """Do what is handed over, and wait where there is nothing."""
        board, number = self._board, self._number
        go, commands = board.go[number], board.commands
        while True:
            if commands[number]:
                commands[number] = 0
                self._obey()
            elif not self._step_one():
                go.wait(self._is_wanted, _LOOK_AROUND_SECONDS, self._spin_seconds, gives_way=self._gives_way)
                if not self._is_wanted() and self._pipe.poll() and not commands[number]:
                    # A command is announced before it is sent, so looked for in this order there is none to miss.
                    self._pipe.recv_bytes()  # the end of the file: EOFError

    def _is_wanted(self) -> bool:
        """Whether there is a command, or a slice to step."""
        return bool(self._board.commands[self._number]) or STEP in self._own_flags.tobytes()

    def _step_one(self) -> bool:
        """Step a slice that was handed over; False if there is none."""
        board = self._board
        for number in self._own:
            if board.flags[number] == STEP:
                self._hand_back(number)
                # The next slice in turn comes first next time, so that none waits for ever.
                self._own[number] = self._own.pop(number)
                return True
        return False

    def _hand_back(self, number: int) -> None:
        """Step a slice, and say that it was."""
        board, (first, end) = self._board, self._own[number]
        flag, message = DONE, b""
        try:
            self._envs.step(first, end)
        except Exception as error:
            flag, message = FAILED, in_words(error)
        else:
            if faults := self._envs.take_faults():
                flag, message = TOLD, cloudpickle.dumps(("ok", None, faults))
        self._block.beats[self._first] += 1
        board.flags[number] = flag
        board.ready.ring()
        if message:
            self._pipe.send_bytes(message)

    def _obey(self) -> None:
        """A command: make, start, renew, states or resume; rare, so plainly pickled."""
        method, arguments = cloudpickle.loads(self._pipe.recv_bytes())
        try:
            value = getattr(self._envs, method)(*arguments)
            answer = cloudpickle.dumps(("ok", value, self._envs.take_faults()))
        except Exception as error:
            answer = in_words(error)
        self._pipe.send_bytes(answer)

    def close(self) -> None:
        """Close every environment."""
        self._envs.close()


def in_words(error: Exception) -> bytes:
    """The message that tells of an error: in words, as an exception of the user's own class may not unpickle there."""
    kind = "usage" if isinstance(error, UsageError) else "failure"
    return cloudpickle.dumps((kind, str(error) or "".join(traceback.format_exception(error)), []))


if __name__ == "__main__":
    main()
