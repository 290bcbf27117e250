"""The dashboard's view of a run, compared with the lines of its files."""

from __future__ import annotations

import gc
import math
import warnings
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from dashboard_runs import evaluation, iteration, make_run, segment, write_lines
from hypothesis import given
from hypothesis import strategies as st

from unidle.meter.attribution.idle_time import CAUSES
from unidle.report.dashboard.figures import energy
from unidle.report.dashboard.runs import whole_view
from unidle.report.dashboard.segments import Segment, downsampled, joules_so_far, merge, segment_of
from unidle.report.dashboard.verdict import NOT_METERED, parts_text, verdict


def parsed(record: dict[str, Any]) -> Segment:
    found = segment_of(record)
    assert found is not None
    return found


def figures(view: dict[str, Any]) -> dict[str, tuple[str, str]]:
    return {name: (value, detail) for name, value, detail in view["figures"]}


def gpu(busy: float, unattributed: float = 0.0, **idle: float) -> Segment:
    table = {"busy": busy, "idle": {**dict.fromkeys(CAUSES, 0.0), **idle}, "unattributed": unattributed}
    return parsed(segment(1, gpu=table))


# -- segments -------------------------------------------------------------------------------------------------------


def test_line_counts_for_all_time_since_previous_line() -> None:
    lines = [segment(1, busy=0.2, length=0.5), segment(4, busy=0.8, length=0.5, covered=3.0)]
    lines[1]["host"] = {"learn": 1.0}
    lines[1]["readings"]["cores"] = 5.5
    whole = merge([parsed(line) for line in lines])
    assert whole is not None
    assert whole.gpu is not None
    assert whole.gpu["busy"] == pytest.approx(0.25 * 0.2 + 0.75 * 0.8)
    assert math.fsum(whole.gpu.values()) == pytest.approx(1)
    assert whole.host["learn"] == pytest.approx(0.25 * 0.3 + 0.75)
    assert whole.readings["cores"] == pytest.approx(0.25 * 1.5 + 0.75 * 5.5)
    assert (whole.begin, whole.seconds, whole.covered) == (0.0, 4.0, 4.0)


@pytest.mark.parametrize("covered", [None, 0.0, -1.0, "x"])
def test_line_without_covered_counts_for_its_length(covered: Any) -> None:
    found = parsed(segment(9, length=2.0, covered=covered))
    assert (found.begin, found.covered) == (7.0, 2.0)


def test_thinned_segments_keep_their_times() -> None:
    """Four lines, one of them in the older format with a gap before it, become two bars."""
    lines = [segment(10, covered=10.0, spans=[]), segment(20, covered=10.0), segment(30), segment(40, covered=10.0)]
    del lines[2]["covered"]
    drawn = downsampled([parsed(line) for line in lines], 2)
    assert [(s.begin, s.seconds, s.covered) for s in drawn] == [(0.0, 20.0, 20.0), (29.0, 40.0, 11.0)]
    placed = downsampled([found for i, line in enumerate(lines) if (found := segment_of(line, i))], 2)
    assert [(s.offset, s.spans_begin) for s in placed] == [(1, 19.0), (2, 29.0)]


def test_parts_are_weighted_by_time() -> None:
    first = segment(1, length=0.2, parts={"learning": {"share": 0.1, "busy": 1.0, "watts": 200.0}})
    second = segment(2, length=0.9, parts={"learning": {"share": 0.3, "busy": 0.6, "watts": None}})
    whole = merge([parsed(first), parsed(second)])
    assert whole is not None
    part = whole.parts["learning"]
    assert part.share == pytest.approx(0.2)
    assert part.busy == pytest.approx(0.7)
    assert part.watts == 200.0  # the mean of known values


def test_energy_is_unknown_after_missing_reading() -> None:
    without_readings = parsed(segment(2, readings={}))
    assert joules_so_far([parsed(segment(1)), without_readings, parsed(segment(3))]) == [150.0, None, None]
    whole = merge([parsed(segment(1)), without_readings])
    assert whole is not None
    assert whole.joules is None


def test_energy_is_computed_from_power_without_counter() -> None:
    line = segment(9, length=2.0, covered=7.0, readings={"watts": 100.0, "joules": None})
    assert parsed(line).joules == 700.0
    assert parsed(segment(9, length=2.0, covered=7.0)).joules == 150.0  # the counter takes precedence


@pytest.mark.parametrize("unavailable", ["step", "seconds", "length", "host"])
def test_line_without_required_field_is_ignored(unavailable: str) -> None:
    record = segment(1)
    del record[unavailable]
    assert segment_of(record) is None


def test_line_with_only_required_fields_is_valid() -> None:
    required = {key: segment(1)[key] for key in ("step", "seconds", "length", "host")}
    found = parsed(required)
    assert (found.gpu, found.parts, found.readings, found.joules, found.offset) == (None, {}, {}, None, None)


@given(st.lists(st.tuples(st.floats(0.5, 60), st.floats(0, 1)), min_size=1, max_size=80), st.integers(1, 20))
def test_thinning_preserves_time_energy_and_busy_seconds(lines: list[tuple[float, float]], most: int) -> None:
    segments, now = [], 0.0
    for covered, busy in lines:
        now += covered
        segments.append(parsed(segment(1, busy=busy, seconds=now, length=0.5, covered=covered)))
    drawn = downsampled(segments, most)
    assert len(drawn) <= most
    assert (drawn[0].begin, drawn[-1].seconds) == (segments[0].begin, now)
    assert all(later.begin == pytest.approx(earlier.seconds) for earlier, later in pairwise(drawn))
    for total in (lambda s: s.covered, lambda s: s.joules or 0.0, lambda s: s.covered * (s.gpu or {})["busy"]):
        assert math.fsum(map(total, drawn)) == pytest.approx(math.fsum(map(total, segments)))
    assert all(math.fsum((s.gpu or {}).values()) == pytest.approx(1) for s in drawn)


# -- sentences -------------------------------------------------------------------------------------------------------


def test_verdict_names_largest_cause_of_idle_time() -> None:
    assert verdict(gpu(0.41, environment=0.44, sync=0.15)) == (
        "GPU busy 41 %; of the idle 59 %, 75 % went to waiting for environments and 25 % to synchronising."
    )
    assert verdict(gpu(0.5, environment=0.45, sync=0.05)) == (
        "GPU busy 50 %; of the idle 50 %, 90 % went to waiting for environments."
    )
    assert "unattributed time" in verdict(gpu(0.5, 0.4, environment=0.1))
    assert verdict(gpu(0.93, environment=0.07)) == "GPU busy 93 %: there is little left to gain."


def test_every_cause_has_a_description() -> None:
    for cause in CAUSES:
        assert f"went to {cause}." not in verdict(gpu(0.5, **{cause: 0.5})) or cause == "logging"


def test_verdict_without_gpu_describes_trainer_thread() -> None:
    without_gpu = parsed(segment(1, gpu=None, host={"learn": 0.5, "environment": 0.3, "inference": 0.1, "other": 0.1}))
    assert verdict(without_gpu) == (
        "No GPU was measured; the trainer thread spent 50 % of its time on learning and 30 % on environments."
    )
    assert verdict(None) == NOT_METERED


def test_parts_text_describes_rollouts_and_learning() -> None:
    assert parts_text(parsed(segment(1))) == (
        "20 % at 125 W in rollouts, 100 % at 208 W in learning, 40 % at 150 W overall"
    )
    incomplete = segment(1, parts={"rollout": {"share": 1.0, "busy": None, "watts": None}}, readings={})
    assert parts_text(parsed(incomplete)) == "– in rollouts, 40 % overall"


def test_energy_uses_a_suitable_unit() -> None:
    assert [energy(j) for j in (0.0, 0.5, 12.0, 1500.0, 2.345e6)] == ["0 J", "0.5 J", "12 J", "1.5 kJ", "2.35 MJ"]


# -- the whole view --------------------------------------------------------------------------------------------------


def test_metered_run_view(tmp_path: Path) -> None:
    view, spans = whole_view(make_run(tmp_path, "x", meter=True))
    assert view["verdict"].startswith("GPU busy 40 %; of the idle 60 %, 50 % went to waiting for environments")
    assert figures(view)["GPU busy"] == ("40 %", "by the driver 35 %")
    assert figures(view)["GPU energy"] == ("600 J", "150 W on average")
    assert view["tables"]["gpu"] == [
        ["busy", "40 %", "1.6 s"],
        ["environment", "30 %", "1.2 s"],
        ["learn (launch)", "15 %", "0.6 s"],
        ["unattributed", "15 %", "0.6 s"],
    ]
    # The chart has the same order as the table.
    assert list(view["timeline"]["gpu"]) == [name for name, *_ in view["tables"]["gpu"]]
    assert view["power"] == {
        "seconds": [1.0, 2.0, 3.0, 4.0],
        "watts": [150.0] * 4,
        "joules": [150.0, 300.0, 450.0, 600.0],
    }
    assert view["parts"]["rows"] == [["rollout", "75 %", "20 %", "125 W"], ["learning", "25 %", "100 %", "208 W"]]
    assert len(spans) == 4


def test_table_sums_to_metered_time(tmp_path: Path) -> None:
    folder = make_run(tmp_path, "x")
    lines = [segment(10, covered=10.0), segment(20, covered=10.0, gpu=None), segment(40, covered=20.0, gpu=None)]
    write_lines(folder / "meter.jsonl", lines)
    view, _ = whole_view(folder)
    assert view["tables"]["host"] == [
        ["environment", "50 %", "20.0 s"],
        ["inference", "20 %", "8.0 s"],
        ["learn", "30 %", "12.0 s"],
    ]
    assert view["tables"]["gpu"][0] == ["busy", "40 %", "4.0 s"]  # of the ten seconds with GPU data
    assert (view["timeline"]["begin"], view["timeline"]["end"]) == ([0.0, 10.0, 20.0], [10.0, 20.0, 40.0])
    assert view["timeline"]["spans_begin"] == [9.0, 19.0, 39.0]


def test_memory_and_cores_are_shown_if_known(tmp_path: Path) -> None:
    folder = make_run(tmp_path, "x")
    shown = figures(whole_view(folder)[0])
    assert not {"GPU busy", "GPU energy", "GPU memory", "CPU cores"} & shown.keys()
    readings = {"memory_bytes": 3.1 * 2**30, "memory_total_bytes": 140 * 2**30, "sm": 0.3, "cores": 11.25}
    write_lines(folder / "meter.jsonl", [segment(1, readings=readings)])
    shown = figures(whole_view(folder)[0])
    assert shown["GPU memory"] == ("3.1 GiB", "of 140 GiB")
    assert shown["CPU cores"] == ("11.2", "in use on average")
    assert shown["GPU busy"] == ("40 %", "SMs active 30 %")


def test_symlinked_run_is_read_and_files_are_closed(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(make_run(tmp_path, "x"))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", ResourceWarning)
        view, _ = whole_view(tmp_path / "link")
        gc.collect()
    assert (view["name"], view["figures"][0][1]) == ("x", "4,000")
    assert caught == []


def test_return_against_joules_is_interpolated_between_segments(tmp_path: Path) -> None:
    folder = make_run(tmp_path, "x", meter=True)
    late = [iteration(1, wall=0.5), iteration(2, wall=2.25), iteration(3, wall=4.0), iteration(4, wall=4.5)]
    write_lines(folder / "metrics.jsonl", late)
    curve = whole_view(folder)[0]["returns"]["training"]
    assert curve["seconds"] == [0.5, 2.25, 4.0, 4.5]
    assert curve["joules"] == [75.0, 337.5, 600.0, None]  # the last segment is not metered yet
    assert curve["steps"] == [1000, 2000, 3000, 4000]


def test_run_without_meter_falls_back_to_metrics(tmp_path: Path) -> None:
    view, spans = whole_view(make_run(tmp_path, "x"))
    assert view["source"] == "metrics.jsonl"
    assert view["verdict"].startswith("No GPU was measured; the trainer thread spent 50 % of its time on environments")
    assert view["tables"]["gpu"] is None
    assert view["tables"]["host"] == [
        ["environment", "50 %", "2.0 s"],
        ["inference", "20 %", "0.8 s"],
        ["learn", "30 %", "1.2 s"],
    ]
    assert not any(name.startswith("GPU") for name in figures(view))
    assert (view["power"], view["parts"], view["has_joules"], spans) == (None, None, False, {})
    assert view["returns"]["training"]["joules"] == [None] * 4


def test_run_without_records_shows_dashes(tmp_path: Path) -> None:
    folder = make_run(tmp_path, "x")
    (folder / "metrics.jsonl").unlink()
    view, _ = whole_view(folder)
    assert view["verdict"] == NOT_METERED
    shown = figures(view)
    assert [shown[name][0] for name in ("Steps/s", "Training return", "Evaluation")] == ["–"] * 3


def test_success_is_shown_if_reported(tmp_path: Path) -> None:
    folder = make_run(tmp_path, "x")
    assert whole_view(folder)[0]["success"] is None
    write_lines(folder / "metrics.jsonl", [iteration(1), evaluation(1, **{"eval/success": 0.25})])
    view, _ = whole_view(folder)
    assert view["success"]["evaluation"]["value"] == [0.25]
    assert figures(view)["Success"][0] == "25 %"


def test_long_run_is_thinned_but_keeps_latest_point(tmp_path: Path) -> None:
    folder = make_run(tmp_path, "x", meter=True, seconds=2000)
    view, spans = whole_view(folder)
    assert len(view["timeline"]["end"]) <= 600
    assert view["timeline"]["end"][-1] == 2000
    assert view["speed"]["seconds"][-1] == 2000
    assert len(view["returns"]["training"]["value"]) <= 600
    assert len(spans) <= 41
    assert str(view["timeline"]["offset"][-1]) in spans
