"""benchmarks/timeline.py and tools/timeline_picture.py: what is recorded, and the picture of a made-up result."""

from __future__ import annotations

import re
import sys
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from paths import BENCHMARKS, ROOT

sys.path.insert(0, str(ROOT / "tools"))
sys.path.append(str(BENCHMARKS))
import timeline
import timeline_picture

from unidle.meter.watch.inside.unidle_windows import KernelIntervals, merge_kernels

BOTTOM = 100.0
MS = 1_000_000


def made_up(sb3: list[float], unidle: list[float]) -> dict[str, Any]:
    """A result with these busy shares in bins of half a second."""

    def side(bins: list[float], busy: float, rate: float) -> dict[str, Any]:
        recorded = {"seconds": 2.0, "busy": busy, "bin_seconds": 0.5, "bins": bins}
        return {"steps_per_second": rate, "curve": [[0.0, 0, -300.0], [60.0, 100, rate]], "recorded": recorded}

    return {
        "machine": {"gpu": "a GPU", "cores": 16},
        "settings": {"env": "Cheetah <v5>", "episodes": 10, "preset": "beast", "overlap": "off"},
        "sides": {"sb3": side(sb3, 0.0625, 9_479.4), "unidle": side(unidle, 0.3749, 99_006.0)},
    }


def texts(svg: str) -> list[str]:
    return [node.text or "" for node in ElementTree.fromstring(svg).iter("{http://www.w3.org/2000/svg}text")]


def test_picture_names_both_sides_with_their_own_figures() -> None:
    shown = texts(timeline_picture.draw(made_up([0, 0, 0, 0.25], [0.5, 1, 0, 0])))
    lane = shown.index("Stable-Baselines3")
    assert shown[lane : lane + 4] == [
        "Stable-Baselines3",
        "GPU busy 6 %, 9,479 steps/s",
        "unidle",
        "GPU busy 37 %, 99,006 steps/s",
    ]
    assert "What the GPU does while PPO trains on Cheetah <v5>" in shown
    assert [text for text in shown if re.fullmatch(r"0|\d s", text)][:3] == ["0", "1 s", "2 s"]


@pytest.mark.parametrize("overlap", ["off", "strict"])
def test_picture_says_whether_unidle_overlaps(overlap: str) -> None:
    result = made_up([0, 0], [1, 1])
    result["settings"]["overlap"] = overlap
    assert ("collects while it learns" in timeline_picture.draw(result)) == (overlap == "strict")


def test_lanes_and_lines_have_the_colour_of_their_side() -> None:
    drawn = timeline_picture.draw(made_up([0, 0, 0, 0.25], [0.5, 1, 0, 0]))
    lanes = re.findall(r'<path class="fill (c\d)" d="([^"]+)"', drawn)
    assert [colour for colour, _ in lanes] == ["c1", "c0"]
    assert [path.count("M") for _, path in lanes] == [1, 2]
    assert re.findall(r'<path class="line (c\d)"', drawn) == ["c0", "c1"]


def test_outline_is_as_high_as_each_bin_is_busy() -> None:
    path = timeline_picture.outline([0.0, 0.5, 0.5, 1.0], BOTTOM)
    width = (timeline_picture._RIGHT - timeline_picture._LEFT) / 4
    boxes = re.findall(r"M([\d.]+),100.0V([\d.]+)H([\d.]+)V100.0", path)
    found = [(float(left), BOTTOM - float(top), float(right)) for left, top, right in boxes]
    start = timeline_picture._LEFT
    assert found == [
        (pytest.approx(start + width, abs=0.1), timeline_picture.LANE / 2, pytest.approx(start + 3 * width, abs=0.1)),
        (pytest.approx(start + 3 * width, abs=0.1), timeline_picture.LANE, pytest.approx(start + 4 * width, abs=0.1)),
    ]


def test_idle_gpu_leaves_its_lane_empty() -> None:
    assert timeline_picture.outline([0.0] * 8, BOTTOM) == ""


def test_result_without_gpu_is_not_drawn() -> None:
    result = made_up([0, 0], [1, 1])
    result["sides"]["sb3"]["recorded"] = None
    with pytest.raises(SystemExit, match="without a GPU"):
        timeline_picture.draw(result)


def test_recording_has_the_busy_share_of_the_whole_and_of_each_bin() -> None:
    # Kernels of two streams overlap in the first bin; one kernel covers half of the second and all of the third.
    kernels = [(1 * MS, 2 * MS), (1 * MS, 3 * MS), (6 * MS, 12 * MS), (16 * MS, 18 * MS)]
    began, seconds = 1_000 * MS, 0.020
    seen = merge_kernels([(began + a, began + b) for a, b in kernels], began, began + 20 * MS)
    found = timeline.recording(seen, began, seconds, shown=0.016)
    assert found["busy"] == pytest.approx(10 / 20)
    assert found["bins"] == [0.5, 0.5, 1.0, 0.0]
    assert found["kernels"] == 4


def test_recorder_keeps_a_policy_per_interval_and_leaves_out_the_warm_up(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(timeline.time, "perf_counter", lambda: now)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    recorder = timeline.Recorder(seconds=20.0, every=5.0, window=4.0)
    recorder.start(dict)
    step, over = 0, False
    for seconds in (6.0, 3.0, 3.0, 3.0, 3.0, 3.0):  # the first iteration takes twice as long
        now, step = now + seconds, step + 30
        over = recorder.iteration(step, dict)
    assert over
    assert [(wall, at) for wall, at, _ in recorder.kept] == [(0.0, 0), (6.0, 30), (12.0, 90), (15.0, 120), (21.0, 180)]
    assert recorder.steps_per_second() == pytest.approx(10.0)


class FakeWindow:
    """A profiler window in which a kernel runs in the first half of every bin."""

    def __init__(self, *, is_lost: bool) -> None:
        self.begun_ns, self.is_lost = 5_000 * MS, is_lost

    def close(self) -> KernelIntervals | None:
        kernels = [(self.begun_ns + i * 4 * MS, self.begun_ns + i * 4 * MS + 2 * MS) for i in range(2000)]
        return None if self.is_lost else merge_kernels(kernels, self.begun_ns, self.begun_ns + 8_000 * MS)


def test_gpu_is_recorded_after_the_training_and_again_if_a_window_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    windows = [None, FakeWindow(is_lost=True), FakeWindow(is_lost=False)]  # at first, the meter uses the profiler
    monkeypatch.setattr(timeline.time, "perf_counter", lambda: now)
    monkeypatch.setattr(timeline, "try_window", lambda torch: windows.pop(0))
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.synchronize", lambda: None)
    recorder = timeline.Recorder(seconds=20.0, every=5.0, window=4.0)
    recorder.start(dict)
    ends = []
    for step in range(1, 40):
        now += 3.0
        if recorder.iteration(10 * step, dict):
            ends.append(now)
            break
    assert ends == [21.0 + 3.0 + 6.0 + 6.0]  # a try, then two windows of two iterations
    assert recorder.recorded is not None
    assert recorder.recorded["busy"] == pytest.approx(0.5)
    assert set(recorder.recorded["bins"]) == {0.5}
    assert len(recorder.recorded["bins"]) == 1000
    assert recorder.recorded["steps_per_second"] == pytest.approx(10 / 3)
    assert recorder.kept[-1][0] == 21.0


def test_returns_are_those_of_whole_episodes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timeline, "ENV", "CartPole-v1")
    assert 8 < timeline.mean_return(lambda observations: np.zeros(len(observations), int)) < 11  # always to the left
