"""A reading over the whole life of something, in a few numbers: it may last for days."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from unidle.meter.reading import Sample


@dataclass
class Life:
    """Least, mean and largest value so far; a value holds until the next sample, so the mean is over time."""

    least: float = float("inf")
    largest: float = float("-inf")
    _last: Sample | None = None
    _held_ns: int = 0
    _value_ns: float = 0.0

    def add(self, samples: Iterable[Sample]) -> None:
        """Take note of samples, oldest first."""
        for sample in samples:
            if self._last is not None:
                held = max(0, sample.at_ns - self._last.at_ns)
                self._held_ns += held
                self._value_ns += held * self._last.value
            self._last = sample
            self.least, self.largest = min(self.least, sample.value), max(self.largest, sample.value)

    @property
    def latest(self) -> float | None:
        """The last value; None before the first."""
        return self._last.value if self._last else None

    @property
    def mean(self) -> float | None:
        """None before the first sample."""
        return self._value_ns / self._held_ns if self._held_ns else self.latest
