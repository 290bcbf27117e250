"""How long something usually takes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from time import perf_counter

import numpy as np


def usual(seconds: Iterable[float]) -> float:
    """What something takes when nobody is in its way: the lower quartile, for other programs only make it longer."""
    return float(np.quantile(list(seconds), 0.25))


def seconds_of(call: Callable[[], object], share: float) -> float:
    """What a call usually takes, after a few that warm up."""
    for _ in range(5):
        call()
    return typical(lambda: _timed(call), share / 2)


def _timed(call: Callable[[], object]) -> float:
    began = perf_counter()
    call()
    return perf_counter() - began


def typical(measure: Callable[[], float], share: float) -> float:
    """What `measure` usually returns, asked for `share` seconds, and at least three times."""
    found: list[float] = []
    until = perf_counter() + share
    while len(found) < 3 or perf_counter() < until:
        found.append(measure())
    return usual(found)
