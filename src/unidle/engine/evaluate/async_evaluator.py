"""Asynchronous evaluation: a queue of policy snapshots that separate processes evaluate during training.

1. Training never waits for an evaluation, unless the queue is full.
2. Each process runs its share of the environments of every evaluation, in the order of the requests. So evaluations
   finish in that order, and results do not depend on the number of processes.
3. A snapshot stays in shared memory until its result has been handled: a process that dies is restarted and repeats its
   share, and a checkpoint stores the pending evaluations.
"""

from __future__ import annotations

import os
import sys
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import cloudpickle
from torch import Tensor

from unidle.config import Config
from unidle.engine.evaluate.play import Evaluation, n_evaluation_envs
from unidle.engine.evaluate.worker import EvaluationJob, Snapshots, shapes_of, shares
from unidle.envs.make import EnvMaker
from unidle.envs.pool.worker_process import POLL_SECONDS, WorkerError, WorkerProcess
from unidle.envs.protocol import Fault
from unidle.envs.shared_block import map_memory, shared_memory
from unidle.envs.spec import EnvSpec
from unidle.errors import TrainingError, UsageError
from unidle.nn.actor_critic import NetworkFactory

_QUEUE_LENGTH = 4  # unfinished evaluations, at most
_WAIT_SECONDS = 0.02  # between two checks for a result
_CLOSING_SECONDS = 5.0  # for all processes together to close their environments and exit
_STARTING_SECONDS = 120.0  # for a process to import and create its environments, in addition to `env_timeout`


@dataclass
class Request:
    """A pending evaluation: it is not done, or its result has not been handled."""

    step: int
    due: int  # the iteration before which its result has no effect
    extra: dict[str, Any]  # further fields of its record: tensors and plain values
    slot: int  # of its snapshot
    parts: dict[int, Evaluation] = field(default_factory=dict)  # by process
    faults: list[Fault] = field(default_factory=list)


class AsyncEvaluator:
    """Processes that evaluate snapshots of a policy."""

    def __init__(
        self,
        config: Config,
        maker: EnvMaker,
        env_spec: EnvSpec,
        network: NetworkFactory | None,
        state: dict[str, Tensor],
        processes: int,
        say: Callable[[str], None],
    ) -> None:
        """`state` is the policy's, for its shapes; `processes` is at most the number of environments.

        Does not wait for the processes to start.
        """
        episodes, shapes = config.run.eval_episodes, shapes_of(state)
        n_envs = n_evaluation_envs(episodes)
        self._say = say
        self._timeout = config.engine.env_timeout or float("inf")
        self._restarts_left = config.engine.max_env_restarts
        self._requests: deque[Request] = deque()
        self._free = deque(range(_QUEUE_LENGTH))
        self._next_check = self._next_receive = 0.0
        try:
            payload = cloudpickle.dumps((maker, env_spec, config, network))
        except Exception as error:
            raise UsageError(
                f"The environment factory or the network cannot be sent to other processes ({error}); use "
                "--eval-workers 0."
            ) from None
        # Untouched pages take no memory.
        self._descriptor = shared_memory(Snapshots.nbytes(shapes, _QUEUE_LENGTH, processes))
        self._snapshots = Snapshots(map_memory(self._descriptor), shapes, _QUEUE_LENGTH, processes)
        self._processes: list[WorkerProcess[EvaluationJob]] = []
        try:
            for number, envs in enumerate(shares(n_envs, processes)):
                job = EvaluationJob(
                    trainer=os.getpid(),
                    path=list(sys.path),
                    payload=payload,
                    memory=self._descriptor,
                    shapes=shapes,
                    slots=_QUEUE_LENGTH,
                    process=number,
                    processes=processes,
                    n_envs=n_envs,
                    env_ids=envs,
                    episodes=episodes,
                )
                beats = self._snapshots.beats[number : number + 1]
                self._processes.append(WorkerProcess(job, beats, "unidle.engine.evaluate.worker_main"))
                self._processes[-1].start()
        except BaseException:
            self.close()
            raise

    @property
    def requests(self) -> list[Request]:
        """The pending evaluations, oldest first."""
        return list(self._requests)

    @property
    def is_full(self) -> bool:
        """Whether a result must be taken before the next request."""
        return not self._free

    def weights(self, request: Request) -> dict[str, Tensor]:
        """The weights of an evaluation; valid until `release`."""
        return self._snapshots.slots[request.slot]

    def request(self, step: int, due: int, extra: dict[str, Any], weights: dict[str, Tensor]) -> None:
        """Evaluate a copy of `weights`."""
        request = Request(step, due, extra, self._free.popleft())
        for name, view in self.weights(request).items():
            view.copy_(weights[name])
        self._requests.append(request)
        for number in range(len(self._processes)):
            try:
                self._processes[number].send(request.slot)
            except WorkerError as error:
                self._replace(number, error)

    def take(self, seconds: float = 0.0) -> tuple[Request, Evaluation] | None:
        """The oldest evaluation, if it is done within `seconds`; it stays in the queue until `release`.

        Cheap enough to call after every iteration: most calls return without checking.
        """
        now = time.monotonic()
        until = now + seconds
        if not seconds and now < self._next_receive:
            return None
        self._next_receive = now + _WAIT_SECONDS
        while self._requests:
            self._receive()
            oldest = self._requests[0]
            if len(oldest.parts) == len(self._processes):
                return oldest, Evaluation.merge(part for _, part in sorted(oldest.parts.items()))
            left = until - time.monotonic()
            if left <= 0:
                break
            time.sleep(min(left, _WAIT_SECONDS))
        return None

    def release(self) -> None:
        """Remove the oldest evaluation, whose result has been handled, from the queue."""
        self._free.append(self._requests.popleft().slot)

    def _receive(self) -> None:
        check = time.monotonic() >= self._next_check
        if check:
            self._next_check = time.monotonic() + POLL_SECONDS
        for number, process in enumerate(self._processes):
            try:
                while process.has_message():
                    part, faults = process.receive(0.0)
                    first = self._unfinished(number)[0]
                    first.parts[number] = part
                    first.faults += faults
                if check:
                    is_starting = self._snapshots.beats[number] == 0
                    process.check(bool(self._unfinished(number)), self._timeout + _STARTING_SECONDS * is_starting)
            except WorkerError as error:
                if error.kind == "exception":
                    raise _failed(error) from None
                self._replace(number, error)
            except UsageError as error:  # a TrainingError, so that training is saved
                raise _failed(error) from None

    def _unfinished(self, number: int) -> list[Request]:
        return [request for request in self._requests if number not in request.parts]

    def _replace(self, number: int, error: WorkerError) -> None:
        """Restart a process that died and let it repeat its unfinished evaluations."""
        process = self._processes[number]
        while True:
            process.stop()
            if self._restarts_left == 0:
                raise _failed(error)
            self._restarts_left -= 1
            self._say(f"{error} It is restarted and repeats its part of the evaluation.")
            process.close_pipe()
            self._snapshots.beats[number] = 0
            try:
                process.start()
                for request in self._unfinished(number):
                    process.send(request.slot)
                return
            except WorkerError as next_error:  # it died while it started
                error = next_error

    def close(self) -> None:
        """End the processes; idle ones may close their environments first. Unfinished evaluations can be repeated."""
        for process in self._processes:
            process.close_pipe()
        until = time.monotonic() + _CLOSING_SECONDS
        for number, process in enumerate(self._processes):
            process.stop(0.0 if self._unfinished(number) else max(0.0, until - time.monotonic()))
        self._processes = []
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def _failed(error: Exception) -> TrainingError:
    return TrainingError(f"An evaluation failed. {error}")
