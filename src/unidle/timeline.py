"""Where time goes: the host is always in exactly one phase, and CUDA events tell when the GPU worked for which.

Every stage of a run writes here; the meter reads it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from time import perf_counter_ns
from typing import Any

PHASES = ("environment", "inference", "storage", "learn", "sync", "evaluate", "checkpoint", "logging", "other")
ENVIRONMENT, INFERENCE, STORAGE, LEARN, SYNC, EVALUATE, CHECKPOINT, LOGGING, OTHER = range(len(PHASES))
_KEPT = 1 << 16  # intervals of a clock
_HEARD = 1 << 14  # of a timeline, and as many of the device: more would take long to account for

Interval = tuple[int, int, int]  # phase, start, end, in nanoseconds of perf_counter_ns


class PhaseClock:
    """A clock that is always in one phase. Entering the next one ends the last: nothing is lost or counted twice."""

    def __init__(self, n_phases: int, phase: int, capacity: int = _KEPT) -> None:
        self.totals_ns = [0] * n_phases
        self._phase = phase
        self._since = perf_counter_ns()
        self.is_heard = True
        """Whether intervals are kept, for those who need more than totals."""
        self.intervals: deque[Interval] = deque(maxlen=capacity)
        """The latest, oldest first; the open one is not among them."""

    def enter(self, phase: int) -> int:
        """Switch to `phase` and return the one that ended; 0.1 to 0.2 µs: it is called several times a step."""
        now = perf_counter_ns()
        ended = self._phase
        self.totals_ns[ended] += now - self._since
        if self.is_heard:
            self.intervals.append((ended, self._since, now))
        self._phase, self._since = phase, now
        return ended


class Timeline(PhaseClock):
    """What the trainer's thread does and, while it is heard, when the GPU worked for which phase."""

    def __init__(self, capacity: int = _HEARD) -> None:
        super().__init__(len(PHASES), OTHER, capacity)
        self.on_device: deque[Interval] = deque(maxlen=capacity)
        """When the GPU worked for which phase."""
        self.is_heard = False

    def listen(self) -> None:
        """Keep intervals from now on, and none from before; until `is_heard` is taken back."""
        self.intervals.clear()
        self.on_device.clear()
        self.is_heard = True

    def begin(self) -> None:
        """Let the account start now: what was before belongs to no phase."""
        self.totals_ns = [0] * len(PHASES)
        self._phase, self._since = OTHER, perf_counter_ns()

    def worked(self, phase: int, nanoseconds: int) -> None:
        """The GPU has just done so much work for `phase`, and the host has waited for it."""
        if self.is_heard:
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

    Their times are float32 milliseconds after another event: an hour later they are off by a quarter of a millisecond.
    So the anchor that they are read against is renewed whenever they are read.
    """

    def __init__(self, timeline: Timeline, event: Callable[[], Any] = _cuda_event) -> None:
        self._timeline, self._event = timeline, event
        self._free: list[Any] = []
        self._recorded: list[tuple[int, Any, Any]] = []
        self._anchor: Any = None
        self._anchor_ns = 0

    def launch(self, phase: int, work: Callable[[], Any]) -> Any:
        """Call `work`, which launches something for `phase`; returns what it returns."""
        if not self._timeline.is_heard or self._anchor is None:
            return work()
        first, last = self._take(), self._take()
        first.record()
        try:
            return work()
        finally:
            last.record()
            self._recorded.append((phase, first, last))

    def read(self) -> None:
        """Tell the timeline what was recorded; to be called where the stream has come to the end of its work."""
        for phase, first, last in self._recorded:
            begun, ended = (self._anchor_ns + round(1e6 * self._anchor.elapsed_time(at)) for at in (first, last))
            self._timeline.on_device.append((phase, begun, ended))
            self._free += (first, last)
        self._recorded.clear()
        self._anchor = self._anchor or self._event()
        self._anchor.record()
        self._anchor.synchronize()  # at once: there is nothing before it
        self._anchor_ns = perf_counter_ns()

    def _take(self) -> Any:
        return self._free.pop() if self._free else self._event()
