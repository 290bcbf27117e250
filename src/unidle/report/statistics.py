"""Statistics over several runs of one task: interquartile mean with a bootstrap interval (Agarwal et al., 2021).

All runs train on one task, so the stratified bootstrap has a single stratum: it resamples runs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

MIN_RUNS = 3  # for an interval
_RESAMPLES = 5000
_TAIL = 0.025  # of the 95 % interval, at each end
_MAX_POINTS = 400  # of an aggregated curve


@dataclass(frozen=True)
class Spread:
    """How one figure is spread over runs; unknown figures are None."""

    iqm: float | None = None
    low: float | None = None  # of the 95 % interval of the interquartile mean, from three runs on
    high: float | None = None
    mean: float | None = None
    std: float | None = None  # with n − 1, from two runs on
    median: float | None = None
    best: float | None = None
    worst: float | None = None


@dataclass(frozen=True)
class Curve:
    """The interquartile mean over runs at each x, with its interval where enough runs count."""

    x: list[float]
    iqm: list[float]
    low: list[float | None]
    high: list[float | None]


def interquartile_mean(values: np.ndarray) -> np.ndarray:
    """Return the mean over runs [run, *] without the lowest and the highest ⌊n / 4⌋ values: the mean of up to three."""
    cut = len(values) // 4
    return np.sort(values, axis=0)[cut : len(values) - cut].mean(axis=0)


def bootstrap_interval(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the ends of the 95 % interval of the interquartile mean over runs [run, *]: the percentile bootstrap."""
    means = np.tensordot(_resampling_weights(len(values)), np.sort(values, axis=0), axes=1)  # [resample, *]
    low, high = np.quantile(means, (_TAIL, 1 - _TAIL), axis=0)
    return low, high


@lru_cache(maxsize=4)
def _resampling_weights(n_runs: int) -> np.ndarray:
    """Return each rank's share in the interquartile mean of each resample [resample, rank]; always the same ones.

    A resample is drawn by rank, so the means of all resamples are one product with the sorted values.
    """
    cut = n_runs // 4
    drawn = np.random.default_rng(0).integers(n_runs, size=(_RESAMPLES, n_runs))
    flat = (drawn + n_runs * np.arange(_RESAMPLES)[:, None]).ravel()
    counts = np.bincount(flat, minlength=_RESAMPLES * n_runs).reshape(_RESAMPLES, n_runs)
    # In a sorted resample, the copies of rank r are at positions [ends[r − 1], ends[r]); those in [cut, n − cut) count.
    ends = counts.cumsum(axis=1).clip(cut, n_runs - cut)
    return np.diff(ends, axis=1, prepend=cut) / (n_runs - 2 * cut)


def spread(values: Sequence[float]) -> Spread:
    """Return how `values`, one per run, are spread."""
    if not values:
        return Spread()
    runs = np.array(values, dtype=np.float64)
    with np.errstate(over="ignore", invalid="ignore"):  # of values near the largest float
        low, high = bootstrap_interval(runs) if len(runs) >= MIN_RUNS else (math.nan, math.nan)
        figures = {
            "iqm": interquartile_mean(runs),
            "low": low,
            "high": high,
            "mean": runs.mean(),
            "std": runs.std(ddof=1) if len(runs) > 1 else math.nan,
            "median": np.median(runs),
            "best": runs.max(),
            "worst": runs.min(),
        }
    return Spread(**{name: float(value) if np.isfinite(value) else None for name, value in figures.items()})


def aggregate(curves: Sequence[tuple[Sequence[float], Sequence[float]]], max_points: int = _MAX_POINTS) -> Curve:
    """Return the interquartile mean of `curves` (x and y of each run) on a common grid.

    A run counts at x from its first to its last point, linearly interpolated between them: a run that ended early
    counts until its last point, and is not continued beyond it. The grid has the x of all runs at which at least half
    of the runs with a curve count, so that the last of them do not pass for the group. With equal schedules these are
    the points of the runs themselves. If there are more than in the longest curve, or more than `max_points`, the grid
    is as many evenly spaced points between the first and the last. The interval is given where three runs or more
    count.
    """
    known = [_sorted(x, y) for x, y in curves if len(x)]
    if not known:
        return Curve([], [], [], [])
    grid = _covered(np.unique(np.concatenate([x for x, _ in known])), known)
    size = min(max_points, max(len(x) for x, _ in known))
    if len(grid) > size:
        grid = _covered(np.linspace(grid[0], grid[-1], size), known)
    values = np.array([np.interp(grid, x, y, left=np.nan, right=np.nan) for x, y in known])  # [run, point]
    values = np.sort(values, axis=0)  # NaN, where a run does not count, last
    counts = np.count_nonzero(~np.isnan(values), axis=0)
    result = np.full((3, len(grid)), np.nan)  # interquartile mean, low, high
    for count in np.unique(counts):
        at = np.flatnonzero(counts == count)
        result[0, at] = interquartile_mean(values[:count, at])
        if count >= MIN_RUNS:
            result[1:, at] = bootstrap_interval(values[:count, at])
    iqm, low, high = result
    return Curve(grid.tolist(), iqm.tolist(), _with_none(low), _with_none(high))


def prolonged(
    curves: Sequence[tuple[Sequence[float], Sequence[float]]], has_finished: Sequence[bool]
) -> list[tuple[Sequence[float], Sequence[float]]]:
    """Return curves over wall time such that finished runs count with their last return until the longest curve ends.

    They were as fast as the machine let them be.
    """
    end = max((x[-1] for x, _ in curves if len(x)), default=0.0)
    return [([*x, end], [*y, y[-1]]) if is_over and len(x) else (x, y) for (x, y), is_over in zip(curves, has_finished)]


def _covered(grid: np.ndarray, curves: Sequence[tuple[np.ndarray, np.ndarray]]) -> np.ndarray:
    """Return the points of `grid` that lie between the first and the last point of at least half of the curves."""
    begun = np.searchsorted(np.sort([x[0] for x, _ in curves]), grid, side="right")
    ended = np.searchsorted(np.sort([x[-1] for x, _ in curves]), grid, side="left")
    return grid[2 * (begun - ended) >= len(curves)]


def _sorted(x: Sequence[float], y: Sequence[float]) -> tuple[np.ndarray, np.ndarray]:
    """Return a curve in ascending x; of several points at one x, the last."""
    latest = dict(zip(x, y))
    order = sorted(latest)
    return np.array(order, dtype=np.float64), np.array([latest[at] for at in order], dtype=np.float64)


def _with_none(values: np.ndarray) -> list[float | None]:
    return [None if np.isnan(value) else float(value) for value in values]
