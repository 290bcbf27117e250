"""A reading is a number that somebody else renews at a pace of their own; a sample is one value that it had.

Asking faster than the source renews yields the same value again. Such an answer is no sample: counted, it would feign
a precision that the source does not have.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class Sample:
    """A value and the instant it is from."""

    at_ns: int  # by perf_counter_ns, the timeline's clock
    value: float


@dataclass(frozen=True)
class Reading:
    """What is read."""

    name: str
    unit: str
    period_s: float
    """Its source renews it no more often than this; the same value within it is the same sample."""
    full: float | None = None
    """What a full bar means; none: the largest value seen."""
    is_total: bool = False
    """Whether it only grows, so that only the latest value says anything."""


class Source(Protocol):
    """Whoever has readings: a GPU, the host, a process."""

    @property
    def name(self) -> str:
        """As a reader knows it, and short: gpu 0."""

    @property
    def readings(self) -> Sequence[Reading]:
        """All it might have, in the order to show them."""

    @property
    def lacking(self) -> Set[str]:
        """The names of those it turned out not to have: to be shown as –, and never as 0."""

    def poll(self) -> dict[str, list[Sample]]:
        """The samples that are new since the last call, by the reading's name, oldest first."""


EARLY = 0.97  # of a period counts as all of it, so that looks one period apart need not be on the dot


class Renewed:
    """Tells a renewed value from one that was only asked for again, for sources that do not stamp their values."""

    def __init__(self, period_s: float) -> None:
        self._period_ns = round(EARLY * period_s * 1e9)
        self._last: Sample | None = None

    def take(self, at_ns: int, value: float) -> list[Sample]:
        """The value as a new sample, or nothing: it is the last one again, and not due to be renewed."""
        last = self._last
        if last is not None and value == last.value and at_ns - last.at_ns < self._period_ns:
            return []
        self._last = Sample(at_ns, value)
        return [self._last]
