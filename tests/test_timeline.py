"""The timeline: every instant belongs to exactly one phase, on the host and on the device."""

from __future__ import annotations

from itertools import pairwise
from time import perf_counter, perf_counter_ns, sleep
from typing import Any

import pytest

from unidle.timeline import ENVIRONMENT, INFERENCE, LEARN, OTHER, PHASES, DeviceClock, Timeline


def listened(**options: int) -> Timeline:
    """A timeline that keeps intervals."""
    timeline = Timeline(**options)
    timeline.start_recording()
    return timeline


def test_phases_sum_to_elapsed_time() -> None:
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


def test_time_is_counted_for_current_phase() -> None:
    timeline = Timeline()
    timeline.enter(LEARN)
    sleep(0.03)
    assert timeline.enter(ENVIRONMENT) == LEARN
    sleep(0.01)
    seconds = timeline.seconds()  # including the open phase
    assert seconds["learn"] >= 0.03
    assert seconds["environment"] >= 0.01
    assert seconds["inference"] == seconds["evaluate"] == seconds["checkpoint"] == 0.0


def test_seconds_does_not_end_phase() -> None:
    timeline = Timeline()
    timeline.enter(LEARN)
    timeline.seconds()
    assert timeline.enter(OTHER) == LEARN


@pytest.mark.parametrize("n_entered", [0, 3, 4, 5, 11])
def test_ring_keeps_latest_intervals_in_order_without_gaps(n_entered: int) -> None:
    timeline = listened(capacity=4)
    phases = [(LEARN, INFERENCE, ENVIRONMENT)[i % 3] for i in range(n_entered)]
    for phase in phases:
        timeline.enter(phase)
    intervals = list(timeline.intervals)
    ended = [OTHER, *phases][:n_entered]  # the phase entered last is still open
    assert [phase for phase, _, _ in intervals] == ended[-4:]
    assert all(start <= end for _, start, end in intervals)
    assert all(left[2] == right[1] for left, right in pairwise(intervals))


def test_totals_count_intervals_dropped_from_ring() -> None:
    timeline = listened(capacity=2)
    first = timeline._since
    for _ in range(50):
        timeline.enter(LEARN)
        timeline.enter(OTHER)
    assert sum(timeline.totals_ns) == timeline.intervals[-1][2] - first


def test_intervals_are_kept_only_while_listening() -> None:
    timeline = listened()
    timeline.enter(LEARN)
    timeline.add_device_work(LEARN, 1_000)
    timeline.is_recording = False
    timeline.enter(ENVIRONMENT)
    sleep(0.001)
    timeline.enter(INFERENCE)
    timeline.add_device_work(INFERENCE, 1_000)
    assert [phase for phase, _, _ in timeline.intervals] == [OTHER]
    assert [phase for phase, _, _ in timeline.on_device] == [LEARN]
    assert timeline.totals_ns[ENVIRONMENT] >= 1_000_000
    timeline.start_recording()
    timeline.enter(OTHER)
    assert [phase for phase, _, _ in timeline.intervals] == [INFERENCE], "no interval from before"
    assert not timeline.on_device


def test_worked_adds_span_that_ends_now() -> None:
    timeline = listened()
    before = perf_counter_ns()
    timeline.add_device_work(INFERENCE, 1_000)
    ((phase, start, end),) = timeline.on_device
    assert (phase, end - start) == (INFERENCE, 1_000)
    assert before <= end <= perf_counter_ns()


class FakeDevice:
    """A fake GPU with a clock in milliseconds; an event keeps the time at which it was recorded."""

    def __init__(self) -> None:
        self.now, self.made = 0.0, 0

    def event(self) -> FakeEvent:
        self.made += 1
        return FakeEvent(self)


class FakeEvent:
    def __init__(self, device: FakeDevice) -> None:
        self._device, self.at = device, float("nan")

    def record(self) -> None:
        self.at = self._device.now

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, other: Any) -> float:
        return float(other.at - self.at)


def test_device_spans_are_relative_to_anchor_of_their_iteration() -> None:
    device, timeline = FakeDevice(), listened()
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
    # 1 ms after the anchor, which is the previous read; relative to the first anchor the third would begin at 7 ms.
    for (_, start, _), read in zip(spans, read_at):
        assert -1_000_000 < start - 1_000_000 - read < 1_000_000
    assert device.made == 3, "events are reused: an anchor and one pair"


def test_work_launched_before_first_anchor_is_not_recorded() -> None:
    device, timeline = FakeDevice(), listened()
    clock = DeviceClock(timeline, device.event)
    clock.launch(LEARN, lambda: None)
    clock.read()
    assert not timeline.on_device


def test_nothing_is_recorded_while_not_listening() -> None:
    device, timeline = FakeDevice(), Timeline()
    clock = DeviceClock(timeline, device.event)
    clock.read()
    assert clock.launch(LEARN, lambda: "done") == "done"
    timeline.add_device_work(INFERENCE, 1_000)
    clock.read()
    assert not timeline.on_device
    assert device.made == 1, "only the anchor, which is renewed so that listening can start at any time"
    device.now = 5_000.0
    before = perf_counter_ns()
    clock.read()
    after, timeline.is_recording = perf_counter_ns(), True
    clock.launch(LEARN, lambda: None)
    clock.read()
    ((_, start, _),) = timeline.on_device
    assert before <= start <= after


def test_work_that_raises_is_recorded() -> None:
    device, timeline = FakeDevice(), listened()
    clock = DeviceClock(timeline, device.event)
    clock.read()
    with pytest.raises(StopIteration):
        clock.launch(LEARN, lambda: next(iter(())))
    clock.read()
    assert len(timeline.on_device) == 1


@pytest.mark.gpu
def test_gpu_spans_are_as_long_as_the_work() -> None:
    import torch

    timeline = listened()
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
    elapsed = perf_counter() - begun
    clock.read()
    ((_, start, end),) = timeline.on_device
    assert 0.5 * elapsed < (end - start) * 1e-9 < 1.05 * elapsed


def test_inference_within_a_phase_is_counted_once_and_its_intervals_tile_the_phase() -> None:
    timeline = Timeline()
    timeline.begin()
    timeline.start_recording()
    timeline.enter(ENVIRONMENT)
    began = perf_counter_ns()
    first, second = (began + 1000, began + 3000), (began + 5000, began + 6000)
    while perf_counter_ns() < began + 20_000:
        pass
    timeline.add_inference(3000, [first, second], 500)
    timeline.enter(OTHER)
    assert timeline.totals_ns[INFERENCE] == 3000
    recorded = list(timeline.intervals)[1:]  # without the one before the phase
    assert [phase for phase, _, _ in recorded] == [ENVIRONMENT, INFERENCE] * 2 + [ENVIRONMENT] * 2
    assert all(end == start for (_, _, end), (_, start, _) in pairwise(recorded))
    assert sum(end - start for phase, start, end in recorded if phase == ENVIRONMENT) == timeline.totals_ns[ENVIRONMENT]
    assert list(timeline.on_device) == [(INFERENCE, end - 500, end) for _, end in (first, second)]
    assert sum(timeline.totals_now_ns()) > 0


def test_current_phase_is_inference_while_the_loop_in_c_infers() -> None:
    timeline = Timeline()
    timeline.enter(ENVIRONMENT)
    assert timeline.current == ENVIRONMENT
    timeline.is_acting_in_c = lambda: True
    assert timeline.current == INFERENCE
    timeline.enter(OTHER)
    assert timeline.current == OTHER
