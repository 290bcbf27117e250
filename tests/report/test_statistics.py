"""Statistics over runs, in closed form and compared with slow implementations."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unidle.report.statistics import Spread, aggregate, bootstrap_interval, interquartile_mean, prolonged, spread

RETURNS = st.lists(st.floats(-1e6, 1e6), min_size=3, max_size=12)


def slow_interquartile_mean(values: list[float]) -> float:
    quarter = len(values) // 4
    kept = sorted(values)[quarter : len(values) - quarter]
    return math.fsum(kept) / len(kept)


@pytest.mark.parametrize(
    ("values", "mean"),
    [([5], 5), ([1, 2], 1.5), ([0, 0, 9], 3), ([1, 2, 4, 100], 3), ([1000, 1, 2, 3, -1000], 2), (range(1, 9), 4.5)],
)
def test_interquartile_mean_leaves_out_the_quarters_rounded_down(values: list[float], mean: float) -> None:
    assert interquartile_mean(np.array(values, dtype=float)) == mean


@settings(max_examples=15)
@given(RETURNS)
def test_interval_is_the_quantiles_of_resampled_means(values: list[float]) -> None:
    ranks = np.random.default_rng(0).integers(len(values), size=(5000, len(values)))
    means = [slow_interquartile_mean([sorted(values)[rank] for rank in drawn]) for drawn in ranks.tolist()]
    low, high = bootstrap_interval(np.array(values))
    assert (low, high) == pytest.approx(np.quantile(means, [0.025, 0.975]), rel=1e-9, abs=1e-6)


def test_interval_of_three_runs_is_their_range() -> None:
    """All three draws are the lowest run in 1 of 27 resamples, more often than in 2.5 %."""
    assert bootstrap_interval(np.array([3.0, 1.0, 7.0])) == pytest.approx((1.0, 7.0))


def test_interval_of_many_runs_has_width_of_normal_approximation() -> None:
    values = np.random.default_rng(1).normal(size=1000)
    low, high = bootstrap_interval(values)
    # The variance of a trimmed mean, from the values winsorised at its quartiles, by the trimmed share ½.
    winsorised = np.clip(values, *np.quantile(values, [0.25, 0.75]))
    error = winsorised.std() / (0.5 * math.sqrt(len(values)))
    assert high - low == pytest.approx(2 * 1.96 * error, rel=0.05)
    assert (low + high) / 2 == pytest.approx(interquartile_mean(values), abs=0.2 * error)


def test_interval_at_a_point_does_not_depend_on_other_points() -> None:
    values = np.random.default_rng(2).normal(size=(7, 5))  # [run, point]
    low, high = bootstrap_interval(values)
    alone = [bootstrap_interval(values[:, point]) for point in range(5)]
    np.testing.assert_allclose(np.array([low, high]).T, alone)


def test_spread_of_no_run_is_unknown() -> None:
    assert spread([]) == Spread()


def test_spread_of_one_run_has_neither_deviation_nor_interval() -> None:
    assert spread([4.0]) == Spread(iqm=4.0, mean=4.0, median=4.0, best=4.0, worst=4.0)


def test_spread_of_two_runs_has_deviation_but_no_interval() -> None:
    assert spread([2.0, 4.0]) == Spread(iqm=3.0, mean=3.0, std=math.sqrt(2), median=3.0, best=4.0, worst=2.0)


def test_spread_of_three_runs_has_an_interval() -> None:
    three = spread([1.0, 2.0, 6.0])
    assert (three.iqm, three.low, three.high, three.median) == (3.0, 1.0, 6.0, 2.0)
    assert three.std == pytest.approx(math.sqrt(7))


def test_spread_of_values_near_the_largest_float_is_unknown_where_it_overflows() -> None:
    assert spread([1.5e308, 1.5e308]).mean is None
    json.dumps(spread([1.5e308, -1.5e308, 1.5e308]).__dict__, allow_nan=False)


def test_runs_with_equal_schedules_are_aggregated_at_their_points() -> None:
    steps = [100.0, 200.0, 300.0]
    curve = aggregate([(steps, [float(run + step) for step in steps]) for run in range(4)])
    assert curve.x == steps
    assert curve.iqm == [step + 1.5 for step in steps]
    low, high = bootstrap_interval(np.arange(4.0))
    assert curve.low == pytest.approx([step + low for step in steps])
    assert curve.high == pytest.approx([step + high for step in steps])


def test_run_that_ended_early_counts_until_its_last_point() -> None:
    curve = aggregate([([1, 2], [0, 0]), ([1, 2, 3], [3, 3, 3]), ([1, 2, 3], [6, 6, 6])])
    assert (curve.x, curve.iqm) == ([1, 2, 3], [3, 3, 4.5])
    assert curve.low == [0, 0, None]  # two runs are left
    assert curve.high == [6, 6, None]


def test_curve_ends_where_fewer_than_half_of_the_runs_are_left() -> None:
    lengths = range(1, 7)
    curve = aggregate([(list(range(1, n + 1)), [0.0] * n) for n in lengths])
    assert curve.x == [1, 2, 3, 4]  # three of the six runs reach 4


def test_runs_are_interpolated_at_points_of_others() -> None:
    curve = aggregate([([0, 1, 2], [0, 10, 20]), ([0, 2], [4, 8])])
    assert curve.x == [0, 1, 2]
    assert curve.iqm == [2, (10 + 6) / 2, 14]


def test_grid_of_unequal_schedules_is_evenly_spaced() -> None:
    times = [[run / 100 + 10 * i for i in range(11)] for run in range(5)]
    curve = aggregate([(x, x) for x in times])
    assert len(curve.x) == 11
    assert np.ptp(np.diff(curve.x)) < 1e-9
    assert curve.iqm[1:-1] == pytest.approx(curve.x[1:-1])


def test_long_curves_are_thinned() -> None:
    x = [float(i) for i in range(5000)]
    curve = aggregate([(x, x)] * 3)
    assert len(curve.x) == 400
    assert (curve.x[0], curve.x[-1]) == (0, 4999)


def test_points_may_be_out_of_order_and_repeated() -> None:
    assert aggregate([([3, 1, 1], [30, 5, 10])]).iqm == [10, 30]


@pytest.mark.parametrize("curves", [[], [([], [])], [([i], [1]) for i in range(3)]])
def test_runs_without_common_points_have_no_curve(curves: list[tuple[list[float], list[float]]]) -> None:
    assert aggregate(curves).x == []


def test_finished_runs_count_until_the_longest_ends() -> None:
    curves = [([1.0, 2.0], [5.0, 7.0]), ([1.0, 4.0], [0.0, 1.0]), ([], [])]
    longer = ([1.0, 2.0, 4.0], [5.0, 7.0, 7.0])
    assert prolonged(curves, [True, False, True]) == [longer, *curves[1:]]
    assert prolonged(curves, [False] * 3) == curves
