"""What a look of torch's profiler is made into: a union of intervals, whatever it saw."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.profiler import ProfilerActivity, profile

from unidle.meter.watch.inside.unidle_windows import Window, computed

moments = st.integers(-5, 45)
intervals = st.lists(st.tuples(moments, moments), max_size=12)


@given(intervals, moments, moments)
def test_the_union_is_the_instants_that_any_interval_covers(found: list[tuple[int, int]], a: int, b: int) -> None:
    seen = computed(found, 0, 40)
    covered = {t for first, last in found for t in range(max(0, first), min(40, last))}
    assert seen.active_ns == len(covered)
    assert seen.within(a, b) == len(covered & set(range(a, b)))


def test_kernels_side_by_side_are_counted_apart_and_their_time_once() -> None:
    seen = computed([(0, 10), (5, 15), (20, 20)], 0, 40)
    assert (seen.n_kernels, seen.active_ns, seen.intervals) == (2, 15, [(0, 15)])


@pytest.mark.parametrize("ends_first", ["look", "profile"])
def test_a_program_that_profiles_itself_keeps_what_it_sees(ends_first: str) -> None:
    look = Window(torch)
    own = profile(activities=[ProfilerActivity.CPU])
    own.start()
    torch.ones(3).sum()
    if ends_first == "look":
        assert look.close() is None
    own.stop()
    if ends_first == "profile":
        assert look.close() is None
    assert "aten::sum" in {event.name for event in own.events()}


def test_what_torch_itself_cannot_make_sense_of_is_a_lost_look_and_the_next_one_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    look, disable = Window(torch), torch.autograd._disable_profiler

    def fails() -> None:
        disable()
        raise RuntimeError("inserted.second INTERNAL ASSERT FAILED")

    with monkeypatch.context() as patch:
        patch.setattr(torch.autograd, "_disable_profiler", fails)
        assert look.close() is None
    assert Window(torch).close() is not None


OF_ANOTHER_THREAD = """
import torch
from concurrent.futures import ThreadPoolExecutor
from torch.profiler import ProfilerActivity, profile
from unidle.meter.watch.inside.unidle_windows import Window, try_window
with ThreadPoolExecutor(1) as sampler:
    look = sampler.submit(Window, torch).result()
    with profile(activities=[ProfilerActivity.CPU]) as own:
        torch.ones(3).sum()
    assert sampler.submit(look.close).result() is None
    assert "aten::sum" in {event.name for event in own.events()}
    first = sampler.submit(try_window, torch).result()  # it may find the profiler still in use
    if first is not None:
        sampler.submit(first.close).result()
    second = sampler.submit(Window, torch).result()
    assert sampler.submit(second.close).result() is not None
"""


def test_a_profile_that_came_and_went_during_a_look_from_another_thread_ends_nothing() -> None:
    done = subprocess.run([sys.executable, "-c", OF_ANOTHER_THREAD], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
