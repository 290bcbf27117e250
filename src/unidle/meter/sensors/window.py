"""The last seconds of a reading: min, mean, max, and a sparkline that shows every burst.

A value holds until the next sample, so the mean is over time and does not depend on how often the source is polled.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from unidle.meter.sensors.reading import Sample

_BLOCKS = "▁▂▃▄▅▆▇█"


@dataclass(frozen=True)
class Summary:
    """A reading over a window."""

    latest: float
    least: float
    mean: float
    largest: float
    per_second: float
    """Update rate, without repeats."""


class Window:
    """The samples of the last `seconds`, plus the one before, which still held when the window began."""

    def __init__(self, seconds: float) -> None:
        self._length_ns = round(seconds * 1e9)
        self._samples: deque[Sample] = deque()

    def add(self, samples: Iterable[Sample]) -> None:
        """Add samples; one that is not later than the last is a repeat and is dropped."""
        for sample in samples:
            if not self._samples or sample.at_ns > self._samples[-1].at_ns:
                self._samples.append(sample)

    def summary(self, now_ns: int) -> Summary | None:
        """Summarise the window that ends now; None before the first sample."""
        self._forget(now_ns)
        if not self._samples:
            return None
        begin = max(now_ns - self._length_ns, self._samples[0].at_ns)
        ends = [*(sample.at_ns for sample in self._samples), max(now_ns, self._samples[-1].at_ns)][1:]
        held = [end - max(sample.at_ns, begin) for sample, end in zip(self._samples, ends)]
        values = [sample.value for sample in self._samples]
        whole = sum(held)
        mean = sum(v * h for v, h in zip(values, held)) / whole if whole else values[-1]
        # n samples span n - 1 periods.
        inside = [sample.at_ns for sample in self._samples if sample.at_ns >= begin]
        span = inside[-1] - inside[0] if inside else 0
        per_second = (len(inside) - 1) / (span * 1e-9) if span else 0.0
        # Rounding must not push the mean outside min and max.
        least, largest = min(values), max(values)
        return Summary(values[-1], least, min(max(mean, least), largest), largest, per_second)

    def cells(self, now_ns: int, n: int) -> list[float | None]:
        """Return the max of each of `n` equal parts, or the value that held; None before the first sample."""
        self._forget(now_ns)
        begin = now_ns - self._length_ns
        edges = [begin + self._length_ns * i // n for i in range(n + 1)]
        pending = deque(self._samples)
        held: float | None = None
        found: list[float | None] = []
        for start, end in pairwise(edges):
            inside = []
            while pending and (pending[0].at_ns < end or end == now_ns):
                sample = pending.popleft()
                held = sample.value
                if sample.at_ns >= start:
                    inside.append(held)
            found.append(max(inside) if inside else held)
        return found

    def _forget(self, now_ns: int) -> None:
        begin = now_ns - self._length_ns
        while len(self._samples) > 1 and self._samples[1].at_ns <= begin:
            self._samples.popleft()


def sparkline(cells: Sequence[float | None], full: float | None = None) -> str:
    """Draw one character per cell, scaled to `full` (None: the largest); blank where unknown."""
    top = full or max((cell for cell in cells if cell is not None), default=0.0) or 1.0
    last = len(_BLOCKS) - 1
    return "".join(" " if cell is None else _BLOCKS[min(last, max(0, round(cell / top * last)))] for cell in cells)
