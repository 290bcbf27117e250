"""benchmarks/simulator_account.py: what the profiler's kernels and the meter's segments are counted as."""

from __future__ import annotations

import sys
import time
from argparse import Namespace
from typing import Any

import pytest
from paths import BENCHMARKS

sys.path.append(str(BENCHMARKS))
import simulator_account
from simulator_account import MARKER, Phases, by_row, gpu_account, metered


def marker(at: int) -> tuple[str, int, int]:
    return f"void {MARKER}(long)", at, at + 1


def test_kernels_and_the_gaps_before_them_belong_to_the_phase_that_began_last() -> None:
    kernels = [
        ("before", 0, 10),
        marker(20),  # inference
        ("act", 30, 40),
        marker(40),  # environment
        ("fusion", 45, 60),
        ("fusion", 70, 80),
        marker(80),  # rest
        ("noise", 85, 90),
    ]
    found = gpu_account(kernels, ["inference", "environment", "rest"], 0, 100)
    assert found is not None
    assert found["busy_with"] == {
        "environment": 0.25,
        "inference": 0.1,
        "storage": 0.0,
        "learning": 0.0,
        "rest": 0.15,
    }
    assert found["idle"] == {"environment": 0.15, "inference": 0.2, "storage": 0.0, "learning": 0.0, "rest": 0.15}
    assert found["busy"] + sum(found["idle"].values()) == pytest.approx(1.0)
    assert found["kernels"]["environment"] == 2


def test_overlapping_kernels_and_edges_of_the_window_count_once() -> None:
    kernels = [marker(0), ("long", 1, 50), ("within", 10, 20), ("overlapping", 40, 60), ("beyond", 90, 130)]
    found = gpu_account(kernels, ["learning"], 10, 110)
    assert found is not None
    assert found["busy_with"]["learning"] == pytest.approx(0.7)  # 10 to 60, 90 to 110
    assert found["idle"]["learning"] == pytest.approx(0.3)


@pytest.mark.parametrize("marks", [[], ["environment"], ["environment", "rest", "environment"]])
def test_account_needs_every_marker(marks: list[str]) -> None:
    assert gpu_account([marker(0), ("kernel", 5, 6), marker(8)], marks, 0, 10) is None


def test_other_phases_and_causes_are_the_rest() -> None:
    thread = by_row({"environment": 0.5, "learn": 0.2, "sync": 0.1, "logging": 0.05, "other": 0.15}, of_gpu=False)
    assert (thread["environment"], thread["learning"], thread["waiting for the GPU"]) == (0.5, 0.2, 0.1)
    assert thread["rest"] == pytest.approx(0.2)
    gpu = by_row({"environment": 0.5, "learn (launch)": 0.2, "sync": 0.1}, of_gpu=True)
    assert (gpu["environment"], gpu["learning"], gpu["rest"]) == (0.5, 0.2, 0.1)


def test_segments_of_the_meter_count_by_their_length_and_only_within_the_steps() -> None:
    def line(step: int, length: float, busy: float) -> dict[str, Any]:
        idle = {"environment": 1 - busy - 0.1, "sync": 0.05}
        return {"step": step, "length": length, "gpu": {"busy": busy, "idle": idle, "unattributed": 0.05}}

    lines = [line(10, 9.0, 0.9), line(20, 1.0, 0.2), line(30, 3.0, 0.4), line(40, 9.0, 0.9)]
    found = metered([*lines, {"step": 25, "gpu": None}], 10, 30)
    assert found is not None
    assert found["segments"] == 2
    assert found["busy"] == pytest.approx(0.35)
    assert found["idle"]["environment"] == pytest.approx(0.55)
    assert found["idle"]["rest"] == pytest.approx(0.05)
    assert found["unattributed"] == pytest.approx(0.05)
    assert metered([{"step": 25, "gpu": None}], 10, 30) is None


def test_wrapped_methods_are_timed_even_if_they_fail() -> None:
    class Slow:
        def step(self, fails: bool) -> str:
            time.sleep(0.02)
            if fails:
                raise ValueError("fails")
            return "stepped"

    phases = Phases()
    phases.wrap(Slow, "step", "environment")
    assert Slow().step(False) == "stepped"
    with pytest.raises(ValueError, match="fails"):
        Slow().step(True)
    assert phases.seconds["environment"] >= 0.04


class FakeWindow:
    """A profiler window with a marker and a kernel of 3 ms per phase that began."""

    begun_ns, ended_ns = 0, 10_000_000

    def __init__(self, phases: Phases) -> None:
        self._phases = phases

    def close_with_names(self) -> list[simulator_account.Kernel]:
        starts = [1_000_000 + 4_000_000 * i for i in range(len(self._phases.marks))]
        return [kernel for at in starts for kernel in (marker(at), ("kernel", at + 1, at + 3_000_000))]


def test_profiler_counts_only_what_is_marked_in_its_window(monkeypatch: pytest.MonkeyPatch) -> None:
    phases = Phases()
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.synchronize", lambda: None)
    monkeypatch.setattr("torch.cuda._sleep", lambda cycles: None, raising=False)
    monkeypatch.setattr(simulator_account, "try_window", lambda torch: FakeWindow(phases))
    now = 0.0
    monkeypatch.setattr(simulator_account.time, "perf_counter", lambda: now)

    class Steps:
        def step(self) -> None: ...

    phases.wrap(Steps, "step", "environment")
    account = simulator_account.Account(phases, warm_up=1.0, seconds=5.0, window=1.0)
    is_over, iteration = False, 0
    while not is_over:
        Steps().step()
        assert phases.marks in ([], ["environment", "rest"])
        now, iteration = now + 1.0, iteration + 1
        record = {"wall": now, "step": 100 * iteration, "iteration": iteration, "time/environment": 0.5 * now}
        is_over = account.iteration(record)
        assert iteration < 20
    assert account.found["thread"]["unidle"]["environment"] == pytest.approx(0.5)
    assert account.found["steps_per_second"] == pytest.approx(100)
    profiler = account.found["profiler"]
    assert profiler["kernels"] == {"environment": 1, "inference": 0, "storage": 0, "learning": 0, "rest": 1}
    assert profiler["busy_with"]["environment"] == pytest.approx(0.3, abs=1e-3)


def test_thread_account_of_a_real_run_agrees_with_timers(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("gymnax")
    monkeypatch.setattr(simulator_account, "ENV", "gymnax:CartPole-v1")
    monkeypatch.setattr(simulator_account, "ENV_KWARGS", {})
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    for owner, name, _ in simulator_account.timed_methods():
        monkeypatch.setattr(owner, name, getattr(owner, name))  # restored after the test
    arguments = Namespace(n_envs=8, n_steps=16, seconds=1.5, window=0.5)
    found = simulator_account.measure_account(arguments)
    unidle, timers = found["thread"]["unidle"], found["thread"]["timers"]
    assert found["meter"] is None
    assert unidle["environment"] > 0.1
    for row in unidle:
        assert unidle[row] == pytest.approx(timers[row], abs=0.05)
    assert sum(unidle.values()) == pytest.approx(1.0, abs=0.05)
