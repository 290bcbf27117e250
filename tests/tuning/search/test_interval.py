"""Confidence intervals of means and ratios."""

from __future__ import annotations

import math

import pytest

from unidle.tuning.search.interval import Interval, interval, ratio


def test_interval_is_the_mean_with_students_t_bounds() -> None:
    found = interval([1.0, 2.0, 3.0])
    half = 7.65 * 1.0 / math.sqrt(3)
    assert found == Interval(2.0, pytest.approx(2.0 - half), pytest.approx(2.0 + half))
    assert interval([5.0]).low == -math.inf


def test_ratio_is_computed_per_pair() -> None:
    found = ratio([(100.0, 150.0), (10.0, 15.0), (1000.0, 1500.0)])
    assert (found.mean, found.low, found.high) == pytest.approx((1.5, 1.5, 1.5))
    noisy = ratio([(100.0, 150.0), (100.0, 90.0), (100.0, 120.0)])
    assert noisy.low < 1 < noisy.mean
