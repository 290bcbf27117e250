"""Measures a run while it trains: GPU busy and idle time by cause, one segment at a time, into `meter.jsonl`.

A segment is a few whole iterations. Attributing it takes time, so the meter pauses after each segment to keep its own
overhead small. Host phases and machine counters cover all the time since the previous segment. On a GPU the meter first
opens a short torch profiler window to calibrate how much of each phase's span is kernels; later spans are multiplied by
these shares. A CUDA graph capture fails while the profiler runs, so the window waits until the run has started learning
and nothing has been captured for a few seconds.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter_ns
from typing import Any

from unidle.engine.callbacks import RunGpu
from unidle.formatting import percent
from unidle.meter.attribution.idle_time import Attribution, Breakdown, DeviceSpan, attribute_idle, host_spans
from unidle.meter.attribution.trace import Tracer
from unidle.meter.sensors.background import Background
from unidle.meter.sensors.host import Tree
from unidle.meter.watch.inside.unidle_windows import Window, merge_kernels, torch_in_use, try_window
from unidle.metrics.jsonl import reopen
from unidle.timeline import EVALUATE, LOGGING, PHASES, Interval, Timeline

FILE = "meter.jsonl"
_READINGS = ("utilisation", "power", "memory", "SM active", "energy")
_SEGMENT_NS, _SEGMENT_INTERVALS = 500_000_000, 2_000  # a segment ends with the iteration that reaches either
_WINDOW_NS = 50_000_000  # length of a segment under the profiler
_MAX_WINDOWS = 3  # attempts to calibrate; spans stay unattributed after that
_MAX_SPANS = 400
_MAX_LINES = 2000  # per run; segments of a long run are further apart
_OWN_SHARE = 0.002  # of the run's time that the meter may use
_SETTLED_NS = 3_000_000_000  # between the last capture and the profiler window


@dataclass
class _Segment:
    """The segment being measured."""

    begun_ns: int
    window: Window | None  # open profiler window, if this segment calibrates


class RunMeter:
    """Writes `meter.jsonl`; the trainer calls it after every iteration."""

    def __init__(
        self,
        say: Callable[[str], None],
        show: Callable[[dict[str, Any]], None] | None = None,
        *,
        trace: bool = False,
        own_share: float = _OWN_SHARE,
    ) -> None:
        """`say` receives a one-sentence summary at the end, `show` every line of `meter.jsonl`.

        With `trace`, a few iterations are recorded as a trace. `own_share` is the share of the run's time that the
        meter may use.
        """
        self._say, self._show, self._wants_trace, self._own_share = say, show, trace, own_share
        self._closing = ExitStack()
        self._is_off = False
        self._tracer: Tracer | None = None
        self._background = Background(_READINGS)
        self._active_share: dict[str, float] | None = None  # None: not calibrated yet
        self._windows = 0
        self._segment: _Segment | None = None
        self._tree: Tree | None = None
        self._total = _Total()

    # -- called by the trainer -----------------------------------------------------------------------------------------

    def begin(self, folder: Path, timeline: Timeline, step: int, gpu: RunGpu | None) -> None:
        """Start measuring a run that begins or resumes at `step`."""
        self._timeline, self._gpu, self._path = timeline, gpu, folder / FILE
        now = perf_counter_ns()
        self._begun_ns = self._last_line_ns = self._pauses_until = self._settled_since = now
        self._captured = 0
        self._totals = [*timeline.totals_ns]
        with self._off_on_error():
            self._file = self._closing.enter_context(reopen(self._path, step, self._say))
            if gpu is not None:
                self._closing.callback(self._background.stop)
                self._background.start(gpu.uuid)
            if self._wants_trace:
                self._tracer = Tracer(folder, self._say)
                self._closing.callback(self._tracer.finish)
            self._tree = Tree(os.getpid())

    def iteration(self, step: int, wall: float, has_learned: bool) -> None:
        """Start or end a segment after an iteration, if one is due."""
        if self._is_off:
            return
        now = perf_counter_ns()
        segment = self._segment
        if self._gpu is not None and (not has_learned or self._gpu.captures() != self._captured):
            self._captured, self._settled_since = self._gpu.captures(), now
        with self._off_on_error():
            if self._tracer is not None and not self._tracer.is_done:
                if self._has_settled(now):
                    self._tracer.iteration()
            elif segment is not None:
                length = _SEGMENT_NS if segment.window is None else _WINDOW_NS
                if now - segment.begun_ns >= length or len(self._timeline.intervals) >= _SEGMENT_INTERVALS:
                    self._end_segment(segment, now, step, wall)
            elif now >= self._pauses_until:
                self._begin_segment(now)

    def end(self) -> None:
        """Stop measuring and report the summary."""
        with self._off_on_error(), self._closing:
            if self._segment is not None and self._segment.window is not None:
                self._segment.window.close()
        if self._total.seconds:
            self._say(self._total.sentence())

    @contextmanager
    def _off_on_error(self) -> Iterator[None]:
        """Turn the meter off and report it when it fails: a run must not fail because of its meter."""
        try:
            yield
        except Exception as error:
            self._is_off = True
            self._say(f"The meter failed and is off for the rest of the run: {str(error) or type(error).__name__}.")

    # -- segments ------------------------------------------------------------------------------------------------------

    def _begin_segment(self, now: int) -> None:
        window = None
        if self._gpu is not None and self._active_share is None:
            if not self._has_settled(now):
                return
            window = try_window(torch_in_use())
            if window is None:
                self._active_share = {}  # the profiler is in use or not available
        self._timeline.start_recording()
        self._segment = _Segment(perf_counter_ns(), window)

    def _has_settled(self, now: int) -> bool:
        """Whether the profiler may run: the run learns, and nothing was captured recently."""
        return self._gpu is None or now - self._settled_since >= _SETTLED_NS

    def _end_segment(self, segment: _Segment, now: int, step: int, wall: float) -> None:
        self._timeline.enter(LOGGING)  # the current phase; brings its totals up to date
        self._segment, self._timeline.is_recording = None, False
        on_device = [
            DeviceSpan(PHASES[phase], start, end, stream=phase) for phase, start, end in self._timeline.on_device
        ]
        if segment.window is not None:
            self._windows += 1
            self._active_share = _calibrate(segment.window, on_device)
            if self._active_share is None and self._windows == _MAX_WINDOWS:
                self._active_share = {}
            return  # the profiler slows this segment down, so it is not recorded
        on_host = list(self._timeline.intervals)
        begun = max(segment.begun_ns, on_host[0][1])
        if self._gpu is not None:  # evaluations use the GPU too, without CUDA events: start after the last of them
            begun = max([begun, *(end for phase, _, end in on_host if phase == EVALUATE)])
            on_host = [span for span in on_host if span[2] > begun]
        line: dict[str, Any] = {"step": step, "seconds": wall, "length": (now - begun) * 1e-9}
        covered, host = (now - self._last_line_ns) * 1e-9, self._host_shares()
        line |= {"covered": covered, "gpu": None, "parts": {}, "host": host}
        if self._gpu is not None:
            power = self._background.samples("power", begun)
            found = attribute_idle(begun, now, on_device, host_spans(on_host), self._active_share or {}, power)
            clocked = 1.0 - host[PHASES[EVALUATE]]
            self._total.add(found, covered, clocked)
            line |= _as_line(found, clocked)
        line["readings"] = self._readings(now)
        line["spans"] = _first_spans(begun, on_host, self._timeline.on_device)
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()
        if self._show is not None:
            self._show(line)
        self._last_line_ns, cost = now, perf_counter_ns() - now
        pause = max(cost / self._own_share, (now - self._begun_ns) / _MAX_LINES)
        self._pauses_until = perf_counter_ns() + round(pause)

    def _host_shares(self) -> dict[str, float]:
        """Return the share of each host phase since the last line."""
        totals = self._timeline.totals_ns
        spent = [after - before for after, before in zip(totals, self._totals)]
        self._totals = [*totals]
        total = sum(spent) or 1
        return {name: part / total for name, part in zip(PHASES, spent)}

    def _readings(self, now: int) -> dict[str, float | None]:
        """Return mean sensor readings since the last line; None where the machine has no such sensor."""
        means = {name: self._background.mean(name, self._last_line_ns, now) for name in _READINGS}
        cores = None
        if self._tree is not None:
            cores = next((sample.value for sample in self._tree.poll().get("cpu", ())), None)
        return {
            "utilisation": _scaled(means["utilisation"], 0.01),
            "watts": means["power"],
            "joules": self._background.increase("energy", self._last_line_ns, now),
            "memory_bytes": _scaled(means["memory"], 2**30),
            "memory_total_bytes": self._background.memory_bytes,
            "sm": _scaled(means["SM active"], 0.01),
            "cores": cores,
        }


@dataclass
class _Total:
    """All segments, each weighted by the time it represents; all values are seconds."""

    seconds: float = 0.0
    busy: float = 0.0
    unattributed: float = 0.0
    idle: dict[str, float] = field(default_factory=dict)
    parts: dict[str, list[float]] = field(default_factory=dict)  # total, busy, watt-seconds, total with known power

    def add(self, found: Attribution, covered: float, clocked: float) -> None:
        """Add a segment that represents `covered` seconds, of which the share `clocked` was measured."""
        whole, seconds = found.whole, covered * clocked
        self.seconds += covered
        self.busy += whole.busy * seconds
        self.unattributed += whole.unattributed * seconds + (covered - seconds)
        for cause, share in whole.idle.items():
            self.idle[cause] = self.idle.get(cause, 0.0) + share * seconds
        for name, part in found.parts.items():
            kept, of_part = self.parts.setdefault(name, [0.0] * 4), seconds * part.seconds / whole.seconds
            kept[0] += of_part
            kept[1] += part.busy * of_part
            if part.watts is not None:
                kept[2] += part.watts * of_part
                kept[3] += of_part

    def sentence(self) -> str:
        """GPU busy 35 % (15 % at 125 W in rollouts, 95 % at 208 W in learning); idle: …"""
        of_parts = []
        for name, words in (("rollout", "in rollouts"), ("learning", "in learning"), ("both", "while they overlap")):
            seconds, busy, joules, known = self.parts.get(name, [0.0] * 4)
            if seconds > 0.01 * self.seconds:
                watts = f" at {joules / known:.0f} W" if known else ""
                of_parts.append(f"{percent(busy / seconds)}{watts} {words}")
        waited = sorted(((s / self.seconds, cause) for cause, s in self.idle.items()), reverse=True)
        causes = [f"{cause} {percent(share)}" for share, cause in waited if share >= 0.01]
        causes.append(f"unattributed {percent(self.unattributed / self.seconds)}")
        inside = f" ({', '.join(of_parts)})" if of_parts else ""
        return f"GPU busy {percent(self.busy / self.seconds)}{inside}; idle: {', '.join(causes)}."


def _calibrate(window: Window, spans: Sequence[DeviceSpan]) -> dict[str, float] | None:
    """Close the window and return the kernel-active share of each phase's spans; None if it recorded nothing."""
    offset = time.time_ns() - perf_counter_ns()  # between the profiler's clock and ours
    seen = window.close()
    if seen is None:
        return None
    kernels = [(start - offset, end - offset) for start, end in seen.intervals]
    return active_shares(spans, kernels) or None


def active_shares(spans: Iterable[DeviceSpan], kernels: Sequence[tuple[int, int]]) -> dict[str, float]:
    """Return the share of each phase's spans in which one of `kernels` (start, end) ran, on the same clock.

    Where spans of two phases overlap, a kernel counts for both: the profiler does not say which one launched it.
    """
    ordered = [span for span in spans if span.end_ns > span.start_ns]
    if not ordered or not kernels:
        return {}
    seen = merge_kernels(kernels, min(start for start, _ in kernels), max(end for _, end in kernels))
    lengths: dict[str, int] = {}
    active: dict[str, int] = {}
    for span in ordered:
        lengths[span.phase] = lengths.get(span.phase, 0) + span.end_ns - span.start_ns
        active[span.phase] = active.get(span.phase, 0) + seen.within(span.start_ns, span.end_ns)
    return {phase: active[phase] / length for phase, length in lengths.items()}


def _as_line(found: Attribution, clocked: float) -> dict[str, Any]:
    """Return the GPU fields of a line; time outside the share `clocked` is unattributed."""

    def of_part(part: Breakdown) -> dict[str, float | None]:
        return {"share": clocked * part.seconds / found.whole.seconds, "busy": part.busy, "watts": part.watts}

    whole = found.whole
    gpu: Mapping[str, Any] = {
        "busy": clocked * whole.busy,
        "idle": {cause: clocked * share for cause, share in whole.idle.items()},
        "unattributed": clocked * whole.unattributed + (1.0 - clocked),
    }
    return {"gpu": gpu, "parts": {name: of_part(part) for name, part in found.parts.items()}}


def _first_spans(begun: int, on_host: Sequence[Interval], on_device: Iterable[Interval]) -> list[list[Any]]:
    """Return the first spans of a segment, in seconds from its start, for the dashboard's close-up."""
    spans = [("host", *span) for span in on_host[:_MAX_SPANS]]
    until = spans[-1][3] if spans else begun
    spans += [("gpu", *span) for span in on_device if begun <= span[1] < until]
    spans.sort(key=lambda span: span[2])
    return [
        [lane, PHASES[phase], round(max(0, start - begun) * 1e-9, 7), round((end - begun) * 1e-9, 7)]
        for lane, phase, start, end in spans[:_MAX_SPANS]
    ]


def _scaled(value: float | None, by: float) -> float | None:
    return None if value is None else value * by
