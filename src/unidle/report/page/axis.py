"""Chart axes with round ticks; thinning and running means of long series."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeGuard

_LARGEST = 1e150  # beyond this, spans overflow; such a loss is practically infinite
_TIME_UNITS = ((2 * 3600.0, 3600.0, "h"), (120.0, 60.0, "min"))  # from, seconds, name


@dataclass(frozen=True)
class Axis:
    """A range of values and the round values to mark in it."""

    low: float
    high: float
    step: float

    @property
    def ticks(self) -> list[float]:
        """Multiples of `step` from `low` to `high`."""
        first = math.ceil(self.low / self.step - 1e-6)
        last = math.floor(self.high / self.step + 1e-6)
        return [_trim(i * self.step, self.step) for i in range(first, last + 1)]

    def fraction(self, value: float) -> float:
        """Return the position of `value` on the axis: 0 at `low`, 1 at `high`."""
        return (value - self.low) / (self.high - self.low)

    def label(self, tick: float) -> str:
        """Return the label of a tick: 0.25, 500, 1.5k, 2e-5; precise enough to differ from the next."""
        size = max(abs(self.low), abs(self.high))
        if size >= 1e15 or size < 1e-3:
            mantissa, mark, power = f"{tick:.6g}".partition("e")
            return f"{mantissa}e{int(power)}" if mark else mantissa
        scales = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))
        scale, suffix = next((s for s in scales if abs(tick) >= s[0]), (1.0, ""))
        digits = max(0, math.ceil(-math.log10(self.step / scale) - 1e-9))
        text = f"{tick / scale:.{digits}f}"
        return (text.rstrip("0").rstrip(".") if "." in text else text) + suffix


def plottable(value: float | None) -> TypeGuard[float]:
    """Whether `value` can be drawn: present, finite and not absurdly large."""
    return value is not None and abs(value) < _LARGEST  # false for NaN too


def fit_axis(values: Iterable[float | None], *, count: int, from_zero: bool = False, margin: float = 0.0) -> Axis:
    """Fit an axis to `values` with at most `count` intervals and a `margin` (share of its span) at the ends."""
    drawn = [value for value in values if plottable(value)]
    if from_zero or not drawn:
        drawn.append(0.0)
    low, high = min(drawn), max(drawn)
    size = max(abs(low), abs(high))
    if high - low <= 1e-9 * size:  # a single value: add room so that its line is in the middle
        room = 0.1 * size or 1.0
        low, high = (low, high + room) if from_zero else (low - room, high + room)
    margin *= high - low
    # The margin must not cross zero if no value does.
    low = max(0.0, low - margin) if low >= 0 else low - margin
    high = min(0.0, high + margin) if high <= 0 else high + margin
    return Axis(low, high, _nice_step(high - low, count))


def _nice_step(span: float, count: int) -> float:
    """Return the smallest of 1, 2, 5 × 10ⁿ that divides `span` into at most `count` intervals."""
    rough = span / count
    power = 10.0 ** math.floor(math.log10(rough))
    return next(m * power for m in (1, 2, 5, 10) if m * power >= rough * (1 - 1e-9))


def _trim(value: float, step: float) -> float:
    """Drop the float noise of 3 × 0.1."""
    return round(value, max(0, 2 - math.floor(math.log10(step))))


def time_unit(longest: float) -> tuple[float, str]:
    """Return seconds and name of the best unit for a time axis up to `longest` seconds."""
    return next(((seconds, name) for start, seconds, name in _TIME_UNITS if longest >= start), (1.0, "s"))


def running_mean(values: Sequence[float | None], window: int) -> list[float | None]:
    """Return the mean of the `window` values around each; gaps stay gaps."""
    sums, counts = [0.0], [0]
    for value in values:
        sums.append(sums[-1] + (value if plottable(value) else 0.0))
        counts.append(counts[-1] + plottable(value))
    means: list[float | None] = []
    for i, value in enumerate(values):
        start, stop = max(0, i - window // 2), min(len(values), i + window // 2 + 1)
        means.append((sums[stop] - sums[start]) / (counts[stop] - counts[start]) if plottable(value) else None)
    return means


def thinned_indices(values: Sequence[float | None], limit: int) -> list[int]:
    """Return at most `limit` indices of a long series that keep its peaks, troughs and gaps."""
    if len(values) <= limit:
        return list(range(len(values)))
    buckets = (limit - 2) // 3  # each keeps a lowest, a highest and a gap; then both ends
    kept = {0, len(values) - 1}
    for bucket in range(buckets):
        start = bucket * len(values) // buckets
        stop = (bucket + 1) * len(values) // buckets
        drawn = [(value, i) for i in range(start, stop) if plottable(value := values[i])]
        if drawn:
            kept |= {min(drawn)[1], max(drawn)[1]}
        if len(drawn) < stop - start:
            kept.add(next(i for i in range(start, stop) if not plottable(values[i])))
    return sorted(kept)
