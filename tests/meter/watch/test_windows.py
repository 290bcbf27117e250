"""Profiler windows: kernel intervals are merged, and a profiler of the program itself is left intact."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.profiler import ProfilerActivity, profile

from unidle.meter.watch.inside.unidle_windows import Window, merge_kernels

instants = st.integers(-5, 45)
intervals = st.lists(st.tuples(instants, instants), max_size=12)


@given(intervals, instants, instants)
def test_active_time_is_union_of_intervals(found: list[tuple[int, int]], a: int, b: int) -> None:
    merged = merge_kernels(found, 0, 40)
    covered = {t for first, last in found for t in range(max(0, first), min(40, last))}
    assert merged.active_ns == len(covered)
    assert merged.within(a, b) == len(covered & set(range(a, b)))


def test_concurrent_kernels_count_separately_but_their_time_once() -> None:
    merged = merge_kernels([(0, 10), (5, 15), (20, 20)], 0, 40)
    assert (merged.n_kernels, merged.active_ns, merged.intervals) == (2, 15, [(0, 15)])


@pytest.mark.parametrize("ends_first", ["window", "profile"])
def test_programs_own_profile_is_kept(ends_first: str) -> None:
    window = Window(torch)
    own = profile(activities=[ProfilerActivity.CPU])
    own.start()
    torch.ones(3).sum()
    if ends_first == "window":
        assert window.close() is None
    own.stop()
    if ends_first == "profile":
        assert window.close() is None
    assert "aten::sum" in {event.name for event in own.events()}


def test_profiler_error_loses_one_window_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    window, disable = Window(torch), torch.autograd._disable_profiler

    def fails() -> None:
        disable()
        raise RuntimeError("inserted.second INTERNAL ASSERT FAILED")

    with monkeypatch.context() as patch:
        patch.setattr(torch.autograd, "_disable_profiler", fails)
        assert window.close() is None
    assert Window(torch).close() is not None


PROFILE_IN_OTHER_THREAD = """
import torch
from concurrent.futures import ThreadPoolExecutor
from torch.profiler import ProfilerActivity, profile
from unidle.meter.watch.inside.unidle_windows import Window, try_window
with ThreadPoolExecutor(1) as sampler:
    window = sampler.submit(Window, torch).result()
    with profile(activities=[ProfilerActivity.CPU]) as own:
        torch.ones(3).sum()
    assert sampler.submit(window.close).result() is None
    assert "aten::sum" in {event.name for event in own.events()}
    first = sampler.submit(try_window, torch).result()  # the profiler may still be in use
    if first is not None:
        sampler.submit(first.close).result()
    second = sampler.submit(Window, torch).result()
    assert sampler.submit(second.close).result() is not None
"""


def test_profile_in_another_thread_during_window_is_kept() -> None:
    done = subprocess.run([sys.executable, "-c", PROFILE_IN_OTHER_THREAD], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
