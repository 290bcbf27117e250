"""Reads the host with psutil: cores, memory, I/O wait, and the processes that use them.

Only cores available to this process are read. The kernel counts CPU time in hundredths of a second, so a value over
0.1 s is accurate to ten percentage points; shorter periods would be noise and are not sampled.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import psutil

from unidle.errors import UsageError
from unidle.meter.sensors.reading import EARLY, Reading, RepeatFilter, Sample

_PERIOD_S = 0.1
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_PROCESS_PERIOD_S = 1.0  # scanning all processes takes tens of milliseconds


class Host:
    """The cores and memory of this machine."""

    name = "host"

    def __init__(self) -> None:
        self.cores = tuple(sorted(os.sched_getaffinity(0)))
        self.core_names = tuple(f"core {core}" for core in self.cores)
        total = psutil.virtual_memory().total / 2**30
        self.readings = (
            Reading("cpu", "%", _PERIOD_S, 100.0),
            Reading("I/O wait", "%", _PERIOD_S, 100.0),
            Reading("memory", "GiB", 1.0, total),
            *(Reading(name, "%", _PERIOD_S, 100.0) for name in self.core_names),
        )
        self._memory = RepeatFilter(1.0)
        self._times, self._since_ns = self._core_times(), time.perf_counter_ns()
        self.unavailable = set() if self._times and self._times[0][2] is not None else {"I/O wait"}

    def poll(self) -> dict[str, list[Sample]]:
        """Return the samples that are new since the last call."""
        memory = psutil.virtual_memory()
        found = {"memory": self._memory.take(time.perf_counter_ns(), (memory.total - memory.available) / 2**30)}
        if time.perf_counter_ns() - self._since_ns < EARLY * _PERIOD_S * 1e9:
            return found
        times, at_ns = self._core_times(), time.perf_counter_ns()
        # Empty in containers that number their cores from 0 but report the machine's numbers as their affinity.
        if not times or any(now[0] <= before[0] for now, before in zip(times, self._times)):
            return found
        passed = [now[0] - before[0] for now, before in zip(times, self._times)]
        busy = [max(0, now[1] - before[1]) for now, before in zip(times, self._times)]
        for name, core_busy, core_passed in zip(self.core_names, busy, passed):
            found[name] = [Sample(at_ns, 100 * core_busy / core_passed)]
        found["cpu"] = [Sample(at_ns, 100 * sum(busy) / sum(passed))]
        if "I/O wait" not in self.unavailable:
            waited = sum(max(0, now[2] - before[2]) for now, before in zip(times, self._times))
            found["I/O wait"] = [Sample(at_ns, 100 * waited / sum(passed))]
        self._times, self._since_ns = times, at_ns
        return found

    def _core_times(self) -> list[tuple[int, int, Any]]:
        """Return the kernel's ticks of each core so far: total, busy, I/O wait (None if not reported)."""
        found = []
        every = psutil.cpu_times(percpu=True)
        for core in self.cores:
            if core >= len(every):
                continue
            t = every[core]
            ticks = {name: round(seconds * _TICKS_PER_S) for name, seconds in t._asdict().items()}
            whole = sum(ticks.values()) - ticks.get("guest", 0) - ticks.get("guest_nice", 0)  # included in user
            waiting = ticks.get("iowait")
            found.append((whole, whole - ticks["idle"] - (waiting or 0), waiting))
        return found


class Tree:
    """A process and all its descendants, such as a trainer and its workers."""

    def __init__(self, pid: int) -> None:
        try:
            self._root = psutil.Process(pid)
        except (psutil.NoSuchProcess, ValueError, OverflowError):
            raise UsageError(f"There is no process {pid}; run `ps` to list the running ones.") from None
        self.name = f"pid {pid}"
        self.readings = (
            Reading("cpu", "cores", _PERIOD_S),
            Reading("memory", "GiB", _PERIOD_S),
            Reading("processes", "", _PERIOD_S),
        )
        self.unavailable: set[str] = set()
        self.pids: set[int] = set()  # of all members ever seen
        self._before = self._use()

    @property
    def command(self) -> str:
        """Return the command line for display."""
        try:
            return " ".join(self._root.cmdline()) or self._root.name()
        except psutil.Error:
            return "ended"

    def poll(self) -> dict[str, list[Sample]]:
        """Return the samples that are new since the last call; none once the process has ended."""
        before = self._before
        if before is None or time.perf_counter_ns() - before.at_ns < EARLY * _PERIOD_S * 1e9:
            return {}  # scanning all processes is slow
        use = self._use()
        if use is None:
            return {}
        self._before = use
        # The time of a worker that died without being reaped is lost, so the total can shrink.
        cores = max(0.0, use.seconds - before.seconds) / ((use.at_ns - before.at_ns) * 1e-9)
        return {
            "cpu": [Sample(use.at_ns, cores)],
            "memory": [Sample(use.at_ns, use.memory / 2**30)],
            "processes": [Sample(use.at_ns, use.processes)],
        }

    def _use(self) -> _TreeUse | None:
        try:
            members = [self._root, *self._root.children(recursive=True)]
        except psutil.NoSuchProcess:
            return None
        self.pids |= {member.pid for member in members}
        seconds, memory, alive = 0.0, 0, 0
        for member in members:
            try:
                with member.oneshot():
                    # Includes the time of reaped children, so the work of finished workers counts.
                    seconds += sum(member.cpu_times()[:4])
                    memory += member.memory_info().rss
                    alive += 1
            except psutil.Error:
                continue
        return _TreeUse(time.perf_counter_ns(), seconds, memory, alive) if alive else None


@dataclass(frozen=True)
class _TreeUse:
    at_ns: int
    seconds: float  # of CPU time so far
    memory: int  # bytes; shared memory is counted once per process
    processes: int


@dataclass(frozen=True)
class ProcessUse:
    """Recent resource use of one process."""

    pid: int
    name: str
    cores: float
    memory: int  # bytes


class Busiest:
    """The processes that use the most CPU time, updated at most once a second."""

    def __init__(self, n: int, clock_ns: Callable[[], int] = time.perf_counter_ns) -> None:
        self._n, self._clock_ns = n, clock_ns
        self._before: dict[tuple[int, float], float] = {}  # (pid, start time) → CPU seconds so far
        self._at_ns: int | None = None
        self.processes: list[ProcessUse] = []

    def poll(self) -> bool:
        """Update `processes` if it is due; returns whether it was."""
        now_ns = self._clock_ns()
        if self._at_ns is not None and now_ns - self._at_ns < _PROCESS_PERIOD_S * 1e9:
            return False
        passed_s = (now_ns - self._at_ns) * 1e-9 if self._at_ns is not None else None
        times, found = {}, []
        for process in psutil.process_iter():
            try:
                with process.oneshot():
                    seconds = sum(process.cpu_times()[:2])
                    identity = process.pid, process.create_time()  # pids are reused
                    times[identity] = seconds
                    if passed_s is not None:
                        used = seconds - self._before.get(identity, 0.0)
                        if used > 0:
                            found.append((used / passed_s, process.name(), process.pid, process.memory_info().rss))
            except psutil.Error:
                continue
        found.sort(reverse=True)
        self.processes = [ProcessUse(pid, name, cores, memory) for cores, name, pid, memory in found[: self._n]]
        self._before, self._at_ns = times, now_ns
        return True
