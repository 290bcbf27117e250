"""Attribution of idle time: tables computed by hand, and invariants for arbitrary intervals."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unidle.meter.attribution.idle_time import (
    CAUSES,
    PARTS,
    Attribution,
    Breakdown,
    DeviceSpan,
    HostSpan,
    attribute_idle,
    host_spans,
)
from unidle.meter.sensors.reading import Sample
from unidle.timeline import ENVIRONMENT, LEARN, PHASES, Timeline

FULL = {"inference": 1.0, "learn": 1.0, "environment": 1.0}


def nonzero(table: Breakdown) -> dict[str, float]:
    return {name: pytest.approx(share) for name, share in table.rows() if share}


# -- by hand ----------------------------------------------------------------------------------------------------------


def test_gap_is_split_by_host_phases_in_proportion() -> None:
    #       0         60   70   80      100
    # host  environment    inference  environment
    # gpu                  [70 80]
    host = [HostSpan("environment", 0, 60), HostSpan("inference", 60, 80), HostSpan("environment", 80, 100)]
    found = attribute_idle(0, 100, [DeviceSpan("inference", 70, 80)], host, FULL)
    assert nonzero(found.whole) == {"busy": 0.1, "environment": 0.8, "inference": 0.1}


def test_launch_bound_learning_is_busy_only_while_kernels_run() -> None:
    found = attribute_idle(0, 100, [DeviceSpan("learn", 20, 100)], [HostSpan("learn", 0, 100)], {"learn": 0.25})
    assert nonzero(found.whole) == {"busy": 0.2, "learn (launch)": 0.8}


def test_copies_do_not_count_as_busy() -> None:
    work = [DeviceSpan("host→device", 0, 30), DeviceSpan("inference", 30, 90), DeviceSpan("device→host", 90, 100)]
    found = attribute_idle(0, 100, work, [], {"inference": 0.5})
    assert nonzero(found.whole) == {"busy": 0.3, "host→device": 0.3, "inference": 0.3, "device→host": 0.1}
    assert found.uncalibrated == ()


def test_time_without_host_span_is_unattributed() -> None:
    found = attribute_idle(0, 100, [DeviceSpan("learn", 40, 60)], [HostSpan("learn", 30, 60)], FULL)
    assert nonzero(found.whole) == {"busy": 0.2, "learn (launch)": 0.1, "unattributed": 0.7}


def test_span_of_uncalibrated_phase_is_unattributed() -> None:
    found = attribute_idle(0, 100, [DeviceSpan("learn", 0, 60)], [HostSpan("logging", 60, 100)], {})
    assert nonzero(found.whole) == {"unattributed": 0.6, "logging": 0.4}
    assert found.uncalibrated == ("learn",)


def test_concurrent_streams_are_not_counted_twice() -> None:
    # Each is busy half of the time; gaps are treated as independent, so a quarter is idle and split between both.
    work = [DeviceSpan("inference", 0, 100, stream=1), DeviceSpan("learn", 0, 100, stream=2)]
    found = attribute_idle(0, 100, work, [], {"inference": 0.5, "learn": 0.5})
    assert nonzero(found.whole) == {"busy": 0.75, "inference": 0.125, "learn (launch)": 0.125}
    assert list(found.parts) == ["both"]


def test_idle_time_of_two_streams_is_split_in_proportion_to_their_gaps() -> None:
    work = [DeviceSpan("inference", 0, 100, stream=1), DeviceSpan("learn", 0, 100, stream=2)]
    found = attribute_idle(0, 100, work, [], {"inference": 0.5, "learn": 0.0})
    assert nonzero(found.whole) == {"busy": 0.5, "inference": 1 / 6, "learn (launch)": 1 / 3}


def test_overlapping_spans_on_one_stream_count_as_the_busiest() -> None:
    work = [DeviceSpan("inference", 0, 100), DeviceSpan("learn", 0, 100)]
    for inference, learn, cause in ((0.2, 0.8, "learn (launch)"), (0.8, 0.2, "inference")):
        found = attribute_idle(0, 100, work, [], {"inference": inference, "learn": learn})
        assert nonzero(found.whole) == {"busy": 0.8, cause: 0.2}


def test_gap_is_attributed_to_thread_that_launched_next_work() -> None:
    host = [HostSpan("environment", 0, 100, "collector"), HostSpan("logging", 0, 100, "learner")]
    inference, learn = (
        DeviceSpan("inference", 50, 100, thread="collector"),
        DeviceSpan("learn", 50, 100, thread="learner"),
    )
    assert nonzero(attribute_idle(0, 100, [inference], host, FULL).whole) == {"busy": 0.5, "environment": 0.5}
    assert nonzero(attribute_idle(0, 100, [learn], host, FULL).whole) == {"busy": 0.5, "logging": 0.5}


def test_gap_without_span_in_that_thread_is_attributed_to_other_threads() -> None:
    host = [HostSpan("environment", 0, 50, "collector"), HostSpan("learn", 50, 60, "learner")]
    found = attribute_idle(0, 100, [DeviceSpan("learn", 60, 100, thread="learner")], host, FULL)
    assert nonzero(found.whole) == {"busy": 0.4, "environment": 0.5, "learn (launch)": 0.1}


def test_work_after_window_decides_thread_of_last_gap() -> None:
    host = [HostSpan("environment", 0, 100, "collector"), HostSpan("logging", 0, 100, "learner")]
    found = attribute_idle(0, 100, [DeviceSpan("learn", 150, 200, thread="learner")], host, FULL)
    assert nonzero(found.whole) == {"logging": 1.0}


def test_without_device_work_all_threads_count_equally() -> None:
    host = [HostSpan("environment", 0, 100, "a"), HostSpan("logging", 0, 100, "b")]
    assert nonzero(attribute_idle(0, 100, [], host, FULL).whole) == {"environment": 0.5, "logging": 0.5}


def test_unknown_phase_counts_as_other() -> None:
    assert nonzero(attribute_idle(0, 100, [], [HostSpan("evaluate", 0, 100)], {}).whole) == {"other": 1.0}


def test_rollout_and_learning_have_separate_busy_share_and_power() -> None:
    # A rollout of 600, busy for 90; learning of 200, busy for 190; and a checkpoint of 200.
    host = [HostSpan("environment", 0, 600), HostSpan("learn", 600, 800), HostSpan("checkpoint", 800, 1000)]
    work = [DeviceSpan("inference", 300, 390), DeviceSpan("learn", 600, 800)]
    power = [Sample(0, 999.0), Sample(600, 125.0), Sample(800, 208.0), Sample(1000, 80.0)]
    found = attribute_idle(0, 1000, work, host, {"inference": 1.0, "learn": 0.95}, power)
    assert {part: (table.busy, table.watts) for part, table in found.parts.items()} == {
        "rollout": (pytest.approx(0.15), pytest.approx(125.0)),
        "learning": (pytest.approx(0.95), pytest.approx(208.0)),
        "rest": (0.0, pytest.approx(80.0)),
    }
    assert found.whole.busy == pytest.approx(0.28)
    assert found.whole.watts == pytest.approx(0.6 * 125 + 0.2 * 208 + 0.2 * 80)
    assert sum(table.seconds for table in found.parts.values()) == pytest.approx(1000e-9)


def test_power_without_measurement_is_none() -> None:
    assert attribute_idle(0, 100, [], [], {}).whole.watts is None
    assert (
        attribute_idle(0, 100, [], [], {}, [Sample(50, 100.0)]).whole.watts is None
    )  # a single sample covers no known interval
    assert attribute_idle(0, 100, [], [], {}, [Sample(20, 1.0), Sample(50, 100.0)]).whole.watts == 100.0


def test_wait_belongs_to_part_of_awaited_work() -> None:
    host = [HostSpan("sync", 0, 50)]
    assert list(attribute_idle(0, 100, [DeviceSpan("learn", 50, 100)], host, FULL).parts) == ["learning"]
    assert list(attribute_idle(0, 100, [DeviceSpan("inference", 50, 100)], host, FULL).parts) == ["rollout"]


def test_empty_window_raises() -> None:
    with pytest.raises(ValueError, match="no length"):
        attribute_idle(5, 5, [], [], {})


def test_host_spans_converts_timeline_intervals() -> None:
    timeline = Timeline()
    timeline.start_recording()
    timeline.enter(ENVIRONMENT)
    timeline.enter(LEARN)
    timeline.enter(ENVIRONMENT)
    spans = host_spans(timeline.intervals)
    assert [span.phase for span in spans] == ["other", "environment", "learn"]
    found = attribute_idle(spans[0].start_ns, spans[-1].end_ns, [], spans, {})
    assert found.whole.unattributed == 0
    assert set(PHASES) - {"evaluate"} <= {"learn", *CAUSES}


# -- for any intervals ------------------------------------------------------------------------------------------------

PHASE = st.sampled_from(["environment", "host→device", "inference", "learn", "sync", "checkpoint", "unknown"])
TIME = st.integers(-50, 250)  # the window is from 0 to 200
LANE = st.sampled_from(["main", "learner"])
DEVICE = st.lists(st.builds(DeviceSpan, PHASE, TIME, TIME, st.integers(0, 2), LANE), max_size=12)
HOST = st.lists(st.builds(HostSpan, PHASE, TIME, TIME, LANE), max_size=12)
SHARES = st.dictionaries(PHASE, st.floats(-0.5, 1.5), max_size=7)  # clock errors push a measured share past its bounds
POWER = st.lists(st.builds(Sample, TIME, st.floats(0, 700)), max_size=8)


def assert_valid(table: Breakdown) -> None:
    assert list(table.idle) == list(CAUSES)
    assert all(share >= 0 for _, share in table.rows())
    assert sum(share for _, share in table.rows()) == pytest.approx(1.0, abs=1e-9)


@given(DEVICE, HOST, SHARES, POWER)
def test_tables_sum_to_one_without_negative_cells(
    device: list[DeviceSpan], host: list[HostSpan], shares: dict[str, float], power: list[Sample]
) -> None:
    found = attribute_idle(0, 200, device, host, shares, power)
    assert_valid(found.whole)
    for table in found.parts.values():
        assert_valid(table)
    assert set(found.parts) <= set(PARTS)
    assert sum(table.seconds for table in found.parts.values()) == pytest.approx(found.whole.seconds)
    for name, share in found.whole.rows():
        parts = sum(dict(table.rows())[name] * table.seconds for table in found.parts.values())
        assert parts == pytest.approx(share * found.whole.seconds, abs=1e-15)


def assert_same(one: Attribution, other: Attribution) -> None:
    assert [share for _, share in one.whole.rows()] == pytest.approx([share for _, share in other.whole.rows()])
    assert one.parts.keys() == other.parts.keys()
    for part, table in one.parts.items():
        assert [s for _, s in table.rows()] == pytest.approx([s for _, s in other.parts[part].rows()])
        assert table.watts == pytest.approx(other.parts[part].watts)


@given(DEVICE, HOST, SHARES, POWER, TIME)
def test_splitting_intervals_changes_nothing(
    device: list[DeviceSpan], host: list[HostSpan], shares: dict[str, float], power: list[Sample], at: int
) -> None:
    split_device = [
        part
        for s in device
        for part in (
            [
                DeviceSpan(s.phase, s.start_ns, at, s.stream, s.thread),
                DeviceSpan(s.phase, at, s.end_ns, s.stream, s.thread),
            ]
            if s.start_ns < at < s.end_ns
            else [s]
        )
    ]
    split_host = [
        part
        for s in host
        for part in (
            [HostSpan(s.phase, s.start_ns, at, s.thread), HostSpan(s.phase, at, s.end_ns, s.thread)]
            if s.start_ns < at < s.end_ns
            else [s]
        )
    ]
    whole = attribute_idle(0, 200, device, host, shares, power)
    assert_same(whole, attribute_idle(0, 200, split_device, split_host, shares, power))


@given(DEVICE, HOST, SHARES, POWER, st.randoms(use_true_random=False))
def test_order_of_intervals_changes_nothing(
    device: list[DeviceSpan], host: list[HostSpan], shares: dict[str, float], power: list[Sample], random: object
) -> None:
    shuffled_device, shuffled_host = list(device), list(host)
    random.shuffle(shuffled_device)  # type: ignore[attr-defined]
    random.shuffle(shuffled_host)  # type: ignore[attr-defined]
    whole = attribute_idle(0, 200, device, host, shares, power)
    assert_same(whole, attribute_idle(0, 200, shuffled_device, shuffled_host, shares, power))


@given(DEVICE, HOST, SHARES, st.integers(1, 199))
def test_tables_of_two_windows_add_up_to_table_of_both(
    device: list[DeviceSpan], host: list[HostSpan], shares: dict[str, float], at: int
) -> None:
    left, right = (attribute_idle(*window, device, host, shares).whole for window in ((0, at), (at, 200)))
    whole = attribute_idle(0, 200, device, host, shares).whole
    for (name, share), (_, first), (_, second) in zip(whole.rows(), left.rows(), right.rows()):
        assert share * 200 == pytest.approx(first * at + second * (200 - at), abs=1e-9), name
