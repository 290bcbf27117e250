"""Evaluation beside training: a queue of copies of the policy, which processes of their own play with.

1. Training never waits for an evaluation, unless as many as there are places are asked for and not done.
2. Each process plays its own environments of every evaluation, in the order asked for; so evaluations are done in that
   order, and what comes out does not depend on the number of processes.
3. The weights stay on the shelf until the result was taken: a process that dies is started again and plays what it owes
   once more, and a checkpoint holds what is not done.
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
from unidle.engine.evaluate.worker import EvaluationJob, Shelf, shapes_of, shares
from unidle.envs.make import EnvMaker
from unidle.envs.pool.worker_process import POLL_SECONDS, WorkerError, WorkerProcess
from unidle.envs.protocol import Fault
from unidle.envs.shared_block import map_memory, shared_memory
from unidle.envs.spec import EnvSpec
from unidle.errors import TrainingError, UsageError
from unidle.nn.actor_critic import NetworkFactory

_PLACES = 32  # evaluations asked for and not done, at most
_WAIT_SECONDS = 0.02  # between two looks whether one is done, of somebody who waits for it
_CLOSING_SECONDS = 5.0  # that all processes together have to close their environments and end by themselves
_STARTING_SECONDS = 120.0  # that a process may need, beside `env_timeout`, to import and to make its environments


@dataclass
class Asked:
    """An evaluation that is not done yet, or whose result was not taken yet."""

    step: int
    about: dict[str, Any]  # whatever else goes into its record: tensors and plain values
    place: int
    parts: dict[int, Evaluation] = field(default_factory=dict)  # by process
    faults: list[Fault] = field(default_factory=list)


class Beside:
    """Processes that evaluate copies of a policy."""

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
        """`state` is the policy's, for its shapes; there are at most as many processes as environments.

        The processes start by themselves: nobody waits for them.
        """
        episodes, shapes = config.run.eval_episodes, shapes_of(state)
        n_envs = n_evaluation_envs(episodes)
        self._say = say
        self._patience = config.engine.env_timeout or float("inf")
        self._restarts_left = config.engine.max_env_restarts
        self._asked: deque[Asked] = deque()
        self._free = deque(range(_PLACES))
        self._next_look = self._next_hearing = 0.0
        try:
            cargo = cloudpickle.dumps((maker, env_spec, config, network))
        except Exception as error:
            raise UsageError(
                f"The environment factory or the network cannot be sent to other processes ({error}); use "
                "--eval-workers 0."
            ) from None
        # Pages of it that nothing is written to take no memory.
        self._descriptor = shared_memory(Shelf.nbytes(shapes, _PLACES, processes))
        self._shelf = Shelf(map_memory(self._descriptor), shapes, _PLACES, processes)
        self._processes: list[WorkerProcess[EvaluationJob]] = []
        try:
            for number, lines in enumerate(shares(n_envs, processes)):
                job = EvaluationJob(
                    trainer=os.getpid(),
                    path=list(sys.path),
                    cargo=cargo,
                    memory=self._descriptor,
                    shapes=shapes,
                    places=_PLACES,
                    process=number,
                    processes=processes,
                    n_envs=n_envs,
                    env_ids=lines,
                    episodes=episodes,
                )
                beats = self._shelf.beats[number : number + 1]
                self._processes.append(WorkerProcess(job, beats, "unidle.engine.evaluate.worker_main"))
                self._processes[-1].start()
        except BaseException:
            self.close()
            raise

    @property
    def asked(self) -> list[Asked]:
        """Evaluations not taken yet, the oldest first."""
        return list(self._asked)

    @property
    def is_full(self) -> bool:
        """Whether a result must be taken before the next evaluation can be asked for."""
        return not self._free

    def weights(self, asked: Asked) -> dict[str, Tensor]:
        """The weights that are evaluated; valid until `release`."""
        return self._shelf.places[asked.place]

    def ask(self, step: int, about: dict[str, Any], weights: dict[str, Tensor]) -> None:
        """Have a copy of `weights` evaluated."""
        asked = Asked(step, about, self._free.popleft())
        for name, view in self.weights(asked).items():
            view.copy_(weights[name])
        self._asked.append(asked)
        for number in range(len(self._processes)):
            try:
                self._processes[number].send(asked.place)
            except WorkerError as gone:
                self._replace(number, gone)

    def take(self, seconds: float = 0.0) -> tuple[Asked, Evaluation] | None:
        """The oldest evaluation if it is done, or will be within so many seconds. It stays until `release`.

        May be asked after every iteration: most of the time it does not even look.
        """
        now = time.monotonic()
        until = now + seconds
        if not seconds and now < self._next_hearing:
            return None
        self._next_hearing = now + _WAIT_SECONDS
        while self._asked:
            self._hear()
            oldest = self._asked[0]
            if len(oldest.parts) == len(self._processes):
                return oldest, Evaluation.together(part for _, part in sorted(oldest.parts.items()))
            left = until - time.monotonic()
            if left <= 0:
                break
            time.sleep(min(left, _WAIT_SECONDS))
        return None

    def release(self) -> None:
        """The oldest evaluation was taken account of."""
        self._free.append(self._asked.popleft().place)

    def _hear(self) -> None:
        look = time.monotonic() >= self._next_look
        if look:
            self._next_look = time.monotonic() + POLL_SECONDS
        for number, process in enumerate(self._processes):
            try:
                while process.has_message():
                    part, faults = process.receive(0.0)
                    first = self._owed(number)[0]
                    first.parts[number] = part
                    first.faults += faults
                if look:
                    is_starting = self._shelf.beats[number] == 0
                    process.check(bool(self._owed(number)), self._patience + _STARTING_SECONDS * is_starting)
            except WorkerError as gone:
                if gone.kind == "exception":
                    raise _hopeless(gone) from None
                self._replace(number, gone)
            except UsageError as error:  # as far as training is concerned, which is to be saved
                raise _hopeless(error) from None

    def _owed(self, number: int) -> list[Asked]:
        return [asked for asked in self._asked if number not in asked.parts]

    def _replace(self, number: int, gone: WorkerError) -> None:
        """Start a process that died again, and have it play what it owes."""
        process = self._processes[number]
        process.stop()
        if self._restarts_left == 0:
            raise _hopeless(gone)
        self._restarts_left -= 1
        self._say(f"{gone} It plays its part of the evaluation anew.")
        process.close_pipe()
        self._shelf.beats[number] = 0
        process.start()
        for asked in self._owed(number):
            process.send(asked.place)

    def close(self) -> None:
        """End the processes: idle ones close their environments; what the others are at can be done anew."""
        for process in self._processes:
            process.close_pipe()
        until = time.monotonic() + _CLOSING_SECONDS
        for number, process in enumerate(self._processes):
            process.stop(0.0 if self._owed(number) else max(0.0, until - time.monotonic()))
        self._processes = []
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def _hopeless(error: Exception) -> TrainingError:
    return TrainingError(f"An evaluation cannot go on. {error}")
