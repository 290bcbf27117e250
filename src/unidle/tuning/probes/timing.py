"""Robust timing of repeated measurements."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from time import perf_counter

import numpy as np


def lower_quartile(seconds: Iterable[float]) -> float:
    """Return the lower quartile: other programs only make measurements longer."""
    return float(np.quantile(list(seconds), 0.25))


def seconds_of(call: Callable[[], object], share: float) -> float:
    """Return the typical time of a call after a warm-up."""
    for _ in range(5):
        call()
    return typical_seconds(lambda: _timed(call), share / 2)


def _timed(call: Callable[[], object]) -> float:
    began = perf_counter()
    call()
    return perf_counter() - began


def typical_seconds(measure: Callable[[], float], share: float) -> float:
    """Return the lower quartile of `measure`, repeated for `share` seconds and at least three times."""
    found: list[float] = []
    until = perf_counter() + share
    while len(found) < 3 or perf_counter() < until:
        found.append(measure())
    return lower_quartile(found)
