"""The table by hand, and what must hold for any intervals whatever."""

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


def nonzero(account: Breakdown) -> dict[str, float]:
    return {name: pytest.approx(share) for name, share in account.rows() if share}


# -- by hand ----------------------------------------------------------------------------------------------------------


def test_a_gap_is_the_fault_of_what_the_host_did_in_it_in_proportion() -> None:
    #       0         60   70   80      100
    # host  environment    inference  environment
    # gpu                  [70 80]
    host = [HostSpan("environment", 0, 60), HostSpan("inference", 60, 80), HostSpan("environment", 80, 100)]
    found = attribute_idle(0, 100, [DeviceSpan("inference", 70, 80)], host, FULL)
    assert nonzero(found.whole) == {"busy": 0.1, "environment": 0.8, "inference": 0.1}


def test_a_launch_bound_learner_is_not_busy_for_the_length_of_its_phase() -> None:
    found = attribute_idle(0, 100, [DeviceSpan("learn", 20, 100)], [HostSpan("learn", 0, 100)], {"learn": 0.25})
    assert nonzero(found.whole) == {"busy": 0.2, "learn (launch)": 0.8}


def test_copies_run_no_kernel() -> None:
    work = [DeviceSpan("host→device", 0, 30), DeviceSpan("inference", 30, 90), DeviceSpan("device→host", 90, 100)]
    found = attribute_idle(0, 100, work, [], {"inference": 0.5})
    assert nonzero(found.whole) == {"busy": 0.3, "host→device": 0.3, "inference": 0.3, "device→host": 0.1}
    assert found.uncalibrated == ()


def test_what_nobody_wrote_down_is_shown_as_unattributed() -> None:
    found = attribute_idle(0, 100, [DeviceSpan("learn", 40, 60)], [HostSpan("learn", 30, 60)], FULL)
    assert nonzero(found.whole) == {"busy": 0.2, "learn (launch)": 0.1, "unattributed": 0.7}


def test_the_span_of_a_phase_that_was_never_calibrated_is_not_guessed_at() -> None:
    found = attribute_idle(0, 100, [DeviceSpan("learn", 0, 60)], [HostSpan("logging", 60, 100)], {})
    assert nonzero(found.whole) == {"unattributed": 0.6, "logging": 0.4}
    assert found.uncalibrated == ("learn",)


def test_streams_side_by_side_are_not_counted_twice() -> None:
    # Half of the time each, as if their gaps were independent: a quarter idle, which both had a part in.
    work = [DeviceSpan("inference", 0, 100, stream=1), DeviceSpan("learn", 0, 100, stream=2)]
    found = attribute_idle(0, 100, work, [], {"inference": 0.5, "learn": 0.5})
    assert nonzero(found.whole) == {"busy": 0.75, "inference": 0.125, "learn (launch)": 0.125}
    assert list(found.parts) == ["both"]


def test_of_the_idleness_of_two_streams_each_has_a_part_in_proportion_to_its_gaps() -> None:
    work = [DeviceSpan("inference", 0, 100, stream=1), DeviceSpan("learn", 0, 100, stream=2)]
    found = attribute_idle(0, 100, work, [], {"inference": 0.5, "learn": 0.0})
    assert nonzero(found.whole) == {"busy": 0.5, "inference": 1 / 6, "learn (launch)": 1 / 3}


def test_of_spans_that_overlap_on_one_stream_the_busiest_is_believed() -> None:
    work = [DeviceSpan("inference", 0, 100), DeviceSpan("learn", 0, 100)]
    for inference, learn, cause in ((0.2, 0.8, "learn (launch)"), (0.8, 0.2, "inference")):
        found = attribute_idle(0, 100, work, [], {"inference": inference, "learn": learn})
        assert nonzero(found.whole) == {"busy": 0.8, cause: 0.2}


def test_of_two_lanes_the_one_that_launched_the_next_work_is_asked() -> None:
    host = [HostSpan("environment", 0, 100, "collector"), HostSpan("logging", 0, 100, "learner")]
    inference, learn = DeviceSpan("inference", 50, 100, lane="collector"), DeviceSpan("learn", 50, 100, lane="learner")
    assert nonzero(attribute_idle(0, 100, [inference], host, FULL).whole) == {"busy": 0.5, "environment": 0.5}
    assert nonzero(attribute_idle(0, 100, [learn], host, FULL).whole) == {"busy": 0.5, "logging": 0.5}


def test_if_that_lane_only_waited_for_another_the_others_are_asked() -> None:
    host = [HostSpan("environment", 0, 50, "collector"), HostSpan("learn", 50, 60, "learner")]
    found = attribute_idle(0, 100, [DeviceSpan("learn", 60, 100, lane="learner")], host, FULL)
    assert nonzero(found.whole) == {"busy": 0.4, "environment": 0.5, "learn (launch)": 0.1}


def test_work_after_the_window_still_says_what_its_end_waited_for() -> None:
    host = [HostSpan("environment", 0, 100, "collector"), HostSpan("logging", 0, 100, "learner")]
    found = attribute_idle(0, 100, [DeviceSpan("learn", 150, 200, lane="learner")], host, FULL)
    assert nonzero(found.whole) == {"logging": 1.0}


def test_without_any_work_all_lanes_tell_in_equal_parts() -> None:
    host = [HostSpan("environment", 0, 100, "a"), HostSpan("logging", 0, 100, "b")]
    assert nonzero(attribute_idle(0, 100, [], host, FULL).whole) == {"environment": 0.5, "logging": 0.5}


def test_a_phase_that_has_no_name_here_is_other() -> None:
    assert nonzero(attribute_idle(0, 100, [], [HostSpan("evaluate", 0, 100)], {}).whole) == {"other": 1.0}


def test_rollout_and_learning_are_told_apart_with_the_power_of_each() -> None:
    # A rollout of 600 that is busy for 90, learning for 200 that is busy for 190, and 200 of a checkpoint.
    host = [HostSpan("environment", 0, 600), HostSpan("learn", 600, 800), HostSpan("checkpoint", 800, 1000)]
    work = [DeviceSpan("inference", 300, 390), DeviceSpan("learn", 600, 800)]
    power = [Sample(0, 999.0), Sample(600, 125.0), Sample(800, 208.0), Sample(1000, 80.0)]
    found = attribute_idle(0, 1000, work, host, {"inference": 1.0, "learn": 0.95}, power)
    assert {part: (account.busy, account.watts) for part, account in found.parts.items()} == {
        "rollout": (pytest.approx(0.15), pytest.approx(125.0)),
        "learning": (pytest.approx(0.95), pytest.approx(208.0)),
        "rest": (0.0, pytest.approx(80.0)),
    }
    assert found.whole.busy == pytest.approx(0.28)
    assert found.whole.watts == pytest.approx(0.6 * 125 + 0.2 * 208 + 0.2 * 80)
    assert sum(account.seconds for account in found.parts.values()) == pytest.approx(1000e-9)


def test_power_that_was_not_measured_is_none_and_not_zero() -> None:
    assert attribute_idle(0, 100, [], [], {}).whole.watts is None
    assert attribute_idle(0, 100, [], [], {}, [Sample(50, 100.0)]).whole.watts is None  # since when?
    assert attribute_idle(0, 100, [], [], {}, [Sample(20, 1.0), Sample(50, 100.0)]).whole.watts == 100.0


def test_a_wait_belongs_to_the_part_of_the_work_that_was_waited_for() -> None:
    host = [HostSpan("sync", 0, 50)]
    assert list(attribute_idle(0, 100, [DeviceSpan("learn", 50, 100)], host, FULL).parts) == ["learning"]
    assert list(attribute_idle(0, 100, [DeviceSpan("inference", 50, 100)], host, FULL).parts) == ["rollout"]


def test_a_window_without_length_is_refused() -> None:
    with pytest.raises(ValueError, match="no length"):
        attribute_idle(5, 5, [], [], {})


def test_the_ring_of_a_timeline_is_understood() -> None:
    timeline = Timeline()
    timeline.listen()
    timeline.enter(ENVIRONMENT)
    timeline.enter(LEARN)
    timeline.enter(ENVIRONMENT)
    spans = host_spans(timeline.intervals)
    assert [span.phase for span in spans] == ["other", "environment", "learn"]
    found = attribute_idle(spans[0].start_ns, spans[-1].end_ns, [], spans, {})
    assert found.whole.unattributed == 0
    assert set(PHASES) - {"evaluate"} <= {"learn", *CAUSES}


# -- for any intervals ------------------------------------------------------------------------------------------------

PHASE = st.sampled_from(["environment", "host→device", "inference", "learn", "sync", "checkpoint", "unheard of"])
TIME = st.integers(-50, 250)  # the window is from 0 to 200
LANE = st.sampled_from(["main", "learner"])
DEVICE = st.lists(st.builds(DeviceSpan, PHASE, TIME, TIME, st.integers(0, 2), LANE), max_size=12)
HOST = st.lists(st.builds(HostSpan, PHASE, TIME, TIME, LANE), max_size=12)
SHARES = st.dictionaries(PHASE, st.floats(-0.5, 1.5), max_size=7)  # clock errors push a measured share past its bounds
POWER = st.lists(st.builds(Sample, TIME, st.floats(0, 700)), max_size=8)


def assert_sound(account: Breakdown) -> None:
    assert list(account.idle) == list(CAUSES)
    assert all(share >= 0 for _, share in account.rows())
    assert sum(share for _, share in account.rows()) == pytest.approx(1.0, abs=1e-9)


@given(DEVICE, HOST, SHARES, POWER)
def test_every_table_sums_to_one_and_no_cell_is_negative(
    device: list[DeviceSpan], host: list[HostSpan], shares: dict[str, float], power: list[Sample]
) -> None:
    found = attribute_idle(0, 200, device, host, shares, power)
    assert_sound(found.whole)
    for account in found.parts.values():
        assert_sound(account)
    assert set(found.parts) <= set(PARTS)
    assert sum(account.seconds for account in found.parts.values()) == pytest.approx(found.whole.seconds)
    for name, share in found.whole.rows():
        parts = sum(dict(account.rows())[name] * account.seconds for account in found.parts.values())
        assert parts == pytest.approx(share * found.whole.seconds, abs=1e-15)


def assert_same(one: Attribution, other: Attribution) -> None:
    assert [share for _, share in one.whole.rows()] == pytest.approx([share for _, share in other.whole.rows()])
    assert one.parts.keys() == other.parts.keys()
    for part, account in one.parts.items():
        assert [s for _, s in account.rows()] == pytest.approx([s for _, s in other.parts[part].rows()])
        assert account.watts == pytest.approx(other.parts[part].watts)


@given(DEVICE, HOST, SHARES, POWER, TIME)
def test_cutting_intervals_in_two_changes_nothing(
    device: list[DeviceSpan], host: list[HostSpan], shares: dict[str, float], power: list[Sample], at: int
) -> None:
    cut_device = [
        piece
        for s in device
        for piece in (
            [DeviceSpan(s.phase, s.start_ns, at, s.stream, s.lane), DeviceSpan(s.phase, at, s.end_ns, s.stream, s.lane)]
            if s.start_ns < at < s.end_ns
            else [s]
        )
    ]
    cut_host = [
        piece
        for s in host
        for piece in (
            [HostSpan(s.phase, s.start_ns, at, s.lane), HostSpan(s.phase, at, s.end_ns, s.lane)]
            if s.start_ns < at < s.end_ns
            else [s]
        )
    ]
    whole = attribute_idle(0, 200, device, host, shares, power)
    assert_same(whole, attribute_idle(0, 200, cut_device, cut_host, shares, power))


@given(DEVICE, HOST, SHARES, POWER, st.randoms(use_true_random=False))
def test_the_order_of_intervals_changes_nothing(
    device: list[DeviceSpan], host: list[HostSpan], shares: dict[str, float], power: list[Sample], random: object
) -> None:
    shuffled_device, shuffled_host = list(device), list(host)
    random.shuffle(shuffled_device)  # type: ignore[attr-defined]
    random.shuffle(shuffled_host)  # type: ignore[attr-defined]
    whole = attribute_idle(0, 200, device, host, shares, power)
    assert_same(whole, attribute_idle(0, 200, shuffled_device, shuffled_host, shares, power))


@given(DEVICE, HOST, SHARES, st.integers(1, 199))
def test_the_accounts_of_two_windows_make_up_that_of_both(
    device: list[DeviceSpan], host: list[HostSpan], shares: dict[str, float], at: int
) -> None:
    left, right = (attribute_idle(*window, device, host, shares).whole for window in ((0, at), (at, 200)))
    whole = attribute_idle(0, 200, device, host, shares).whole
    for (name, share), (_, first), (_, second) in zip(whole.rows(), left.rows(), right.rows()):
        assert share * 200 == pytest.approx(first * at + second * (200 - at), abs=1e-9), name
