"""A worker process whose environments wait: its slices are all under way at once, on an event loop."""

from __future__ import annotations

import select
from collections import deque
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from unidle.envs.async_slots import AsyncSlots
from unidle.envs.contract import Contract
from unidle.envs.turns import share_among
from unidle.envs.worker import STEP, Job, Worker


class AsyncWorker(Worker):
    """Like `Worker`, but a slice is first begun, and stepped when the loop is through with it.

    The loop posts `go` too, so that there is still one thing to wait for; as ever a post alone says nothing.
    """

    spin_seconds = 0.0  # it would take the interpreter from the loop

    def __init__(self, pipe: Connection, job: Job, maker: Any, contract: Contract) -> None:
        self._through: deque[int] = deque()  # slices, from the loop
        self._begun: set[int] = set()
        super().__init__(pipe, job, maker, contract)
        self._first_slice = job.slices[0]

    def _make_slots(self, maker: Any, contract: Contract, job: Job) -> AsyncSlots:
        share_among(job.workers)
        go = self._board.go[job.worker]

        def on_through(number: int) -> None:
            self._through.append(number)
            if len(self._through) == 1:  # else it was posted before, and all that is there is taken at once
                go.post()

        place = (self._block, job.lines, job.seed, job.first_index)
        return AsyncSlots(maker, contract, *place, on_through, self._is_alone)

    def _is_alone(self) -> bool:
        """Whether the trainer has hung up."""
        look = select.poll()
        look.register(self._pipe.fileno(), select.POLLRDHUP)
        return bool(look.poll(0))

    def _step_one(self) -> bool:
        """Begin what was handed over, and hand back what is through; False if there is neither."""
        go, was_posted = self._board.go[self._number], False
        while go.take():  # one look for all that was posted, rather than one for each
            was_posted = True
        if was_posted:
            go.post()  # and one more after it: some post may have been for a command, or for the end
        first = self._first_slice
        flags = self._board.flags[first : first + len(self._own)]
        handed = [number for number in (first + np.flatnonzero(flags == STEP)).tolist() if number not in self._begun]
        if handed:
            self._begun.update(handed)
            self._envs.begin([(number, *self._own[number]) for number in handed])
        is_idle = not handed and not self._through
        while self._through:
            number = self._through.popleft()
            self._begun.discard(number)
            self._hand_back(number)
        return not is_idle
