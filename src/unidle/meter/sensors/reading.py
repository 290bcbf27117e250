"""Readings and samples: a reading is a quantity that its source updates at its own rate; a sample is one value of it.

Polling faster than the source updates returns the same value again. Repeats are not samples: counting them would
suggest a precision that the source does not have.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class Sample:
    """A value and its timestamp."""

    at_ns: int  # by perf_counter_ns, the timeline's clock
    value: float


@dataclass(frozen=True)
class Reading:
    """A quantity that a source reports."""

    name: str
    unit: str
    period_s: float
    """Shortest update period of the source; an equal value within it is a repeat."""
    full: float | None = None
    """Value of a full bar; None: the largest value seen."""
    is_total: bool = False
    """Whether it is a counter, of which only the latest value matters."""


class Source(Protocol):
    """Anything with readings: a GPU, the host, a process tree."""

    @property
    def name(self) -> str:
        """Short display name, such as gpu 0."""

    @property
    def readings(self) -> Sequence[Reading]:
        """All possible readings, in display order."""

    @property
    def unavailable(self) -> Set[str]:
        """Names of readings this source does not have; shown as –, never as 0."""

    def poll(self) -> dict[str, list[Sample]]:
        """Return the samples that are new since the last call, by reading name, oldest first."""


EARLY = 0.97  # of a period counts as a whole one, since polls are never exactly one period apart


class RepeatFilter:
    """Drops repeated values from sources that do not timestamp them."""

    def __init__(self, period_s: float) -> None:
        self._period_ns = round(EARLY * period_s * 1e9)
        self._last: Sample | None = None

    def take(self, at_ns: int, value: float) -> list[Sample]:
        """Return the value as a new sample, or nothing if it is a repeat."""
        last = self._last
        if last is not None and value == last.value and at_ns - last.at_ns < self._period_ns:
            return []
        self._last = Sample(at_ns, value)
        return [self._last]
