"""A worker process whose environments wait: its slices are all under way at once, on an event loop."""

from __future__ import annotations

import select
from collections import deque
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from unidle.envs.aio.rate_limit import share_among
from unidle.envs.aio.slots import AsyncSlots
from unidle.envs.pool.worker import STEP, Job, Worker
from unidle.envs.spec import EnvSpec


class AsyncWorker(Worker):
    """Like `Worker`, but a slice is first begun, and stepped when the loop is through with it.

    The loop rings `go` too, so that there is still one thing to wait for; as ever a ring says nothing.
    """

    def __init__(self, pipe: Connection, job: Job, maker: Any, env_spec: EnvSpec) -> None:
        self._through: deque[int] = deque()  # slices, from the loop
        self._begun: set[int] = set()
        super().__init__(pipe, job, maker, env_spec)
        self._first_slice = job.slices[0]
        self._spin_seconds = 0.0  # it would take the interpreter from the loop

    def _make_slots(self, maker: Any, env_spec: EnvSpec, job: Job) -> AsyncSlots:
        share_among(job.workers)
        go = self._board.go[job.worker]

        def on_through(number: int) -> None:
            self._through.append(number)
            go.ring()

        place = (self._block, job.lines, job.seed, job.first_index)
        return AsyncSlots(maker, env_spec, *place, on_through, self._is_alone)

    def _is_alone(self) -> bool:
        """Whether the trainer has hung up."""
        look = select.poll()
        look.register(self._pipe.fileno(), select.POLLRDHUP)
        return bool(look.poll(0))

    def _step_one(self) -> bool:
        """Begin what was handed over, and hand back what is through; False if there is neither."""
        steps = self._first_slice + np.flatnonzero(self._own_flags == STEP)
        handed = [number for number in steps.tolist() if number not in self._begun]
        if handed:
            self._begun.update(handed)
            self._envs.begin([(number, *self._own[number]) for number in handed])
        is_idle = not handed and not self._through
        while self._through:
            number = self._through.popleft()
            self._begun.discard(number)
            self._hand_back(number)
        return not is_idle

    def _is_wanted(self) -> bool:
        """Whether there is a command, a slice to begin, or one that is through."""
        if self._board.commands[self._number] or self._through:
            return True
        return self._own_flags.tobytes().count(STEP) > len(self._begun)
