"""Confidence intervals (95 %) of means over pairs of measurements."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

# Student's t, two-sided, for 1 to 15 degrees of freedom. The interval is inspected up to three times, so each
# inspection is corrected to keep 95 % for all three together (Bonferroni).
_T = (38.19, 7.65, 4.86, 3.96, 3.53, 3.29, 3.13, 3.02, 2.93, 2.87, 2.82, 2.78, 2.75, 2.72, 2.69)
INSPECT_AFTER = (3, 6, 12)  # numbers of pairs at which the interval is inspected


@dataclass(frozen=True)
class Interval:
    """A mean with its bounds."""

    mean: float
    low: float
    high: float


def interval(values: Sequence[float]) -> Interval:
    """Return the interval of the mean of `values`; unbounded for a single value."""
    mean, count = fmean(values), len(values)
    if count < 2:
        return Interval(mean, -math.inf, math.inf)
    half = _T[min(count - 1, len(_T)) - 1] * stdev(values) / math.sqrt(count)
    return Interval(mean, mean - half, mean + half)


def ratio(pairs: Sequence[tuple[float, float]]) -> Interval:
    """Return the interval of the geometric mean of second / first."""
    logs = interval([math.log(second / first) for first, second in pairs])
    return Interval(*(math.exp(min(bound, 700.0)) for bound in (logs.mean, logs.low, logs.high)))
