"""Environments in worker processes that write into shared memory.

Each worker owns a run of lines of one block and steps them when a byte arrives on its socket. Observations, rewards and
actions never pass through the socket.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from multiprocessing.connection import Connection
from typing import Any

import cloudpickle
import numpy as np

from unidle.envs.block import Block, map_memory, shared_memory
from unidle.envs.contract import Contract
from unidle.envs.make import EnvMaker
from unidle.envs.worker import FAILED, STEP
from unidle.errors import TrainingError, UsageError


class ProcessPool:
    """N environments behind one block, shared out among worker processes."""

    def __init__(
        self, maker: EnvMaker, contract: Contract, n_envs: int, seed: int, workers: int, first_index: int = 0
    ) -> None:
        self.contract, self.n_envs = contract, n_envs
        self.workers = min(workers, n_envs)
        try:
            cargo = cloudpickle.dumps((maker, contract))
        except Exception as error:
            raise UsageError(
                f"The environment factory cannot be sent to worker processes ({error}); "
                "give an id or a module-level function, or use --no-subproc."
            ) from None
        memory = shared_memory(Block.nbytes(contract, n_envs))
        self.block = Block(contract, n_envs, map_memory(memory))
        self._processes: list[subprocess.Popen] = []
        self._pipes: list[Connection] = []
        self._lines = np.array_split(np.arange(n_envs), self.workers)
        try:
            for lines in self._lines:
                job = {
                    "path": sys.path,
                    "cargo": cargo,
                    "memory": memory,
                    "block_envs": n_envs,
                    "n_envs": len(lines),
                    "first_line": int(lines[0]),
                    "seed": seed,
                    "first_index": first_index,
                }
                self._start_worker(memory, job)
            self._collect()
        except BaseException:
            self.close()
            raise
        finally:
            os.close(memory)

    def _start_worker(self, memory: int, job: dict[str, Any]) -> None:
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
                env=environment,
            )
        self._processes.append(process)
        self._pipes.append(Connection(ours.detach()))
        self._pipes[-1].send_bytes(cloudpickle.dumps(job))

    def start(self, episodes: np.ndarray) -> None:
        """Begin the given episode in each environment."""
        self._ask("start", [(episodes[lines],) for lines in self._lines])

    def send(self) -> None:
        """Set every worker going on the actions in the block."""
        for pipe in self._pipes:
            self._guard(pipe, pipe.send_bytes, STEP)

    def recv(self) -> None:
        """Wait until every environment is stepped and the block holds what came of it."""
        for pipe in self._pipes:
            self._result(pipe)

    def states(self) -> list[dict[str, Any] | None]:
        """Each environment's own state, where it offers one."""
        return [state for part in self._ask("states", [()] * self.workers) for state in part]

    def resume(self, points: list[tuple[int, np.ndarray, np.ndarray, dict[str, Any] | None]]) -> list[bool]:
        """Bring each open episode back (see `EnvSlot.resume`); False where an environment did not repeat itself."""
        parts = [([points[line] for line in lines],) for lines in self._lines]
        return [same for part in self._ask("resume", parts) for same in part]

    def close(self) -> None:
        """Hang up on the workers and wait for them to end."""
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            try:
                process.wait(timeout=5)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._pipes, self._processes = [], []

    # -- talking to workers ------------------------------------------------------------------------------------------

    def _ask(self, name: str, arguments: list[Any]) -> list[Any]:
        for pipe, argument in zip(self._pipes, arguments):
            self._guard(pipe, pipe.send_bytes, cloudpickle.dumps((name, argument)))
        return self._collect()

    def _collect(self) -> list[Any]:
        return [cloudpickle.loads(self._result(pipe)) for pipe in self._pipes]

    def _result(self, pipe: Connection) -> bytes:
        """What a worker answered; its failure is raised here."""
        message: bytes = self._guard(pipe, pipe.recv_bytes)
        if message[:1] == FAILED:
            kind, text = cloudpickle.loads(message[1:])
            raise (UsageError if kind == "usage" else TrainingError)(text)
        return message[1:]

    def _guard(self, pipe: Connection, call: Any, *arguments: Any) -> Any:
        try:
            return call(*arguments)
        except (EOFError, ConnectionError):
            number = self._pipes.index(pipe)
            lines = self._lines[number]
            code = self._processes[number].wait(timeout=5)
            raise TrainingError(
                f"The worker of environments {lines[0]} to {lines[-1]} ended unexpectedly (exit status {code}): "
                "it was killed, ran out of memory, or the environment crashed the interpreter."
            ) from None
