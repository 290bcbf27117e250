"""A worker process of AsyncEnvs: all its slices are in flight at once, on an event loop."""

from __future__ import annotations

import select
from collections import deque
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from unidle.envs.aio.rate_limit import share_limits
from unidle.envs.aio.slots import AsyncSlots
from unidle.envs.pool.worker import STEP, Worker, WorkerJob
from unidle.envs.spec import EnvSpec


class AsyncWorker(Worker):
    """Like `Worker`, but slices are sent to the event loop, and handed back when the loop has finished them.

    The loop also rings `go`, so the worker waits for a single doorbell.
    """

    def __init__(self, pipe: Connection, job: WorkerJob, maker: Any, env_spec: EnvSpec) -> None:
        self._finished: deque[int] = deque()  # slices that the loop has finished
        self._sent: set[int] = set()
        super().__init__(pipe, job, maker, env_spec)
        self._first_slice = job.slices[0]
        self._spin_seconds = 0.0  # spinning would hold the GIL, which the loop needs

    def _make_slots(self, maker: Any, env_spec: EnvSpec, job: WorkerJob) -> AsyncSlots:
        share_limits(job.workers)
        go = self._signals.go[job.worker]

        def on_finished(number: int) -> None:
            self._finished.append(number)
            go.ring()

        args = (self._block, job.env_ids, job.seed, job.first_index)
        return AsyncSlots(maker, env_spec, *args, on_finished, self._is_closed)

    def _is_closed(self) -> bool:
        """Whether the trainer has closed the pipe."""
        poll = select.poll()
        poll.register(self._pipe.fileno(), select.POLLRDHUP)
        return bool(poll.poll(0))

    def _step_next(self) -> bool:
        """Send new slices to the loop and hand finished ones back; False if there is neither."""
        steps = self._first_slice + np.flatnonzero(self._own_flags == STEP)
        new = [number for number in steps.tolist() if number not in self._sent]
        if new:
            self._sent.update(new)
            self._envs.send([(number, *self._own[number]) for number in new])
        is_idle = not new and not self._finished
        while self._finished:
            number = self._finished.popleft()
            self._sent.discard(number)
            self._step_slice(number)
        return not is_idle

    def _has_work(self) -> bool:
        """Whether there is a command, a new slice or a finished one."""
        if self._signals.commands[self._number] or self._finished:
            return True
        return self._own_flags.tobytes().count(STEP) > len(self._sent)
