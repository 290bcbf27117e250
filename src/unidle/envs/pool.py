"""Environments in worker processes that write into shared memory.

The lines of the block are cut into slices; each worker owns a few and steps one while another waits for its actions, so
that neither the workers nor whoever serves them stands still. Observations, rewards and actions never pass through a
pipe; a hand-over is a byte and a semaphore.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any

import cloudpickle
import numpy as np

from unidle.envs.block import Block, map_memory, shared_memory
from unidle.envs.contract import Contract
from unidle.envs.make import EnvMaker
from unidle.envs.worker import DONE, FAILED, IDLE, STEP, Job, Switchboard
from unidle.errors import TrainingError, UsageError

_CLOSING_SECONDS = 5.0  # that all workers together have to end by themselves
_LOOK_AROUND_SECONDS = 0.5  # how often a waiting trainer looks whether all workers are still there


class ProcessPool:
    """N environments behind one block, shared out among worker processes."""

    def __init__(
        self,
        maker: EnvMaker,
        contract: Contract,
        n_envs: int,
        seed: int,
        workers: int,
        first_index: int = 0,
        slices: int = 1,
    ) -> None:
        """`workers` processes of `slices` slices each, as far as there are environments for them."""
        self.contract, self.n_envs = contract, n_envs
        self.workers = min(workers, n_envs)
        per_worker = min(slices, n_envs // self.workers)
        cuts = [int(part[0]) for part in np.array_split(np.arange(n_envs), self.workers * per_worker)]
        self.bounds = list(zip(cuts, [*cuts[1:], n_envs]))
        self._per_worker = per_worker
        try:
            cargo = cloudpickle.dumps((maker, contract))
        except Exception as error:
            raise UsageError(
                f"The environment factory cannot be sent to worker processes ({error}); "
                "give an id or a module-level function, or use --no-subproc."
            ) from None
        start = Block.nbytes(contract, n_envs)
        descriptor = shared_memory(start + Switchboard.nbytes(len(self.bounds), self.workers))
        memory = map_memory(descriptor)
        self.block = Block(contract, n_envs, memory)
        self._board = Switchboard.over(memory, start, len(self.bounds), self.workers, initialise=True)
        self._owed = 0  # slices returned by `recv` less posts of `ready` taken
        self._processes: list[subprocess.Popen] = []
        self._pipes: list[Connection] = []
        try:
            for number in range(self.workers):
                own = list(range(number * per_worker, (number + 1) * per_worker))
                job = Job(
                    path=sys.path,
                    cargo=cargo,
                    memory=descriptor,
                    n_envs=n_envs,
                    bounds=self.bounds,
                    worker=number,
                    workers=self.workers,
                    slices=own,
                    seed=seed,
                    first_index=first_index,
                )
                self._start_worker(descriptor, job)
            self._answers()
        except BaseException:
            self.close()
            raise
        finally:
            os.close(descriptor)

    def _start_worker(self, memory: int, job: Job) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            package = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
            paths = [package, *filter(None, [os.environ.get("PYTHONPATH")])]
            environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
            process = subprocess.Popen(
                # -P: the current folder is not searched, so that a queue.py there does not stand in for Python's own.
                [sys.executable, "-P", "-m", "unidle.envs.worker", str(theirs.fileno())],
                pass_fds=(theirs.fileno(), memory),
                stdin=subprocess.DEVNULL,
                stdout=2,  # standard output is for results; what an environment prints goes to standard error
                env=environment,
            )
        self._processes.append(process)
        self._pipes.append(Connection(ours.detach()))
        with contextlib.suppress(ConnectionError):  # a worker that is gone already is found when its answer is due
            self._pipes[-1].send_bytes(cloudpickle.dumps(job))

    # -- stepping ------------------------------------------------------------------------------------------------------

    def send(self, slices: Sequence[int]) -> None:
        """Set these slices going on the actions in the block."""
        flags, go, per_worker = self._board.flags, self._board.go, self._per_worker
        for number in slices:
            flags[number] = STEP
            go[number // per_worker].post()

    def recv(self, at_least: int) -> list[int]:
        """The slices that have been stepped, in order; waits until there are `at_least` of them."""
        board = self._board
        while True:
            done = np.flatnonzero(board.flags >= DONE)
            if len(done) >= at_least or (len(done) and (board.flags[done] == FAILED).any()):
                break
            # A flag is set before its post, so some posts are of slices that were already returned: those first. A post
            # of any other slice is only taken by the wait below, after which the flags are looked at again.
            while self._owed > 0 and board.ready.take():
                self._owed -= 1
            if board.ready.wait(_LOOK_AROUND_SECONDS):
                self._owed -= 1
            else:
                self._check_workers()
        if (board.flags[done] == FAILED).any():
            number = int(done[board.flags[done] == FAILED][0])
            board.flags[number] = IDLE
            self._answer(number // self._per_worker)
        board.flags[done] = IDLE
        self._owed += len(done)
        return done.tolist()

    def _check_workers(self) -> None:
        for number, process in enumerate(self._processes):
            if process.poll() is not None:
                raise self._lost(number)

    # -- commands ------------------------------------------------------------------------------------------------------

    def start(self, episodes: np.ndarray) -> None:
        """Begin the given episode in each environment."""
        self._ask("start", [(episodes[first:end],) for first, end in self._spans()])

    def states(self) -> list[dict[str, Any] | None]:
        """Each environment's own state, where it offers one."""
        return [state for part in self._ask("states", [()] * self.workers) for state in part]

    def resume(self, points: list[tuple[int, np.ndarray, np.ndarray, dict[str, Any] | None]]) -> list[bool]:
        """Bring each open episode back (see `EnvSlot.resume`); False where an environment did not repeat itself."""
        parts = [(points[first:end],) for first, end in self._spans()]
        return [same for part in self._ask("resume", parts) for same in part]

    def _spans(self) -> list[tuple[int, int]]:
        """The lines of each worker."""
        per_worker = self._per_worker
        return [(self.bounds[w * per_worker][0], self.bounds[(w + 1) * per_worker - 1][1]) for w in range(self.workers)]

    def _ask(self, name: str, arguments: list[tuple[Any, ...]]) -> list[Any]:
        for number, argument in enumerate(arguments):
            try:
                self._pipes[number].send_bytes(cloudpickle.dumps((name, argument)))
            except ConnectionError:
                raise self._lost(number) from None
            self._board.commands[number] = 1
            self._board.go[number].post()
        return self._answers()

    def _answers(self) -> list[Any]:
        return [self._answer(number) for number in range(self.workers)]

    def _answer(self, number: int) -> Any:
        """What a worker says next; its failure is raised here."""
        try:
            kind, value = cloudpickle.loads(self._pipes[number].recv_bytes())
        except (EOFError, ConnectionError):
            raise self._lost(number) from None
        if kind != "ok":
            raise (UsageError if kind == "usage" else TrainingError)(value)
        return value

    def _lost(self, number: int) -> TrainingError:
        first, end = self._spans()[number]
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._processes[number].wait(timeout=5)
        code = self._processes[number].returncode
        return TrainingError(
            f"The worker of environments {first} to {end - 1} ended unexpectedly (exit status {code}): "
            "it was killed, ran out of memory, or the environment crashed the interpreter."
        )

    def close(self) -> None:
        """Hang up on the workers and wait for them to end."""
        for pipe in self._pipes:
            pipe.close()
        for go in self._board.go:
            go.post()
        until = time.monotonic() + _CLOSING_SECONDS
        for process in self._processes:
            try:
                process.wait(timeout=max(0.0, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._pipes, self._processes = [], []
