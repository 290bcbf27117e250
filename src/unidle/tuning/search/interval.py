"""How sure a comparison is: a mean over pairs of measurements, with its 95 % interval."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

# Student's t, for 1 to 15 degrees of freedom, two-sided. Whoever looks at the interval three times and stops at the
# first clear one would be wrong three times as often: each look is at 95 % for all three together (Bonferroni).
_T = (38.19, 7.65, 4.86, 3.96, 3.53, 3.29, 3.13, 3.02, 2.93, 2.87, 2.82, 2.78, 2.75, 2.72, 2.69)
LOOKS = (3, 6, 12)  # pairs after which one may look


@dataclass(frozen=True)
class Interval:
    """A mean, and between which bounds it lies."""

    mean: float
    low: float
    high: float


def interval(values: Sequence[float]) -> Interval:
    """Of the mean of `values`; without bounds if there is but one."""
    mean, count = fmean(values), len(values)
    if count < 2:
        return Interval(mean, -math.inf, math.inf)
    half = _T[min(count - 1, len(_T)) - 1] * stdev(values) / math.sqrt(count)
    return Interval(mean, mean - half, mean + half)


def ratio(pairs: Sequence[tuple[float, float]]) -> Interval:
    """How many times as large the second of each pair is."""
    logs = interval([math.log(second / first) for first, second in pairs])
    return Interval(*(math.exp(min(bound, 700.0)) for bound in (logs.mean, logs.low, logs.high)))
