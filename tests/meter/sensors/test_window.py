"""Sliding windows: summaries computed by hand, sparklines, and the filter for repeated readings."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unidle.meter.sensors.reading import RepeatFilter, Sample
from unidle.meter.sensors.window import Summary, Window, sparkline

S = 1_000_000_000


def window(*samples: tuple[float, float], seconds: float = 10) -> Window:
    """A window with samples given as (second, value)."""
    made = Window(seconds)
    made.add(Sample(round(at * S), value) for at, value in samples)
    return made


def test_mean_is_weighted_by_time() -> None:
    # 0 for eight seconds, 100 for one, 50 for one.
    found = window((0, 0), (8, 100), (9, 50)).summary(10 * S)
    assert found == Summary(50, 0, pytest.approx(15.0), 100, pytest.approx(2 / 9))


def test_value_from_before_window_counts_while_it_holds() -> None:
    found = window((0, 80), (15, 20)).summary(20 * S)  # the window is from 10 to 20
    assert found is not None
    assert (found.least, found.mean, found.largest) == (20, pytest.approx(50.0), 80)


def test_expired_value_is_dropped() -> None:
    found = window((0, 99), (5, 1), (12, 3)).summary(20 * S)
    assert found is not None
    assert found.largest == 3
    assert found.least == 1


def test_window_without_samples_has_no_summary() -> None:
    assert window().summary(10 * S) is None
    assert window().cells(10 * S, 4) == [None] * 4


def test_single_sample_has_mean_but_no_rate() -> None:
    assert window((3, 7)).summary(3 * S) == Summary(7, 7, 7, 7, 0)


def test_renewal_rate_is_correct_for_short_windows() -> None:
    found = window(*((k / 6, k) for k in range(7))).summary(round(1.05 * S))
    assert found is not None
    assert found.per_second == pytest.approx(6)


def test_sample_not_later_than_previous_is_ignored() -> None:
    found = window((1, 5), (1, 50), (0.5, 500)).summary(2 * S)
    assert found is not None
    assert found.largest == 5


def test_short_burst_is_visible_in_sparkline() -> None:
    cells = window((0, 1), (5.2, 90), (5.3, 1)).cells(10 * S, 10)
    assert cells == [1, 1, 1, 1, 1, 90, 1, 1, 1, 1]
    assert sparkline(cells, 100) == "▁▁▁▁▁▇▁▁▁▁"


def test_sample_at_current_time_is_in_last_cell() -> None:
    assert window((0, 1), (10, 9)).cells(10 * S, 5)[-1] == 9


def test_sparkline_is_blank_without_data_and_clips_at_full_scale() -> None:
    assert sparkline([None, 0, 50, 100, 200], 100) == " ▁▅██"
    assert sparkline([0, 2, 4]) == "▁▅█"  # without full scale, the largest value is the top
    assert sparkline([0, 0]) == "▁▁"
    assert sparkline([]) == ""


@given(
    st.lists(st.tuples(st.integers(0, 20 * S), st.floats(-1e6, 1e6)), min_size=1),
    st.integers(20 * S, 40 * S),
)
def test_mean_lies_between_least_and_largest(samples: list[tuple[int, float]], now: int) -> None:
    made = Window(10)
    made.add(Sample(at, value) for at, value in sorted(samples))
    found = made.summary(now)
    assert found is not None
    assert found.least <= found.mean <= found.largest
    cells = [cell for cell in made.cells(now, 7) if cell is not None]
    assert max(cells) <= found.largest


def test_repeat_filter_takes_changed_or_due_values() -> None:
    renewed = RepeatFilter(0.1)
    polls = [(0.00, 5), (0.05, 5), (0.06, 6), (0.10, 6), (0.15, 6), (0.16, 6), (0.20, 6), (0.259, 6)]
    taken = [at for at, value in polls if renewed.take(round(at * S), value)]
    assert taken == [0.00, 0.06, 0.16, 0.259]  # the last one a little early
