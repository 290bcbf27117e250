"""Short windows of torch's profiler that measure when the GPU computed.

A stack shows where the program is, not whether a kernel is running. The profiler knows this to the microsecond; a
window lasts a few tenths of a second, and its kernels are merged into intervals, never kept as a trace.

Do not use windows on programs that capture CUDA graphs: on an H200 with torch 2.11, a capture fails when the profiler
has been active, even one that begins between two windows. That is why windows are opt-in.

Only GPU activities are recorded; the driver collects them for all threads. CPU operations of other threads
(`profile_all_threads`) are not recorded because this has crashed programs inside torch.
"""

from __future__ import annotations

import _thread
import contextlib
import os
import sys
import tempfile
import time
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from typing import Any


def torch_in_use() -> Any:
    """Return the program's torch module once it is fully imported; None before."""
    torch = sys.modules.get("torch")
    if torch is None or "torch.autograd.profiler" not in sys.modules:
        return None
    return None if getattr(getattr(torch, "__spec__", None), "_initializing", False) else torch


def thread_count(torch: Any) -> int | None:
    """Return the number of threads that torch computes with; None if it is not known."""
    # In a new thread: torch keeps the number per thread, as it was when the thread first used it. Not one of
    # `threading`, which programs count.
    found: list[int] = []
    is_done = _thread.allocate_lock()
    is_done.acquire()

    def read() -> None:
        try:
            found.append(torch.get_num_threads())
        finally:
            is_done.release()

    with contextlib.suppress(RuntimeError):  # no thread can be started during interpreter shutdown
        _thread.start_new_thread(read, ())
        is_done.acquire(timeout=1.0)
    return found[0] if found else None


def uses_cuda(torch: Any) -> bool:
    """Whether the program has initialised CUDA; does not initialise it."""
    return bool(torch.cuda.is_initialized())


class Window:
    """An open profiler window."""

    def __init__(self, torch: Any) -> None:
        """Raises whatever torch raises if the profiler cannot start."""
        autograd = torch.autograd
        if torch.autograd.profiler._is_profiler_enabled:
            raise RuntimeError("the program is already profiling")
        self._torch, self._was_replaced = torch, False
        silence_kineto()
        kind, extra = autograd.ProfilerState.KINETO, torch._C._profiler._ExperimentalConfig()
        config = autograd.ProfilerConfig(kind, False, False, False, False, False, extra)
        activities = {autograd.ProfilerActivity.CUDA}
        with _suppress_kineto_warning():
            autograd._prepare_profiler(config, activities)
        autograd._enable_profiler(config, activities)
        self._usual_start = getattr(autograd.profiler, "_run_on_profiler_start", None)  # not in all versions
        if self._usual_start is not None:
            autograd.profiler._run_on_profiler_start = self._started_by_the_program
        self.begun_ns = time.time_ns()  # the profiler's clock
        self.ended_ns = self.begun_ns

    def _started_by_the_program(self) -> None:
        self._was_replaced = True
        self._usual_start()  # type: ignore[misc]

    def close(self) -> KernelIntervals | None:
        """Close the window; returns when a kernel ran, or None if the kernels are lost."""
        found = self.close_with_names()
        if found is None:
            return None
        return merge_kernels([(start, end) for _, start, end in found], self.begun_ns, self.ended_ns)

    def close_with_names(self) -> list[tuple[str, int, int]] | None:
        """Close the window; returns name, start and end of each kernel it recorded, or None if they are lost.

        They are lost if the program has started profiling in the meantime: there is only one profiler, and stopping it
        would take the program's results away; stopping it twice, from another thread, would crash the program. torch
        itself may also fail to process the events: on an H200 with torch 2.11, if a window covered a program's first
        kernels, most later windows of that process failed torch's assertion that launch numbers are unique.
        """
        autograd = self._torch.autograd
        self.ended_ns = time.time_ns()
        if self._usual_start is not None:
            autograd.profiler._run_on_profiler_start = self._usual_start
        if self._was_replaced or autograd.profiler._is_profiler_enabled:
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
                found.append((event.name(), start, start + event.duration_ns()))
        return found


def silence_kineto() -> None:
    """Keep the profiler's log out of the program's output; call before its first use."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")


class KernelIntervals:
    """The kernels of a window, merged into intervals, and their number."""

    def __init__(self, intervals: list[tuple[int, int]], n_kernels: int) -> None:
        self.intervals, self.n_kernels = intervals, n_kernels
        self._starts = [start for start, _ in intervals]

    @property
    def active_ns(self) -> int:
        """Time in which at least one kernel ran."""
        return sum(end - start for start, end in self.intervals)

    def within(self, begin: int, end: int) -> int:
        """Return the active time between `begin` and `end`."""
        place = max(0, bisect_right(self._starts, begin) - 1)
        total = 0
        while place < len(self.intervals) and self.intervals[place][0] < end:
            total += max(0, min(self.intervals[place][1], end) - max(self.intervals[place][0], begin))
            place += 1
        return total


def merge_kernels(intervals: Sequence[tuple[int, int]], begin: int, end: int) -> KernelIntervals:
    """Merge intervals, which may overlap (several streams) and come in any order, clipped to the window."""
    merged: list[tuple[int, int]] = []
    inside = sorted((max(first, begin), min(last, end)) for first, last in intervals)
    inside = [(first, last) for first, last in inside if first < last]
    for first, last in inside:
        if merged and first <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(last, merged[-1][1]))
        else:
            merged.append((first, last))
    return KernelIntervals(merged, len(inside))


_was_prepared = False


@contextlib.contextmanager
def _suppress_kineto_warning() -> Iterator[None]:
    """Suppress the line that Kineto prints when it is first used outside the main thread.

    Anything else written to standard error in these few milliseconds is forwarded afterwards.
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
    """Open a window; None if torch cannot open one now."""
    try:
        return Window(torch)
    except Exception:
        return None
