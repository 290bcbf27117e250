"""Compares two trials in alternating segments, A B B A …, until the ratio of their speeds is clear or time is up."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from time import monotonic

from unidle.tuning.search.interval import INSPECT_AFTER, Interval, ratio
from unidle.tuning.search.trial import Trial

_NO_GAIN = 1.02  # with an upper bound below this, the result is clear too


@dataclass(frozen=True)
class Comparison:
    """The second trial compared with the first."""

    measured: Interval  # ratio of their steps/s
    rate: float  # steps/s of the second
    seconds: float  # of its latest segment


def compare(
    one: Trial,
    other: Trial,
    segment: float,
    patience: float,
    until: float = float("inf"),
    deadline: float = float("inf"),
    on_interim_result: Callable[[Interval, int], None] = lambda measured, pairs: None,
) -> Comparison:
    """Compare two started trials in segments of `segment` seconds; each may take at most `patience` seconds.

    After `until` (monotonic clock) the smallest number of pairs is enough; after `deadline`, any number is.
    """
    pairs: list[tuple[float, float]] = []
    while True:
        is_forwards = len(pairs) % 2 == 0
        first, second = (one, other) if is_forwards else (other, one)
        done = {trial: trial.train_segment(segment, patience) for trial in (first, second)}
        pairs.append((done[one].rate, done[other].rate))
        measured, now = ratio(pairs), monotonic()
        on_interim_result(measured, len(pairs))
        is_clear = len(pairs) in INSPECT_AFTER and (measured.low > 1 or measured.high < _NO_GAIN)
        is_late = now > deadline or (now > until and len(pairs) >= INSPECT_AFTER[0])
        if is_clear or is_late or len(pairs) == INSPECT_AFTER[-1]:
            rates = [rate for _, rate in pairs]
            return Comparison(measured, sum(rates) / len(rates), done[other].seconds)
