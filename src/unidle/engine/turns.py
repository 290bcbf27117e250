"""Turns: a run is a generator, so that several runs can share a process and a GPU.

It yields before it waits for environments or for the GPU, and between parts of its work. The yielded value tells when
it can continue without waiting; the code after the yield waits in any case. So a single run is `run_to_end`, which
ignores what is yielded, and several runs take turns: whichever can continue does (groups/scheduler.py).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator
from typing import TypeVar

_Result = TypeVar("_Result")

IsReady = Callable[[], bool]  # whether the run can continue without waiting
Turns = Generator[IsReady | None, None, _Result]  # None: it can continue at once


class Slots:
    """Lets so many runs at a time do something; who waits longest is next."""

    def __init__(self, count: int) -> None:
        self._free = count
        self._queue: deque[object] = deque()

    def take(self) -> Turns[None]:
        """Wait for a slot; `give_back` must follow."""
        ticket = object()
        self._queue.append(ticket)
        try:
            while not self._is_turn_of(ticket):
                yield lambda: self._is_turn_of(ticket)
            self._free -= 1
        finally:
            self._queue.remove(ticket)

    def give_back(self) -> None:
        """Free a slot that was taken."""
        self._free += 1

    def _is_turn_of(self, ticket: object) -> bool:
        return self._free > 0 and self._queue[0] is ticket
