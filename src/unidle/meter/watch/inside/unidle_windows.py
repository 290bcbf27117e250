"""Short looks, by torch's own profiler, at when the GPU computed.

A stack says where the program stood, not whether a kernel ran meanwhile. In a window of some tenths of a second the
profiler knows it to the microsecond; what it saw is merged into intervals and never kept as a trace.

A program that captures CUDA graphs must not be looked at in this way: seen on an H200 with torch 2.11, a capture fails
beside the profiler, even one that begins between two windows. So there are windows only where they are asked for.

Only the GPU's activities are asked for: they are collected by the driver, whichever thread launched them. Operations of
other threads on the CPU (`profile_all_threads`) are not: programs were seen to crash inside torch meanwhile.
"""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
import time
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from typing import Any


def torch_in_use() -> Any:
    """The torch that the program imported, once it is whole; None before."""
    torch = sys.modules.get("torch")
    if torch is None or "torch.autograd.profiler" not in sys.modules:
        return None
    return None if getattr(getattr(torch, "__spec__", None), "_initializing", False) else torch


def uses_cuda(torch: Any) -> bool:
    """Whether the program has begun to use a GPU; asking does not begin it."""
    return bool(torch.cuda.is_initialized())


class Window:
    """An open look."""

    def __init__(self, torch: Any) -> None:
        """Raises, with whatever torch raises, where it cannot be opened."""
        autograd = torch.autograd
        if torch.autograd.profiler._is_profiler_enabled:
            raise RuntimeError("the program profiles itself")
        self._torch, self._is_taken = torch, False
        hush_kineto()
        kind, extra = autograd.ProfilerState.KINETO, torch._C._profiler._ExperimentalConfig()
        config = autograd.ProfilerConfig(kind, False, False, False, False, False, extra)
        activities = {autograd.ProfilerActivity.CUDA}
        with _without_kineto_complaint():
            autograd._prepare_profiler(config, activities)
        autograd._enable_profiler(config, activities)
        self._usual_start = getattr(autograd.profiler, "_run_on_profiler_start", None)  # not in all versions
        if self._usual_start is not None:
            autograd.profiler._run_on_profiler_start = self._started_by_the_program
        self.begun_ns = time.time_ns()  # the profiler's clock
        self.ended_ns = self.begun_ns

    def _started_by_the_program(self) -> None:
        self._is_taken = True
        self._usual_start()  # type: ignore[misc]

    def close(self) -> Computed | None:
        """End the look; returns what it saw, or None if it is lost.

        That is so if the program has begun to profile itself meanwhile. There is but one profiler, and it is the
        program's since then: to end it would take away what the program sees. To end it once more, from another thread,
        would end the program. And torch itself may not make sense of what it saw: on an H200 with torch 2.11, where a
        window lay over a program's first kernels, all later ones of that process mostly ended in a failed assertion of
        torch's own, that no two launches have the same number.
        """
        autograd = self._torch.autograd
        self.ended_ns = time.time_ns()
        if self._usual_start is not None:
            autograd.profiler._run_on_profiler_start = self._usual_start
        if self._is_taken or autograd.profiler._is_profiler_enabled:
            return None
        try:
            events = autograd._disable_profiler().events()
        except RuntimeError:
            return None
        found = []
        for event in events:
            is_copy = event.name().startswith(("Memcpy", "Memset"))
            if event.device_type() == autograd.DeviceType.CUDA and not is_copy:
                start = event.start_ns()
                found.append((start, start + event.duration_ns()))
        return computed(found, self.begun_ns, self.ended_ns)


def hush_kineto() -> None:
    """Keep the profiler from writing what it does into the program's output; to be called before its first use."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")


class Computed:
    """What was computed in a window: merged intervals, and how many kernels they are made of."""

    def __init__(self, intervals: list[tuple[int, int]], pieces: int) -> None:
        self.intervals, self.pieces = intervals, pieces
        self._starts = [start for start, _ in intervals]

    @property
    def active_ns(self) -> int:
        """Time in which something was computed."""
        return sum(end - start for start, end in self.intervals)

    def within(self, begin: int, end: int) -> int:
        """Of the time from `begin` to `end`, how much something was computed."""
        place = max(0, bisect_right(self._starts, begin) - 1)
        total = 0
        while place < len(self.intervals) and self.intervals[place][0] < end:
            total += max(0, min(self.intervals[place][1], end) - max(self.intervals[place][0], begin))
            place += 1
        return total


def computed(found: Sequence[tuple[int, int]], begin: int, end: int) -> Computed:
    """Intervals, which may overlap (several streams) and come in any order, as a union inside the window."""
    merged: list[tuple[int, int]] = []
    inside = sorted((max(first, begin), min(last, end)) for first, last in found)
    inside = [(first, last) for first, last in inside if first < last]
    for first, last in inside:
        if merged and first <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(last, merged[-1][1]))
        else:
            merged.append((first, last))
    return Computed(merged, len(inside))


_was_prepared = False


@contextlib.contextmanager
def _without_kineto_complaint() -> Iterator[None]:
    """Keep one line off the command's output, which Kineto prints when it first works for another thread than the main.

    What others write to standard error meanwhile, some milliseconds, is passed on afterwards.
    """
    global _was_prepared
    if _was_prepared:
        yield
        return
    _was_prepared = True
    with tempfile.TemporaryFile() as kept:
        before = os.dup(2)
        os.dup2(kept.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(before, 2)
            kept.seek(0)
            for line in kept:
                if b"External init callback" not in line:
                    os.write(before, line)
            os.close(before)


def try_window(torch: Any) -> Window | None:
    """A window, or None where this torch cannot open one, or not now."""
    try:
        return Window(torch)
    except Exception:
        return None
