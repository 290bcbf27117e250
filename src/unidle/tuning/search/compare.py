"""Two trials that take turns, A B B A …, a stretch each, until their ratio is clear or time is up."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from time import monotonic

from unidle.tuning.search.interval import LOOKS, Interval, ratio
from unidle.tuning.search.trial import Trial

_NO_GAIN = 1.02  # an upper bound below this is clear too


@dataclass(frozen=True)
class Comparison:
    """How the second trial did beside the first."""

    measured: Interval  # times as fast
    rate: float  # its own steps a second
    seconds: float  # of its latest stretch


def compare(
    one: Trial,
    other: Trial,
    stretch: float,
    patience: float,
    until: float = float("inf"),
    deadline: float = float("inf"),
    on_look: Callable[[Interval, int], None] = lambda measured, pairs: None,
) -> Comparison:
    """Compare two started trials in stretches of so many seconds; for each they are waited for `patience` seconds.

    From `until` on, a time of the monotonic clock, the fewest pairs have to do; from `deadline` on, any.
    """
    pairs: list[tuple[float, float]] = []
    while True:
        is_forwards = len(pairs) % 2 == 0
        first, second = (one, other) if is_forwards else (other, one)
        done = {trial: trial.go(stretch, patience) for trial in (first, second)}
        pairs.append((done[one].rate, done[other].rate))
        measured, now = ratio(pairs), monotonic()
        on_look(measured, len(pairs))
        is_clear = len(pairs) in LOOKS and (measured.low > 1 or measured.high < _NO_GAIN)
        is_late = now > deadline or (now > until and len(pairs) >= LOOKS[0])
        if is_clear or is_late or len(pairs) == LOOKS[-1]:
            rates = [rate for _, rate in pairs]
            return Comparison(measured, sum(rates) / len(rates), done[other].seconds)
