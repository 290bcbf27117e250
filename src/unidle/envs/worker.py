"""A worker process: a few slices of environments, each stepped whenever the pool hands it over.

Started as `python -m unidle.envs.worker <socket>`, not by multiprocessing: it never imports the user's `__main__`, so
scripts without an `if __name__ == "__main__":` guard, notebooks and lambdas all work. It imports no torch. When the
trainer goes, however it goes, the socket closes and the worker ends.
"""

from __future__ import annotations

import contextlib
import ctypes
import random
import signal
import sys
import traceback
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import cloudpickle
import numpy as np

from unidle.envs.block import Block, map_memory
from unidle.envs.contract import Contract
from unidle.envs.serial import SerialEnvs
from unidle.envs.signals import SEMAPHORE_BYTES, Semaphore
from unidle.errors import UsageError

# What a slice's flag says. The trainer writes STEP, the worker writes DONE or FAILED; never both at a time.
IDLE, STEP, DONE, FAILED = range(4)
_PR_SET_PDEATHSIG = 1  # Linux: have a signal sent when the parent dies
_LOOK_AROUND_SECONDS = 1.0  # how often an idle worker looks whether the trainer is still there


@dataclass
class Switchboard:
    """The signals between trainer and workers, in the same shared memory as the block.

    Invariants: a slice belongs to the trainer (IDLE, DONE, FAILED) or to its worker (STEP), and only its owner touches
    its lines of the block. Each STEP or command is one post of the worker's `go`; each DONE or FAILED is one post of
    `ready`, made after the flag is set, so that whoever takes the post sees the flag. Whoever sees a flag also sees
    what was written before it: so x86-64 orders memory.
    """

    flags: np.ndarray  # [slices] uint8
    commands: np.ndarray  # [workers] uint8: 1 if a message waits in the worker's pipe
    ready: Semaphore
    go: list[Semaphore]  # one per worker

    @staticmethod
    def nbytes(slices: int, workers: int) -> int:
        """Bytes it takes behind the block."""
        return SEMAPHORE_BYTES * (1 + workers) + slices + workers

    @staticmethod
    def over(memory: Any, start: int, slices: int, workers: int, *, initialise: bool) -> Switchboard:
        """Lay it over `memory` from `start` (a multiple of 64) on."""
        semaphores = [Semaphore(memory, start + SEMAPHORE_BYTES * i, initialise=initialise) for i in range(1 + workers)]
        start += SEMAPHORE_BYTES * (1 + workers)
        flags = np.ndarray((slices,), np.uint8, memory, start)
        return Switchboard(
            flags, np.ndarray((workers,), np.uint8, memory, start + slices), semaphores[0], semaphores[1:]
        )


@dataclass
class Job:
    """What a worker is told at its start."""

    path: list[str]  # sys.path of the trainer
    cargo: bytes  # (EnvMaker, Contract), pickled: unpickled once the path is set
    memory: int  # descriptor of the shared memory
    n_envs: int  # lines of the whole block
    bounds: list[tuple[int, int]]  # lines of each slice of the pool
    worker: int
    workers: int
    slices: list[int]  # those of this worker
    seed: int
    first_index: int


def main() -> None:
    """Serve one pool until it hangs up."""
    # These may reach the whole group, and the trainer decides what they mean. A handler that does nothing, not SIG_IGN:
    # that one would be inherited by whatever processes an environment starts.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: None)
    # Should the trainer be killed while a step takes its time here, do not wait for the step to end.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    pipe = Connection(int(sys.argv[1]))
    try:
        job: Job = cloudpickle.loads(pipe.recv_bytes())
        sys.path[:] = job.path
        # For environments that draw from the global streams.
        random.seed(job.seed + job.worker)
        np.random.seed((job.seed + job.worker) % 2**32)  # noqa: NPY002
        with contextlib.closing(_Worker(pipe, job, *cloudpickle.loads(job.cargo))) as worker:
            pipe.send_bytes(cloudpickle.dumps(("ok", None)))
            worker.serve()
    except (EOFError, ConnectionError):
        pass  # the trainer is gone
    except Exception as error:
        _tell(pipe, error)


class _Worker:
    def __init__(self, pipe: Connection, job: Job, maker: Any, contract: Contract) -> None:
        memory = map_memory(job.memory)
        block = Block(contract, job.n_envs, memory)
        start = Block.nbytes(contract, job.n_envs)
        board = Switchboard.over(memory, start, len(job.bounds), job.workers, initialise=False)
        self._pipe, self._number, self._board = pipe, job.worker, board
        self._first = job.bounds[job.slices[0]][0]
        n_envs = job.bounds[job.slices[-1]][1] - self._first
        self._envs = SerialEnvs(maker, contract, n_envs, job.seed, job.first_index + self._first, block, self._first)
        # Slice → its environments, counted from this worker's first.
        self._own = {s: (job.bounds[s][0] - self._first, job.bounds[s][1] - self._first) for s in job.slices}

    def serve(self) -> None:
        """Do what is handed over, one thing per post of `go`."""
        board, number = self._board, self._number
        go, commands = board.go[number], board.commands
        while True:
            go.wait(_LOOK_AROUND_SECONDS)
            if commands[number]:
                commands[number] = 0
                self._obey()
            elif not self._step_one() and self._pipe.poll():
                self._pipe.recv_bytes()  # nothing was announced, so this is the end of the file: EOFError

    def _step_one(self) -> bool:
        """Step a slice that was handed over; False if there is none."""
        board = self._board
        for number, (first, end) in self._own.items():
            if board.flags[number] == STEP:
                try:
                    self._envs.step(first, end)
                except Exception as error:
                    board.flags[number] = FAILED
                    board.ready.post()
                    _tell(self._pipe, error)  # last: a pipe holds only so much, and now the trainer comes to read
                else:
                    board.flags[number] = DONE
                    board.ready.post()
                    # The next slice in turn comes first next time, so that none waits for ever.
                    self._own[number] = self._own.pop(number)
                return True
        return False

    def _obey(self) -> None:
        """A command: start, states or resume; rare, so plainly pickled."""
        method, arguments = cloudpickle.loads(self._pipe.recv_bytes())
        try:
            self._pipe.send_bytes(cloudpickle.dumps(("ok", getattr(self._envs, method)(*arguments))))
        except (EOFError, ConnectionError):
            raise
        except Exception as error:
            _tell(self._pipe, error)

    def close(self) -> None:
        self._envs.close()


def _tell(pipe: Connection, error: Exception) -> None:
    """Tell the trainer of an error, in words: an exception of the user's own class may not unpickle there."""
    kind = "usage" if isinstance(error, UsageError) else "failure"
    text = str(error) or "".join(traceback.format_exception(error))
    with contextlib.suppress(OSError):
        pipe.send_bytes(cloudpickle.dumps((kind, text)))


if __name__ == "__main__":
    main()
