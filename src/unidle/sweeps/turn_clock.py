"""How long a run uses the GPU, or on a CPU the process, that it shares with others."""

from __future__ import annotations

from collections import deque
from contextlib import closing
from dataclasses import dataclass
from time import perf_counter

import torch

from unidle.engine.turns import Turns


@dataclass
class _Turn:
    """A turn: when it began, and on a GPU the events at its ends."""

    began: float
    first: torch.cuda.Event | None
    last: torch.cuda.Event | None = None


class TurnClock:
    """Sums the times of a run's turns; on a GPU each lasts until what it queued there is done.

    Waiting for environments is not in them: then other runs have their turns.
    """

    def __init__(self, stream: torch.cuda.Stream | None, seconds: float = 0.0) -> None:
        """`seconds`: those of an earlier process."""
        self._stream, self._seconds = stream, seconds
        self._turn: _Turn | None = None  # that runs
        self._queued: deque[_Turn] = deque()  # on which the GPU may still work

    @property
    def seconds(self) -> float:
        """The time so far."""
        self._add_queued(wait=True)
        return self._seconds + (0.0 if self._turn is None else self._length(self._turn, self._mark()))

    def timed(self, turns: Turns[None]) -> Turns[None]:
        """The same turns, with their times taken."""
        with closing(turns):
            while True:
                self._turn = _Turn(perf_counter(), self._mark())
                try:
                    is_ready = next(turns)
                except StopIteration:
                    return
                finally:
                    self._end_turn(self._turn)
                yield is_ready

    def _mark(self) -> torch.cuda.Event | None:
        if self._stream is None:
            return None
        event = torch.cuda.Event(enable_timing=True)
        event.record(self._stream)
        return event

    def _end_turn(self, turn: _Turn) -> None:
        self._turn = None
        turn.last = self._mark()
        if turn.last is None:
            self._seconds += self._length(turn, None)
        else:
            self._queued.append(turn)
            self._add_queued(wait=False)

    def _add_queued(self, *, wait: bool) -> None:
        while self._queued and (wait or (self._queued[0].last is not None and self._queued[0].last.query())):
            turn = self._queued.popleft()
            self._seconds += self._length(turn, turn.last)

    def _length(self, turn: _Turn, last: torch.cuda.Event | None) -> float:
        if turn.first is None or last is None:
            return perf_counter() - turn.began
        last.synchronize()
        return turn.first.elapsed_time(last) / 1e3
