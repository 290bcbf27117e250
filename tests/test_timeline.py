"""Every instant belongs to exactly one phase."""

from __future__ import annotations

from itertools import pairwise
from time import perf_counter, perf_counter_ns, sleep
from typing import Any

import pytest

from unidle.timeline import ENVIRONMENT, INFERENCE, LEARN, OTHER, PHASES, DeviceClock, Timeline


def heard(**options: int) -> Timeline:
    """One that somebody listens to."""
    timeline = Timeline(**options)
    timeline.listen()
    return timeline


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
    timeline = heard(capacity=4)
    phases = [(LEARN, INFERENCE, ENVIRONMENT)[i % 3] for i in range(n_entered)]
    for phase in phases:
        timeline.enter(phase)
    intervals = list(timeline.intervals)
    ended = [OTHER, *phases][:n_entered]  # the phase entered last is still open
    assert [phase for phase, _, _ in intervals] == ended[-4:]
    assert all(start <= end for _, start, end in intervals)
    assert all(left[2] == right[1] for left, right in pairwise(intervals))


def test_totals_go_on_when_the_ring_is_full() -> None:
    timeline = heard(capacity=2)
    first = timeline._since
    for _ in range(50):
        timeline.enter(LEARN)
        timeline.enter(OTHER)
    assert sum(timeline.totals_ns) == timeline.intervals[-1][2] - first


def test_intervals_are_kept_while_somebody_listens_and_totals_always() -> None:
    timeline = heard()
    timeline.enter(LEARN)
    timeline.worked(LEARN, 1_000)
    timeline.is_heard = False
    timeline.enter(ENVIRONMENT)
    sleep(0.001)
    timeline.enter(INFERENCE)
    timeline.worked(INFERENCE, 1_000)
    assert [phase for phase, _, _ in timeline.intervals] == [OTHER]
    assert [phase for phase, _, _ in timeline.on_device] == [LEARN]
    assert timeline.totals_ns[ENVIRONMENT] >= 1_000_000
    timeline.listen()
    timeline.enter(OTHER)
    assert [phase for phase, _, _ in timeline.intervals] == [INFERENCE], "and none from before"
    assert not timeline.on_device


def test_work_that_was_waited_for_ends_now() -> None:
    timeline = heard()
    before = perf_counter_ns()
    timeline.worked(INFERENCE, 1_000)
    ((phase, start, end),) = timeline.on_device
    assert (phase, end - start) == (INFERENCE, 1_000)
    assert before <= end <= perf_counter_ns()


class Device:
    """A make-believe GPU: its clock is in milliseconds, and an event keeps the time at which it was recorded."""

    def __init__(self) -> None:
        self.now, self.made = 0.0, 0

    def event(self) -> Event:
        self.made += 1
        return Event(self)


class Event:
    def __init__(self, device: Device) -> None:
        self._device, self.at = device, float("nan")

    def record(self) -> None:
        self.at = self._device.now

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, other: Any) -> float:
        return float(other.at - self.at)


def test_work_on_the_device_is_told_against_the_anchor_of_its_own_iteration() -> None:
    device, timeline = Device(), heard()
    clock = DeviceClock(timeline, device.event)
    clock.read()
    read_at = []

    def work() -> str:
        device.now += 2.0
        return "done"

    for _ in range(3):
        read_at.append(perf_counter_ns())
        device.now += 1.0
        assert clock.launch(LEARN, work) == "done"
        clock.read()
    spans = list(timeline.on_device)
    assert [(phase, end - start) for phase, start, end in spans] == [(LEARN, 2_000_000)] * 3
    # 1 ms after the anchor, which is the reading before; against the first anchor the third would begin at 7 ms.
    for (_, start, _), read in zip(spans, read_at):
        assert -1_000_000 < start - 1_000_000 - read < 1_000_000
    assert device.made == 3, "events are used again: an anchor and one pair"


def test_what_is_launched_before_there_is_an_anchor_is_not_told() -> None:
    device, timeline = Device(), heard()
    clock = DeviceClock(timeline, device.event)
    clock.launch(LEARN, lambda: None)
    clock.read()
    assert not timeline.on_device


def test_nothing_is_recorded_while_nobody_hears_of_it() -> None:
    device, timeline = Device(), Timeline()
    clock = DeviceClock(timeline, device.event)
    clock.read()
    assert clock.launch(LEARN, lambda: "done") == "done"
    timeline.worked(INFERENCE, 1_000)
    clock.read()
    assert not timeline.on_device
    assert device.made == 1, "the anchor, which is renewed all the same: it may be needed at once"
    device.now = 5_000.0
    before = perf_counter_ns()
    clock.read()
    after, timeline.is_heard = perf_counter_ns(), True
    clock.launch(LEARN, lambda: None)
    clock.read()
    ((_, start, _),) = timeline.on_device
    assert before <= start <= after


def test_work_that_fails_is_told_all_the_same() -> None:
    device, timeline = Device(), heard()
    clock = DeviceClock(timeline, device.event)
    clock.read()
    with pytest.raises(StopIteration):
        clock.launch(LEARN, lambda: next(iter(())))
    clock.read()
    assert len(timeline.on_device) == 1


@pytest.mark.gpu
def test_on_a_gpu_spans_are_as_long_as_the_work() -> None:
    import torch

    timeline = heard()
    clock = DeviceClock(timeline)
    a = torch.randn(4096, 4096, device="cuda")
    torch.cuda.synchronize()
    clock.read()

    def work() -> None:
        b = a
        for _ in range(20):
            b = torch.tanh(b @ a)

    begun = perf_counter()
    clock.launch(LEARN, work)
    torch.cuda.synchronize()
    took = perf_counter() - begun
    clock.read()
    ((_, start, end),) = timeline.on_device
    assert 0.5 * took < (end - start) * 1e-9 < 1.05 * took
