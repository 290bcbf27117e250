"""Every instant belongs to exactly one phase."""

from itertools import pairwise
from time import perf_counter, sleep

import pytest

from unidle.timeline import ENVIRONMENT, INFERENCE, LEARN, OTHER, PHASES, Timeline


def test_the_phases_sum_to_the_whole_time() -> None:
    before = perf_counter()
    timeline = Timeline()
    begun = perf_counter()
    for phase in (INFERENCE, ENVIRONMENT, OTHER, LEARN) * 5:
        timeline.enter(phase)
        sleep(0.0005)
    ending = perf_counter()
    seconds = timeline.seconds()
    after = perf_counter()
    assert set(seconds) == set(PHASES)
    assert ending - begun <= sum(seconds.values()) <= after - before


def test_time_is_counted_for_the_phase_it_was_spent_in() -> None:
    timeline = Timeline()
    timeline.enter(LEARN)
    sleep(0.03)
    assert timeline.enter(ENVIRONMENT) == LEARN
    sleep(0.01)
    seconds = timeline.seconds()  # the open phase is counted too
    assert seconds["learn"] >= 0.03
    assert seconds["environment"] >= 0.01
    assert seconds["inference"] == seconds["evaluate"] == seconds["checkpoint"] == 0.0


def test_asking_for_the_seconds_does_not_end_the_phase() -> None:
    timeline = Timeline()
    timeline.enter(LEARN)
    timeline.seconds()
    assert timeline.enter(OTHER) == LEARN


@pytest.mark.parametrize("n_entered", [0, 3, 4, 5, 11])
def test_the_ring_keeps_the_latest_intervals_oldest_first_without_gaps(n_entered: int) -> None:
    timeline = Timeline(capacity=4)
    phases = [(LEARN, INFERENCE, ENVIRONMENT)[i % 3] for i in range(n_entered)]
    for phase in phases:
        timeline.enter(phase)
    intervals = timeline.intervals()
    ended = [OTHER, *phases][:n_entered]  # the phase entered last is still open
    assert [phase for phase, _, _ in intervals] == ended[-4:]
    assert all(start <= end for _, start, end in intervals)
    assert all(left[2] == right[1] for left, right in pairwise(intervals))


def test_totals_go_on_when_the_ring_is_full() -> None:
    timeline = Timeline(capacity=2)
    first = timeline._since
    for _ in range(50):
        timeline.enter(LEARN)
        timeline.enter(OTHER)
    assert sum(timeline.totals_ns) == timeline.intervals()[-1][2] - first
