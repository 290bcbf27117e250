"""Statistics of a reading over a whole command in constant memory, since a command may run for days."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from unidle.meter.sensors.reading import Sample


@dataclass
class LifetimeStats:
    """Min, mean and max so far; a value holds until the next sample, so the mean is over time."""

    least: float = float("inf")
    largest: float = float("-inf")
    _last: Sample | None = None
    _held_ns: int = 0
    _value_ns: float = 0.0
    # (_held_ns, _value_ns) at the start of the first value above 0 and at the end of the last one.
    _first_used: tuple[int, float] | None = None
    _last_used: tuple[int, float] | None = None

    def add(self, samples: Iterable[Sample]) -> None:
        """Add samples, oldest first."""
        for sample in samples:
            if self._last is not None:
                held = max(0, sample.at_ns - self._last.at_ns)
                self._held_ns += held
                self._value_ns += held * self._last.value
                if self._last.value > 0:
                    self._last_used = self._held_ns, self._value_ns
            if sample.value > 0 and self._first_used is None:
                self._first_used = self._held_ns, self._value_ns
            self._last = sample
            self.least, self.largest = min(self.least, sample.value), max(self.largest, sample.value)

    @property
    def latest(self) -> float | None:
        """The last value; None before the first sample."""
        return self._last.value if self._last else None

    @property
    def mean(self) -> float | None:
        """Time-weighted mean; None before the first sample."""
        return self._value_ns / self._held_ns if self._held_ns else self.latest

    @property
    def in_use(self) -> tuple[float, float] | None:
        """Seconds from the first value above 0 to the end of the last, and the mean over them; None if all are 0."""
        if self._first_used is None or self._last_used is None or self._last_used[0] == self._first_used[0]:
            return None
        held_ns, value_ns = (last - first for first, last in zip(self._first_used, self._last_used))
        return held_ns * 1e-9, value_ns / held_ns
