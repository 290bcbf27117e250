"""Samples this process's Python stacks from a background thread, without debugger privileges.

The stacks come from `faulthandler`, which reads them in C in one call. Walking the frames of a running thread from
Python is not safe; on Python 3.11 it occasionally crashed programs.

Each sample covers the time since the previous one and records how long the thread was on a core and how long it waited
for one. Equal stacks are summed, and the sums are written atomically every second or two, so even SIGKILL loses no more
than that.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import json
import os
import random
import sys
import threading
import time
from collections import deque
from typing import Any

import unidle_phases  # type: ignore[import-not-found]
import unidle_utilisation  # type: ignore[import-not-found]
import unidle_windows  # type: ignore[import-not-found]

_PERIOD_S = 0.01
_WORKER_PERIOD_S = 0.1  # there may be hundreds of workers on a few cores
_WINDOW_PERIOD_S = 0.002  # inside a profiler window
_FIRST_WRITE_S, _LAST_WRITE_S = 0.25, 4.0
# Interpreter switch interval. With the default of 5 ms, Python code shorter than that would finish before the sampler
# gets the interpreter, and the time would be attributed to the code after it.
_SWITCH_S = 0.0002
_MAX_STACKS = 5000
_MAX_THREADS = 16
# Length of a profiler window, and the pause between two: at first, and later in a long run.
_WINDOW_S, _FIRST_WINDOWS_S, _LAST_WINDOWS_S = 0.2, 2.5, 30.0
_MAX_LOST = 3  # windows without a result before windows are disabled
_MAX_RECENT = 1000  # samples, about ten seconds; a driver reading covers at most the last one
_PAIR_S, _PAIRED = 0.0002, 0.3  # time between the two samples of a pair, and share of samples taken in pairs
_WORKER_WORDS = (
    "multiprocessing.spawn",
    "multiprocessing.forkserver",
    "--multiprocessing-fork",
    "loky",
    "default_worker",
    "unidle.envs.pool.worker",
    "unidle.engine.evaluate.worker_main",
)


def begin(folder: str) -> None:
    """Sample this process and its forks until they exit."""
    words = " ".join(getattr(sys, "orig_argv", sys.argv if hasattr(sys, "argv") else []))
    if "multiprocessing.resource_tracker" in words:
        return
    sampler = _Sampler(folder, any(word in words for word in _WORKER_WORDS))
    os.register_at_fork(before=sampler.stop, after_in_parent=sampler.start, after_in_child=sampler.start_in_child)
    atexit.register(sampler.close)  # no thread may be inside torch during interpreter shutdown
    sampler.start()


class _Sampler:
    def __init__(self, folder: str, is_worker: bool) -> None:
        self._folder, self._is_worker = folder, is_worker
        self._has_windows = bool(os.environ.get("UNIDLE_WATCH_WINDOWS"))
        self._usual_switch_s = sys.getswitchinterval()
        self._thread: threading.Thread | None = None
        self._clear()

    def _clear(self) -> None:
        self._begun_ns = self._last_ns = time.perf_counter_ns()
        self._frames: dict[str, int] = {}  # line of faulthandler's output → index
        # (thread, phase of an unidle run or -1, frames from the innermost) → ns of wall time, on a core, waiting for a
        # core, with known compute activity, computing.
        self._stacks: dict[tuple[int, ...], list[int]] = {}
        self._phases = unidle_phases.PhaseTotals()
        self._scheduled: dict[int, tuple[int, int]] = {}  # thread → ns on a core and waiting so far
        self._windows: list[dict[str, Any]] = []
        self._gpu_use = unidle_utilisation.UtilisationReader(self._folder)
        # Recent samples of the main thread: (sums, from, to).
        self._recent: deque[tuple[list[int], int, int]] = deque(maxlen=_MAX_RECENT)
        self._before_cuda: list[tuple[list[int], int]] = []  # main thread's sums, wall time until then
        self._has_driver_readings = False
        self._tasks = 1
        self._main_lines: list[str] | None = None
        self._next_write_s, self._write_after_s = 0.0, _FIRST_WRITE_S
        self._next_window_s = 0.0
        self._window_every_s = _FIRST_WINDOWS_S
        self._is_warm = self._uses_cuda = False
        self._lost_windows = 0  # in a row
        self._closed_ns: int | None = None
        self._failure: str | None = None
        self._cpu_before_s, self._own_cpu_s, self._own_cpu_before_s = time.process_time(), 0.0, 0.0
        self._schedule_of(threading.main_thread().ident or 0)

    def start(self) -> None:
        """Start sampling, or continue after a fork."""
        if self._thread is None and self._failure is None:
            self._ended = threading.Event()
            self._next_write_s = time.monotonic() + self._write_after_s
            self._thread = threading.Thread(target=self._run, name="unidle watch", daemon=True)
            self._thread.start()
            self._set_switch_interval()

    def start_in_child(self) -> None:
        """Start from scratch in a forked process."""
        self._thread = None
        self._is_worker = True
        self._clear()
        self.start()

    def stop(self) -> None:
        """Pause before a fork, so that a single-threaded program forks with one thread."""
        if self._thread is not None:
            self._ended.set()
            self._thread.join(5.0)
            self._thread = None
            self._own_cpu_before_s = self._own_cpu_s

    def close(self) -> None:
        """Stop permanently and write the samples."""
        self._closed_ns = time.perf_counter_ns()
        self.stop()
        self._write()

    def _run(self) -> None:
        period_s = _WORKER_PERIOD_S if self._is_worker else _PERIOD_S
        ended = self._ended
        while not ended.wait(period_s * random.uniform(0.5, 1.5)):  # random, to avoid aliasing
            try:
                begun_ns = self._last_ns
                main = self._sample()
                now_s = time.monotonic()
                torch = unidle_windows.torch_in_use()
                if not self._is_worker and torch is not None and unidle_windows.uses_cuda(torch):
                    if not self._uses_cuda:
                        self._switch_to_gpu_activity()
                    elif not self._has_windows:
                        self._assign_readings(main, begun_ns)
                    elif now_s >= self._next_window_s:
                        self._measure_window(ended, torch)
                elif not self._is_worker and main and random.random() < _PAIRED:
                    self._sample_pair(main, self._last_ns - begun_ns)
                if now_s >= self._next_write_s:
                    self._set_switch_interval()
                    self._write()
                    self._write_after_s = min(_LAST_WRITE_S, 2 * self._write_after_s)
                    self._next_write_s = time.monotonic() + self._write_after_s
                self._own_cpu_s = self._own_cpu_before_s + time.thread_time()
            except Exception as error:  # must not disturb the command
                self._failure = repr(error)
                return

    def _sample(self) -> list[int] | None:
        """Sample all threads; returns the sums of the main thread's stack, if there was room for it."""
        now_ns = time.perf_counter_ns()
        passed, self._last_ns = now_ns - self._last_ns, now_ns
        main = threading.main_thread().ident
        found: list[int] | None = None
        phases = unidle_phases.current_phases()
        stacks = _stacks_now()
        self._phases.update()
        self._main_lines = stacks.get(main or 0)
        for ident in sorted(stacks, key=lambda ident: ident != main)[:_MAX_THREADS]:
            sums = self._sums_of(
                0 if ident == main else ident, phases.get(ident, unidle_phases.NO_PHASE), stacks[ident]
            )
            if sums is None:
                continue
            on_core, queued = self._schedule_of(ident)
            sums[0] += passed
            sums[1] += min(passed, on_core)
            sums[2] += min(passed, queued)
            if ident == main:
                found = sums
        return found

    def _sums_of(self, thread: int, phase: int, lines: list[str]) -> list[int] | None:
        """Return the sums of a stack; None if it is new and there is no room."""
        is_full = len(self._stacks) >= _MAX_STACKS
        if is_full and not all(line in self._frames for line in lines):
            return None
        key = (thread, phase, *(self._frames.setdefault(line, len(self._frames)) for line in lines))
        return self._stacks.get(key) if is_full else self._stacks.setdefault(key, [0, 0, 0, 0, 0])

    def _schedule_of(self, ident: int) -> tuple[int, int]:
        """Return nanoseconds since the last call that a thread was on a core, and that it waited for one."""
        thread = threading._active.get(ident)  # type: ignore[attr-defined]
        native = getattr(thread, "native_id", None)
        if native is None:
            return 0, 0
        try:
            with open(f"/proc/self/task/{native}/schedstat", "rb", 0) as file:
                on_core, queued = map(int, file.read().split()[:2])
        except (OSError, ValueError):
            if ident != threading.main_thread().ident:
                return 0, 0
            # No schedstat on this kernel. Only the main thread's clock is safe to read: others may have ended.
            on_core, queued = time.clock_gettime_ns(time.pthread_getcpuclockid(ident)), 0
        before = self._scheduled.get(ident, (on_core, queued))
        self._scheduled[ident] = (on_core, queued)
        return max(0, on_core - before[0]), max(0, queued - before[1])

    def _switch_to_gpu_activity(self) -> None:
        """Switch from CPU activity to GPU activity, which was zero until now."""
        self._uses_cuda = True
        self._next_window_s = time.monotonic() + _FIRST_WINDOWS_S  # not over the first kernels, see `Window.close`
        for sums in self._stacks.values():
            sums[3] = sums[4] = 0
        self._before_cuda = [(sums, sums[0]) for (thread, *_), sums in self._stacks.items() if thread == 0]

    def _assign_readings(self, main: list[int] | None, begun_ns: int) -> None:
        """Assign the driver's utilisation readings to the main thread's stacks of that time (GPU without windows)."""
        if main is not None:
            self._recent.append((main, begun_ns, self._last_ns))
        for since_ns, until_ns, percent in self._gpu_use.new(self._last_ns):
            for sums, begin_ns, end_ns in self._recent:
                held = min(end_ns, until_ns) - max(begin_ns, since_ns)
                if held > 0:
                    self._count_time_before_cuda()
                    sums[3] += held
                    sums[4] += round(held * percent / 100)
            while self._recent and self._recent[0][2] <= until_ns:
                self._recent.popleft()

    def _count_time_before_cuda(self) -> None:
        """Count the time before the GPU's first use as known."""
        self._has_driver_readings = True
        for sums, wall in self._before_cuda:
            sums[3] += wall
        self._before_cuda = []

    def _sample_pair(self, sums: list[int], passed: int) -> None:
        """Sample again after 0.2 ms, to see whether the main thread is still in the same call (CPU).

        If so it computes inside a long call; if not, it runs Python code or short calls.
        """
        main = threading.main_thread().ident or 0
        begun_ns = time.perf_counter_ns()
        on_core = self._scheduled.get(main, (0, 0))[0]
        time.sleep(_PAIR_S)
        waited_ns = time.perf_counter_ns() - begun_ns
        after = _stacks_now().get(main)
        more, queued = self._schedule_of(main)
        sums[1] += more
        sums[2] += queued
        # A pair is valid only if the thread had time to progress, but not so much that long calls end too. If the pause
        # was long and the position is the same, the sampler had to wait for a tight Python loop to yield.
        had_time = self._scheduled.get(main, (0, 0))[0] - on_core > 0.5 * waited_ns and waited_ns < 5e9 * _PAIR_S
        is_same, is_prompt = self._main_lines == after, waited_ns < 1.75e9 * _PAIR_S
        if had_time and (is_prompt or not is_same):
            sums[3] += passed
            sums[4] += passed if is_same else 0

    def _measure_window(self, ended: threading.Event, torch: Any) -> None:
        """Measure GPU activity per stack of the main thread in a profiler window (GPU with windows)."""
        window, seen = unidle_windows.try_window(torch), None
        if window is not None:
            slices = []
            self._sample()
            at_ns = window.begun_ns
            until_s = time.monotonic() + _WINDOW_S
            while time.monotonic() < until_s and not ended.wait(_WINDOW_PERIOD_S):
                main, now_ns = self._sample(), time.time_ns()
                if main:
                    slices.append((main, at_ns, now_ns))
                at_ns = now_ns
            seen = window.close()
            if self._is_warm and seen is not None:  # the first window includes the profiler's start-up
                for sums, begin_ns, end_ns in slices:
                    sums[3] += end_ns - begin_ns
                    sums[4] += seen.within(begin_ns, end_ns)
                self._windows.append(
                    {
                        "wall_ns": window.ended_ns - window.begun_ns,
                        "active_ns": seen.active_ns,
                        "kernels": seen.n_kernels,
                    }
                )
            self._is_warm = True
        self._lost_windows = self._lost_windows + 1 if seen is None else 0
        if self._lost_windows == _MAX_LOST and not self._windows:
            self._has_windows = False  # use the driver's readings instead
        self._next_window_s = time.monotonic() + self._window_every_s * random.uniform(0.7, 1.3)
        self._window_every_s = min(_LAST_WINDOWS_S, 1.1 * self._window_every_s)

    def _set_switch_interval(self) -> None:
        """Shorten the switch interval if the sampler is the only other thread; else restore it."""
        now_s = sys.getswitchinterval()
        if abs(now_s - self._usual_switch_s) < 1e-6 or abs(now_s - _SWITCH_S) < 1e-6:  # not set by the program
            wanted_s = _SWITCH_S if threading.active_count() <= 2 else self._usual_switch_s
            if abs(wanted_s - now_s) > 1e-6:
                sys.setswitchinterval(wanted_s)

    def _write(self) -> None:
        with contextlib.suppress(OSError):
            self._tasks = max(self._tasks, len(os.listdir("/proc/self/task")) - 1)
        torch = unidle_windows.torch_in_use()
        self._phases.update()
        known = {
            "pid": os.getpid(),
            "is_worker": self._is_worker,
            "command": getattr(sys, "orig_argv", []),
            "begun_ns": self._begun_ns,  # by a clock that all processes share
            "last_ns": self._last_ns,
            "closed_ns": self._closed_ns,
            "failure": self._failure,
            "cpu_seconds": time.process_time() - self._cpu_before_s - self._own_cpu_s,
            "tasks": self._tasks,
            "torch": torch is not None,
            "torch_threads": None if torch is None else unidle_windows.thread_count(torch),
            "cuda": self._uses_cuda or (torch is not None and unidle_windows.uses_cuda(torch)),
            "windows": self._windows,
            "followed": self._has_driver_readings,
            "frames": list(self._frames),
            "phases": unidle_phases.phase_names(),
            "phase_ns": self._phases.totals_ns,
            "stacks": [[key[0], key[1], key[2:], *sums] for key, sums in self._stacks.items()],
        }
        path = os.path.join(self._folder, f"{os.getpid()}.json")
        try:
            with open(path + ".tmp", "w", encoding="utf-8") as file:
                json.dump(known, file)
            os.replace(path + ".tmp", path)
        except OSError:
            pass  # the watcher has exited


def _stacks_now() -> dict[int, list[str]]:
    """Return the stack of every other thread, one line per function, innermost first."""
    # A new file each time: a program may close or reuse descriptors it does not know.
    file = os.memfd_create("unidle")
    try:
        faulthandler.dump_traceback(file, all_threads=True)
        text = os.pread(file, 1 << 20, 0).decode("ascii", "replace")
    finally:
        os.close(file)
    found: dict[int, list[str]] = {}
    for block in text.split("\n\n"):
        if block.startswith("Thread 0x"):  # this thread is called "Current thread"
            head, *lines = block.splitlines()
            found[int(head[7:].split()[0], 16)] = lines
    return found
