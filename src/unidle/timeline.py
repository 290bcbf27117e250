"""Records where time goes: the host is always in exactly one phase, and CUDA events measure the GPU's work per phase.

Every stage of a run writes here; the meter reads it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from threading import get_ident
from time import perf_counter_ns
from typing import Any

PHASES = ("environment", "inference", "storage", "learn", "sync", "evaluate", "checkpoint", "logging", "other")
ENVIRONMENT, INFERENCE, STORAGE, LEARN, SYNC, EVALUATE, CHECKPOINT, LOGGING, OTHER = range(len(PHASES))
_CLOCK_CAPACITY = 1 << 16  # intervals
_TIMELINE_CAPACITY = 1 << 14  # intervals of the host, and as many of the device; more would take long to analyse


def never() -> bool:
    """False."""
    return False


Interval = tuple[int, int, int]  # phase, start, end, in nanoseconds of perf_counter_ns


class PhaseClock:
    """A clock that is always in one phase: entering one ends the previous one, so no time is lost or counted twice."""

    def __init__(self, n_phases: int, phase: int, capacity: int = _CLOCK_CAPACITY) -> None:
        self.totals_ns = [0] * n_phases
        self._phase = phase
        self._since = perf_counter_ns()
        self.is_recording = True
        """Whether intervals are recorded; totals always are."""
        self.intervals: deque[Interval] = deque(maxlen=capacity)
        """The latest intervals, oldest first, without the open one."""

    def enter(self, phase: int) -> int:
        """Switch to `phase` and return the one that ended. Takes 0.1 to 0.2 µs: it is called several times per step."""
        now = perf_counter_ns()
        ended = self._phase
        self.totals_ns[ended] += now - self._since
        if self.is_recording:
            self.intervals.append((ended, self._since, now))
        self._phase, self._since = phase, now
        return ended

    @property
    def current(self) -> int:
        """The phase that the clock is in."""
        return self._phase


running: dict[int, Timeline] = {}
"""The timeline of the run in each thread. The sampler of `unidle watch` reads it, in its own thread."""


class Timeline(PhaseClock):
    """The phases of the trainer's thread and, while recording, when the GPU worked for which phase."""

    def __init__(self, capacity: int = _TIMELINE_CAPACITY) -> None:
        super().__init__(len(PHASES), OTHER, capacity)
        self.on_device: deque[Interval] = deque(maxlen=capacity)
        """The GPU's work, by phase."""
        self.is_recording = False
        self.is_acting_in_c: Callable[[], bool] = never
        """Whether the loop in C infers; its times are added when it returns (`add_inference`)."""
        self._begun_ns = self._since

    @property
    def current(self) -> int:
        """The phase of this moment."""
        return INFERENCE if self._phase == ENVIRONMENT and self.is_acting_in_c() else self._phase

    def start_recording(self) -> None:
        """Discard recorded intervals and record from now on, until `is_recording` is set to False."""
        self.intervals.clear()
        self.on_device.clear()
        self.is_recording = True

    def begin(self) -> None:
        """Reset the totals: time before this call counts towards no phase."""
        self.totals_ns = [0] * len(PHASES)
        self._begun_ns = perf_counter_ns()
        self._phase, self._since = OTHER, self._begun_ns
        running[get_ident()] = self

    def end(self) -> None:
        """The run is over."""
        self.enter(OTHER)
        running.pop(get_ident(), None)

    def totals_now_ns(self) -> list[int]:
        """Nanoseconds per phase, the open phase included; any thread may call it."""
        totals, phase, since = [*self.totals_ns], self._phase, self._since
        if sum(totals) == since - self._begun_ns:  # otherwise this interrupted `enter`, which has counted it already
            totals[phase] += perf_counter_ns() - since
        return totals

    def add_inference(self, total_ns: int, intervals: Sequence[tuple[int, int]], device_ns: int) -> None:
        """Count so much of the open phase as inference.

        Until the end of each interval, the GPU worked for `device_ns`.
        """
        now = perf_counter_ns()
        self.totals_ns[self._phase] += now - self._since - total_ns
        self.totals_ns[INFERENCE] += total_ns
        if self.is_recording:
            for start, end in intervals:
                self.intervals += ((self._phase, self._since, start), (INFERENCE, start, end))
                self.on_device.append((INFERENCE, end - device_ns, end))
                self._since = end
            self.intervals.append((self._phase, self._since, now))
        self._since = now

    def add_device_work(self, phase: int, nanoseconds: int) -> None:
        """Record that the GPU has just worked this long for `phase`, while the host waited."""
        if self.is_recording:
            now = perf_counter_ns()
            self.on_device.append((phase, now - nanoseconds, now))

    def seconds(self) -> dict[str, float]:
        """Seconds per phase so far, the open phase included."""
        self.enter(self._phase)
        return {name: total * 1e-9 for name, total in zip(PHASES, self.totals_ns)}


def _cuda_event() -> Any:
    import torch

    return torch.cuda.Event(enable_timing=True)


class DeviceClock:
    """CUDA events around work launched on the current stream; they are read later, without waiting.

    CUDA measures time as float32 milliseconds after another event, the anchor: an hour later it is off by a quarter of
    a millisecond. So there is a new anchor after every read.
    """

    def __init__(self, timeline: Timeline, event: Callable[[], Any] = _cuda_event) -> None:
        self._timeline, self._event = timeline, event
        self._free: list[Any] = []
        self._recorded: list[tuple[int, Any, Any]] = []
        self._anchor: Any = None
        self._anchor_ns = 0

    def launch(self, phase: int, work: Callable[[], Any]) -> Any:
        """Call `work`, which launches kernels for `phase`, and return its result."""
        if not self._timeline.is_recording or self._anchor is None:
            return work()
        first, last = self._take(), self._take()
        first.record()
        try:
            return work()
        finally:
            last.record()
            self._recorded.append((phase, first, last))

    def read(self) -> None:
        """Add the recorded work to the timeline; call it only when the stream has finished its work."""
        for phase, first, last in self._recorded:
            start, end = (self._anchor_ns + round(1e6 * self._anchor.elapsed_time(event)) for event in (first, last))
            self._timeline.on_device.append((phase, start, end))
            self._free += (first, last)
        self._recorded.clear()
        self._anchor = self._anchor or self._event()
        self._anchor.record()
        self._anchor.synchronize()  # returns at once: the stream is idle
        self._anchor_ns = perf_counter_ns()

    def _take(self) -> Any:
        return self._free.pop() if self._free else self._event()
