"""Least, mean and largest by hand, bursts that stay visible, and repeats that do not count."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unidle.meter.sensors.reading import RepeatFilter, Sample
from unidle.meter.sensors.window import Summary, Window, sparkline

S = 1_000_000_000


def window(*samples: tuple[float, float], seconds: float = 10) -> Window:
    """Of (second, value)."""
    made = Window(seconds)
    made.add(Sample(round(at * S), value) for at, value in samples)
    return made


def test_the_mean_is_over_time_and_not_over_samples() -> None:
    # 0 for eight seconds, 100 for one, 50 for one.
    found = window((0, 0), (8, 100), (9, 50)).summary(10 * S)
    assert found == Summary(50, 0, pytest.approx(15.0), 100, pytest.approx(2 / 9))


def test_a_value_from_before_the_window_counts_while_it_still_holds() -> None:
    found = window((0, 80), (15, 20)).summary(20 * S)  # the window is from 10 to 20
    assert found is not None
    assert (found.least, found.mean, found.largest) == (20, pytest.approx(50.0), 80)


def test_what_no_longer_holds_is_forgotten() -> None:
    found = window((0, 99), (5, 1), (12, 3)).summary(20 * S)
    assert found is not None
    assert found.largest == 3
    assert found.least == 1


def test_nothing_is_known_before_the_first_sample() -> None:
    assert window().summary(10 * S) is None
    assert window().cells(10 * S, 4) == [None] * 4


def test_one_sample_is_its_own_mean_and_has_no_rate() -> None:
    assert window((3, 7)).summary(3 * S) == Summary(7, 7, 7, 7, 0)


def test_how_often_a_reading_is_renewed_is_right_however_short_it_was_seen() -> None:
    found = window(*((k / 6, k) for k in range(7))).summary(round(1.05 * S))
    assert found is not None
    assert found.per_second == pytest.approx(6)


def test_a_sample_that_is_not_later_than_the_last_is_a_repeat() -> None:
    found = window((1, 5), (1, 50), (0.5, 500)).summary(2 * S)
    assert found is not None
    assert found.largest == 5


def test_a_burst_of_one_sample_is_in_the_sparkline() -> None:
    cells = window((0, 1), (5.2, 90), (5.3, 1)).cells(10 * S, 10)
    assert cells == [1, 1, 1, 1, 1, 90, 1, 1, 1, 1]
    assert sparkline(cells, 100) == "▁▁▁▁▁▇▁▁▁▁"


def test_the_sample_of_this_very_instant_is_in_the_last_cell() -> None:
    assert window((0, 1), (10, 9)).cells(10 * S, 5)[-1] == 9


def test_the_sparkline_is_blank_where_nothing_is_known_and_knows_its_bounds() -> None:
    assert sparkline([None, 0, 50, 100, 200], 100) == " ▁▅██"
    assert sparkline([0, 2, 4]) == "▁▅█"  # without a bound, the largest is the top
    assert sparkline([0, 0]) == "▁▁"
    assert sparkline([]) == ""


@given(
    st.lists(st.tuples(st.integers(0, 20 * S), st.floats(-1e6, 1e6)), min_size=1),
    st.integers(20 * S, 40 * S),
)
def test_the_mean_lies_between_least_and_largest(samples: list[tuple[int, float]], now: int) -> None:
    made = Window(10)
    made.add(Sample(at, value) for at, value in sorted(samples))
    found = made.summary(now)
    assert found is not None
    assert found.least <= found.mean <= found.largest
    cells = [cell for cell in made.cells(now, 7) if cell is not None]
    assert max(cells) <= found.largest


def test_a_value_is_new_if_it_changed_or_was_due_to_be_renewed() -> None:
    renewed = RepeatFilter(0.1)
    looks = [(0.00, 5), (0.05, 5), (0.06, 6), (0.10, 6), (0.15, 6), (0.16, 6), (0.20, 6), (0.259, 6)]
    taken = [at for at, value in looks if renewed.take(round(at * S), value)]
    assert taken == [0.00, 0.06, 0.16, 0.259]  # the last one a little early
