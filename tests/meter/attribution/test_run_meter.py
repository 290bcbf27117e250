"""The run meter: real runs on the CPU, simulated segments, and, on a GPU, a comparison with the profiler."""

from __future__ import annotations

import gzip
import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import unidle
from unidle import timeline as timeline_module
from unidle.engine.callbacks import RunGpu
from unidle.meter.attribution import run_meter as run_meter_module
from unidle.meter.attribution.idle_time import DeviceSpan, HostSpan, attribute_idle
from unidle.meter.attribution.run_meter import FILE, RunMeter, active_shares
from unidle.meter.sensors.background import Background
from unidle.meter.sensors.reading import Sample
from unidle.metrics.jsonl import read_records
from unidle.timeline import ENVIRONMENT, EVALUATE, LEARN, LOGGING, PHASES, STORAGE, Timeline

SMALL: dict[str, Any] = {
    "env": "CartPole-v1",
    "n_envs": 4,
    "n_steps": 16,
    "batch_size": 64,
    "n_epochs": 1,
    "eval_every": 0,
    "tensorboard": False,
    "quiet": True,
    "device": "cpu",
    "subproc": False,
}


@pytest.fixture
def short_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_meter_module, "_SEGMENT_NS", 20_000_000)
    monkeypatch.setattr("unidle.api.build.RunMeter", partial(RunMeter, own_share=0.5))


@pytest.mark.usefixtures("short_segments")
def test_run_without_gpu_records_host_phases(tmp_path: Path) -> None:
    run = unidle.train(**SMALL, timesteps=64 * 60, runs_dir=str(tmp_path))
    lines = read_records(run.path / FILE)
    assert len(lines) > 1
    for line in lines:
        assert line["gpu"] is None
        assert line["parts"] == {}
        assert sum(line["host"].values()) == pytest.approx(1.0)
        assert set(line["host"]) == set(PHASES)
        assert line["length"] >= 0.02
        assert line["covered"] >= line["length"]
        assert line["readings"]["watts"] is None
        spans = line["spans"]
        assert 0 < len(spans) <= 400
        assert all(0 <= begin <= end for _, _, begin, end in spans)
    assert sum(line["covered"] for line in lines) <= lines[-1]["seconds"] + 0.01
    steps = [line["step"] for line in lines]
    assert steps == sorted(set(steps))
    assert any(span[1] == "learn" for line in lines for span in line["spans"])


@pytest.mark.usefixtures("short_segments")
def test_every_line_is_also_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[dict[str, Any]] = []
    monkeypatch.setattr("unidle.api.build._Quiet.on_meter", lambda _, line: shown.append(line))
    run = unidle.train(**SMALL, timesteps=64 * 30, runs_dir=str(tmp_path))
    assert shown
    assert json.loads(json.dumps(shown)) == read_records(run.path / FILE)


@pytest.mark.usefixtures("short_segments")
def test_resumed_run_appends_to_meter_file(tmp_path: Path) -> None:
    run = unidle.train(**SMALL, timesteps=64 * 30, runs_dir=str(tmp_path), run_name="a")
    path = run.path / FILE
    before = read_records(path)
    with path.open("a") as file:
        file.write(json.dumps({**before[-1], "step": 10**6}) + "\n")  # written after the last checkpoint
    unidle.resume(run.path, timesteps=64 * 60, quiet=True)
    after = read_records(path)
    assert after[: len(before)] == before
    assert before[-1]["step"] < after[-1]["step"] <= 64 * 60


def test_meter_pauses_in_proportion_to_its_cost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0]
    monkeypatch.setattr(run_meter_module, "perf_counter_ns", lambda: now[0])
    monkeypatch.setattr(run_meter_module, "_SEGMENT_NS", 0)
    costs, pauses = iter((7, 3, 20, 5)), list[int]()

    class CostlyMeter(RunMeter):
        def _readings(self, at: int) -> dict[str, float | None]:
            now[0] += next(costs)
            return super()._readings(at)

    meter, timeline = CostlyMeter(print, own_share=0.1), Timeline()
    meter.begin(tmp_path, timeline, 0, None)
    ended = 0
    while len(pauses) < 4:
        now[0] += 1
        timeline.enter(LEARN)
        timeline.enter(LOGGING)
        was_open = meter._segment is not None
        meter.iteration(now[0], now[0] * 1e-9, has_learned=True)
        if was_open:
            ended = now[0]
        elif meter._segment is not None:
            pauses.append(now[0] - ended)
    meter.end()
    assert len(read_records(tmp_path / FILE)) == 3
    assert pauses == [1, 70, 30, 200]  # the first segment starts at once; then the cost is a tenth of the time


def test_active_share_is_fraction_of_span_covered_by_kernels() -> None:
    spans = [DeviceSpan("learn", 0, 100), DeviceSpan("inference", 100, 200), DeviceSpan("learn", 200, 300)]
    kernels = [(0, 10), (5, 20), (100, 200), (250, 260), (900, 999)]
    assert active_shares(spans, kernels) == {"learn": pytest.approx(0.15), "inference": pytest.approx(1.0)}
    assert active_shares([], kernels) == {}
    assert active_shares(spans, []) == {}


def test_background_mean_and_increase() -> None:
    background = Background(("power", "energy"))
    background._samples["power"].extend([Sample(0, 100.0), Sample(100, 200.0), Sample(200, 300.0)])
    background._samples["energy"].extend([Sample(0, 5.0), Sample(100, 7.0), Sample(200, 11.0)])
    assert background.mean("power", 50, 150) == pytest.approx(250.0)  # a sample is the mean since the previous one
    assert background.mean("power", 300, 400) is None
    assert [sample.at_ns for sample in background.samples("power", 150)] == [100, 200]
    assert background.increase("energy", 100, 250) == 4.0
    assert Background(("energy",)).increase("energy", 0, 1) is None


def test_short_increases_of_counter_add_up_to_total() -> None:
    background = Background(("energy",))
    total = 0.0
    for now in range(10, 1000, 7):  # a sample every 10 ns, each 1 J higher
        if now // 10 > (now - 7) // 10:
            background._samples["energy"].append(Sample(10 * (now // 10), float(now // 10)))
        total += background.increase("energy", now - 7, now) or 0.0
    assert total == background._samples["energy"][-1].value - background._samples["energy"][0].value


def test_trace_file_contains_profiler_events(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run = unidle.train(**SMALL, timesteps=64 * 100, runs_dir=str(tmp_path), trace=True)
    with gzip.open(run.path / "trace.json.gz", "rt") as file:
        events = json.load(file)["traceEvents"]
    assert any("addmm" in str(event.get("name")) for event in events)
    output = capfd.readouterr().err
    assert "ui.perfetto.dev" in output
    assert "profiler_start" not in output  # the profiler's own output is suppressed


@pytest.mark.gpu
def test_gpu_busy_shares_sum_to_one_and_match_profiler(tmp_path: Path) -> None:
    """Measures the same segments by calibrated spans and by the profiler's kernels."""
    from unidle.meter.watch.inside.unidle_windows import Window, torch_in_use

    pairs: list[tuple[float, float]] = []
    window: list[Window] = []

    class ComparedMeter(RunMeter):
        def _begin_segment(self, now: int) -> None:
            super()._begin_segment(now)
            if self._segment is not None and self._segment.window is None:
                window.append(Window(torch_in_use()))

        def _end_segment(self, segment: Any, now: int, step: int, wall: float) -> None:
            open_window = window.pop() if window else None
            kernels = open_window.close() if open_window else None
            super()._end_segment(segment, now, step, wall)
            if open_window is not None and kernels is not None:
                line = read_records(self._path)[-1]
                duration_ns = open_window.ended_ns - open_window.begun_ns
                pairs.append((line["gpu"]["busy"], kernels.active_ns / duration_ns))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("unidle.api.build.RunMeter", partial(ComparedMeter, own_share=0.5))
        settings = {**SMALL, "device": "cuda", "n_envs": 64, "n_steps": 64, "batch_size": 1024, "n_epochs": 10}
        run = unidle.train(**settings, timesteps=4096 * 200, runs_dir=str(tmp_path))
    lines = read_records(run.path / FILE)
    for line in lines:
        gpu = line["gpu"]
        assert gpu["busy"] + sum(gpu["idle"].values()) + gpu["unattributed"] == pytest.approx(1.0)
    assert len(pairs) > 2
    assert sum(abs(metered - profiled) for metered, profiled in pairs) / len(pairs) < 0.03, pairs


class FakeGpu:
    """A GPU without clock and readings that counts captures."""

    def __init__(self) -> None:
        self.captures = 1

    def run_gpu(self) -> RunGpu:
        return RunGpu("no such GPU", lambda: self.captures)


def test_profiler_starts_after_learning_began_and_captures_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the first update there is nothing to calibrate; and a capture during profiling would fail."""
    now = [0]
    monkeypatch.setattr(run_meter_module, "perf_counter_ns", lambda: now[0])
    monkeypatch.setattr(run_meter_module, "_SETTLED_NS", 30)
    windows: list[str] = []
    monkeypatch.setattr(run_meter_module, "try_window", lambda torch: windows.append("window"))
    meter, timeline, gpu = RunMeter(print), Timeline(), FakeGpu()
    meter.begin(tmp_path, timeline, 0, gpu.run_gpu())

    def iterate(until: int, has_learned: bool) -> None:
        while now[0] < until:
            now[0] += 1
            meter.iteration(0, 0.0, has_learned)

    iterate(60, has_learned=False)
    assert not windows
    iterate(75, has_learned=True)
    gpu.captures += 1
    iterate(105, has_learned=True)
    assert not windows
    iterate(106, has_learned=True)
    assert windows == ["window"]
    meter.end()


def test_lost_window_is_retried_a_limited_number_of_times(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class LostWindow:
        def close(self) -> None:
            return None

    monkeypatch.setattr(run_meter_module, "_SETTLED_NS", 0)
    monkeypatch.setattr(run_meter_module, "_WINDOW_NS", 0)
    windows: list[LostWindow] = []
    monkeypatch.setattr(run_meter_module, "try_window", lambda torch: windows.append(LostWindow()) or windows[-1])
    meter, timeline = RunMeter(print), Timeline()
    meter.begin(tmp_path, timeline, 0, FakeGpu().run_gpu())
    for _ in range(20):
        meter.iteration(0, 0.0, has_learned=True)
    meter.end()
    assert len(windows) == run_meter_module._MAX_WINDOWS


def test_failing_meter_prints_message_and_turns_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    messages: list[str] = []
    monkeypatch.setattr(run_meter_module, "_SEGMENT_NS", 0)
    meter, timeline = RunMeter(messages.append), Timeline()
    meter.begin(tmp_path, timeline, 0, None)
    meter._file.close()  # simulates a full disk
    for step in range(4):
        timeline.enter(LEARN)
        timeline.enter(LOGGING)
        meter.iteration(step, 0.0, has_learned=True)
    meter.end()
    assert len(messages) == 1
    assert messages[0].startswith("The meter failed and is off for the rest of the run")


def test_long_segment_keeps_its_latest_intervals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_meter_module, "_SEGMENT_INTERVALS", 50)
    meter, timeline = RunMeter(print), Timeline(capacity=50)
    meter.begin(tmp_path, timeline, 0, None)
    meter.iteration(0, 0.0, has_learned=True)
    for _ in range(500):
        timeline.enter(LEARN)
        timeline.enter(LOGGING)
    meter.iteration(1, 0.0, has_learned=True)
    meter.end()
    (line,) = read_records(tmp_path / FILE)
    assert len(line["spans"]) == 50
    assert line["length"] < 0.5 * line["covered"]
    assert Timeline().intervals.maxlen == 1 << 14, "about a tenth of a second of intervals"


def test_too_short_run_prints_that_no_trace_was_recorded(tmp_path: Path) -> None:
    messages: list[str] = []
    meter = RunMeter(messages.append, trace=True)
    meter.begin(tmp_path, Timeline(), 0, FakeGpu().run_gpu())
    meter.iteration(1, 0.0, has_learned=True)
    meter.end()
    assert messages == ["No trace was recorded because the run ended too early; give it more --timesteps."]


def test_summary_of_all_segments_is_one_sentence() -> None:
    host = [HostSpan("environment", 0, 60), HostSpan("inference", 60, 70), HostSpan("learn", 70, 100)]
    device = [DeviceSpan("inference", 60, 70, 1), DeviceSpan("learn", 70, 100, 3)]
    power = [Sample(0, 0.0), Sample(70, 100.0), Sample(100, 200.0)]
    whole = run_meter_module._Total()
    found = attribute_idle(0, 100, device, host, {"inference": 1.0, "learn": 0.5}, power)
    for _ in range(2):
        whole.add(found, covered=5.0, clocked=1.0)
    assert whole.sentence() == (
        "GPU busy 25 % (14 % at 100 W in rollouts, 50 % at 200 W in learning); "
        "idle: environment 60 %, learn (launch) 15 %, unattributed 0 %."
    )
    whole.add(found, covered=10.0, clocked=0.6)  # the rest was spent on evaluations
    assert whole.sentence() == (
        "GPU busy 20 % (14 % at 100 W in rollouts, 50 % at 200 W in learning); "
        "idle: environment 48 %, learn (launch) 12 %, unattributed 20 %."
    )


@pytest.mark.parametrize("n_intervals", [1, 17, 1000])
def test_segments_consist_of_whole_iterations(
    n_intervals: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second half of each iteration is learning: a segment starting within one would report more than half."""
    now = [0]
    for module in (run_meter_module, timeline_module):
        monkeypatch.setattr(module, "perf_counter_ns", lambda: now[0])
    monkeypatch.setattr(run_meter_module, "_SEGMENT_INTERVALS", n_intervals)
    monkeypatch.setattr(run_meter_module, "_MAX_LINES", 10**12)
    meter, timeline = RunMeter(lambda messages: None), Timeline()
    meter.begin(tmp_path, timeline, 0, FakeGpu().run_gpu())
    meter._active_share = {"learn": 1.0}
    for step in range(1, 301):
        for phase in (ENVIRONMENT, STORAGE) * 6:
            timeline.enter(phase)
            now[0] += 1_000_000
        timeline.enter(LEARN)
        now[0] += 12_000_000
        timeline.add_device_work(LEARN, 12_000_000)
        timeline.enter(LOGGING)
        meter.iteration(step, now[0] * 1e-9, has_learned=True)
    meter.end()
    lines = read_records(tmp_path / FILE)
    assert len(lines) == {1: 150, 17: 100, 1000: 13}[n_intervals]  # segments of one iteration, two, and half a second
    assert [line["gpu"]["busy"] for line in lines] == pytest.approx([0.5] * len(lines))


@pytest.mark.parametrize("often", [False, True])
def test_evaluations_count_as_unattributed_gpu_time(
    often: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Iterations of 10 with a busy GPU, and evaluations of 30 after each or after every fourth."""
    now, messages = [0], list[str]()
    for module in (run_meter_module, timeline_module):
        monkeypatch.setattr(module, "perf_counter_ns", lambda: now[0])
    monkeypatch.setattr(run_meter_module, "_SEGMENT_NS", 1)
    monkeypatch.setattr(run_meter_module, "_MAX_LINES", 10**12)
    meter, timeline = RunMeter(messages.append), Timeline()
    meter.begin(tmp_path, timeline, 0, FakeGpu().run_gpu())
    meter._active_share = {"learn": 1.0}

    def spend(phase: int, time: int) -> None:
        timeline.enter(phase)
        now[0] += time

    for step in range(1, 101):
        spend(LEARN, 10)
        timeline.add_device_work(LEARN, 10)
        timeline.enter(LOGGING)
        meter.iteration(step, now[0] * 1e-9, has_learned=True)
        assert timeline.is_recording == (step % 2 == 1), "a segment starts after every other iteration"
        if often or step % 4 == 0:
            spend(EVALUATE, 30)
    meter.end()
    lines = read_records(tmp_path / FILE)
    assert len(lines) == 50
    busy = sum(line["gpu"]["busy"] * line["covered"] for line in lines)
    covered = sum(line["covered"] for line in lines)
    assert busy == pytest.approx(1000e-9, rel=0.02)
    assert covered == pytest.approx((3970 if often else 1720) * 1e-9, rel=0.02)
    for line in lines:
        gpu = line["gpu"]
        assert gpu["busy"] + sum(gpu["idle"].values()) + gpu["unattributed"] == pytest.approx(1.0)
        assert all(0 <= begin <= end for _, _, begin, end in line["spans"])
    assert messages == [
        f"GPU busy {25 if often else 58} % (100 % in learning); idle: unattributed {75 if often else 42} %."
    ]
