"""Accounts for a run while it goes on: what its GPU did and waited for, a stretch at a time, into `meter.jsonl`.

A stretch is some whole iterations. To attribute it takes a while, so the meter rests after each until its own share of
the time is small; what the thread spent on which phase, and what the machine's own counters say, is told of all the
time since the last stretch. On a GPU the first thing is a short look by torch's profiler: it tells how much of a
phase's span kernels really ran, by which spans are multiplied from then on. A capture beside the profiler fails, so
that this waits until the run learns and nothing has been captured for some seconds.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter_ns
from typing import Any

from unidle.engine.callbacks import OnGpu
from unidle.errors import UsageError
from unidle.meter.attribution.idle_time import Account, Attribution, DeviceSpan, attribute_idle, host_spans
from unidle.meter.attribution.trace import Tracer
from unidle.meter.formatting import percent
from unidle.meter.sensors.background import Background
from unidle.meter.sensors.host import Tree
from unidle.meter.watch.inside.unidle_windows import Window, computed, torch_in_use, try_window
from unidle.metrics.journal import reopen
from unidle.timeline import EVALUATE, LOGGING, PHASES, Interval, Timeline

FILE = "meter.jsonl"
_READINGS = ("utilisation", "power", "memory", "SM active", "energy")
_STRETCH_NS, _ENOUGH = 500_000_000, 2_000  # a stretch ends with the iteration in which it has either: length, intervals
_LOOK_NS = 50_000_000  # the same for one that the profiler looks at
_MOST_LOOKS = 3  # that may be lost, or see nothing; how busy spans are stays unattributed after that
_SHOWN_SPANS = 400
_MOST_LINES = 2000  # of a run; the longer it lasts, the further apart they are
_OWN_SHARE = 0.002  # of the time may go into accounts
_SETTLED_NS = 3_000_000_000  # after the last capture, before the profiler may look


@dataclass
class _Stretch:
    """A stretch that is under way."""

    begun_ns: int
    window: Window | None  # to see what the profiler sees of it


class RunMeter:
    """Hears of every iteration; see `engine.listener.Accountant`."""

    def __init__(self, say: Callable[[str], None], *, trace: bool = False, own_share: float = _OWN_SHARE) -> None:
        """`say` gets the account of the whole, in a sentence, at the end; with `trace`, iterations are recorded.

        `own_share` of the time may go into accounts.
        """
        self._say, self._is_to_trace, self._own_share = say, trace, own_share
        self._closing = ExitStack()
        self._is_off = False
        self._tracer: Tracer | None = None
        self._background = Background(_READINGS)
        self._active_share: dict[str, float] | None = None  # None: not known yet
        self._looks = 0
        self._stretch: _Stretch | None = None
        self._tree: Tree | None = None
        self._whole = _Sum()

    # -- what the trainer calls ----------------------------------------------------------------------------------------

    def begin(self, folder: Path, timeline: Timeline, step: int, gpu: OnGpu | None) -> None:
        """The run begins, or goes on from `step`."""
        self._timeline, self._gpu, self._path = timeline, gpu, folder / FILE
        now = perf_counter_ns()
        self._begun_ns = self._told_ns = self._rests_until = self._settled_since = now
        self._captured = 0
        self._totals = [*timeline.totals_ns]
        with self._off_at_errors():
            self._file = self._closing.enter_context(reopen(self._path, step))
            if gpu is not None:
                self._closing.callback(self._background.stop)
                self._background.start(gpu.uuid)
            if self._is_to_trace:
                self._tracer = Tracer(folder, self._say)
                self._closing.callback(self._tracer.finish)
            with suppress(UsageError):  # the package for it is an extra
                self._tree = Tree(os.getpid())

    def iteration(self, step: int, wall: float, has_learned: bool) -> None:
        """An iteration is done: begin a stretch, or end one, if it is time."""
        if self._is_off:
            return
        now = perf_counter_ns()
        stretch = self._stretch
        if self._gpu is not None and (not has_learned or self._gpu.captures() != self._captured):
            self._captured, self._settled_since = self._gpu.captures(), now
        with self._off_at_errors():
            if self._tracer is not None and not self._tracer.is_done:
                if self._has_settled(now):
                    self._tracer.iteration()
            elif stretch is not None:
                length = _STRETCH_NS if stretch.window is None else _LOOK_NS
                if now - stretch.begun_ns >= length or len(self._timeline.intervals) >= _ENOUGH:
                    self._end_stretch(stretch, now, step, wall)
            elif now >= self._rests_until:
                self._begin_stretch(now)

    def end(self) -> None:
        """The run is over."""
        with self._off_at_errors(), self._closing:
            if self._stretch is not None and self._stretch.window is not None:
                self._stretch.window.close()
        if self._whole.seconds:
            self._say(self._whole.sentence())

    @contextmanager
    def _off_at_errors(self) -> Iterator[None]:
        """A meter that fails is no reason for a run to fail: it says so, and is off from then on."""
        try:
            yield
        except Exception as error:
            self._is_off = True
            self._say(f"The run's time is not accounted for any more: {str(error) or type(error).__name__}.")

    # -- a stretch -----------------------------------------------------------------------------------------------------

    def _begin_stretch(self, now: int) -> None:
        window = None
        if self._gpu is not None and self._active_share is None:
            if not self._has_settled(now):
                return
            window = try_window(torch_in_use())
            if window is None:
                self._active_share = {}  # somebody else profiles, or torch cannot
        self._timeline.listen()
        self._stretch = _Stretch(perf_counter_ns(), window)

    def _has_settled(self, now: int) -> bool:
        """Whether the profiler may look: it learns, and nothing was captured for a while."""
        return self._gpu is None or now - self._settled_since >= _SETTLED_NS

    def _end_stretch(self, stretch: _Stretch, now: int, step: int, wall: float) -> None:
        self._timeline.enter(LOGGING)  # as it is already: so that it is known up to now
        self._stretch, self._timeline.is_heard = None, False
        on_device = [
            DeviceSpan(PHASES[phase], start, end, stream=phase) for phase, start, end in self._timeline.on_device
        ]
        if stretch.window is not None:
            self._looks += 1
            self._active_share = _looked_at(stretch.window, on_device)
            if self._active_share is None and self._looks == _MOST_LOOKS:
                self._active_share = {}
            return  # a stretch under the profiler is not like others
        on_host = list(self._timeline.intervals)
        begun = max(stretch.begun_ns, on_host[0][1])
        if self._gpu is not None:  # where evaluations are played too, and without a clock: so after the last of them
            begun = max([begun, *(end for phase, _, end in on_host if phase == EVALUATE)])
            on_host = [span for span in on_host if span[2] > begun]
        line: dict[str, Any] = {"step": step, "seconds": wall, "length": (now - begun) * 1e-9}
        covered, host = (now - self._told_ns) * 1e-9, self._host_shares()
        line |= {"covered": covered, "gpu": None, "parts": {}, "host": host}
        if self._gpu is not None:
            power = self._background.samples("power", begun)
            found = attribute_idle(begun, now, on_device, host_spans(on_host), self._active_share or {}, power)
            clocked = 1.0 - host[PHASES[EVALUATE]]
            self._whole.add(found, covered, clocked)
            line |= _as_line(found, clocked)
        line["readings"] = self._readings(now)
        line["spans"] = _first_spans(begun, on_host, self._timeline.on_device)
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()
        self._told_ns, cost = now, perf_counter_ns() - now
        pause = max(cost / self._own_share, (now - self._begun_ns) / _MOST_LINES)
        self._rests_until = perf_counter_ns() + round(pause)

    def _host_shares(self) -> dict[str, float]:
        """What the thread did since the last line."""
        totals = self._timeline.totals_ns
        spent = [after - before for after, before in zip(totals, self._totals)]
        self._totals = [*totals]
        whole = sum(spent) or 1
        return {name: part / whole for name, part in zip(PHASES, spent)}

    def _readings(self, now: int) -> dict[str, float | None]:
        """What the machine's own counters say of the time since the last line; None where it has none."""
        told = {name: self._background.mean(name, self._told_ns, now) for name in _READINGS}
        cores = None
        if self._tree is not None:
            cores = next((sample.value for sample in self._tree.poll().get("cpu", ())), None)
        return {
            "utilisation": _scaled(told["utilisation"], 0.01),
            "watts": told["power"],
            "joules": self._background.grown("energy", self._told_ns, now),
            "memory_bytes": _scaled(told["memory"], 2**30),
            "memory_total_bytes": self._background.memory_bytes,
            "sm": _scaled(told["SM active"], 0.01),
            "cores": cores,
        }


@dataclass
class _Sum:
    """All stretches together, each for the time that it stands for, as one sentence."""

    seconds: float = 0.0
    busy: float = 0.0  # seconds, as all that follows
    unattributed: float = 0.0
    idle: dict[str, float] = field(default_factory=dict)
    parts: dict[str, list[float]] = field(default_factory=dict)  # seconds, busy, watt-seconds, those with known power

    def add(self, found: Attribution, covered: float, clocked: float) -> None:
        """One more stretch, for `covered` seconds; what is not `clocked` of them is unattributed."""
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
        """GPU busy 35 % (15 % at 125 W in rollouts, 95 % at 208 W in learning); it waited for …"""
        of_parts = []
        for name, words in (("rollout", "in rollouts"), ("learning", "in learning"), ("both", "in both at once")):
            seconds, busy, joules, known = self.parts.get(name, [0.0] * 4)
            if seconds > 0.01 * self.seconds:
                watts = f" at {joules / known:.0f} W" if known else ""
                of_parts.append(f"{percent(busy / seconds)}{watts} {words}")
        waited = sorted(((s / self.seconds, cause) for cause, s in self.idle.items()), reverse=True)
        causes = [f"{cause} {percent(share)}" for share, cause in waited if share >= 0.01]
        causes.append(f"unattributed {percent(self.unattributed / self.seconds)}")
        inside = f" ({', '.join(of_parts)})" if of_parts else ""
        return f"GPU busy {percent(self.busy / self.seconds)}{inside}; it waited for: {', '.join(causes)}."


def _looked_at(window: Window, spans: Sequence[DeviceSpan]) -> dict[str, float] | None:
    """Close the window; returns the kernel-active share of each phase's spans in it, or None if nothing was seen."""
    offset = time.time_ns() - perf_counter_ns()  # of the profiler's clock
    seen = window.close()
    if seen is None:
        return None
    kernels = [(start - offset, end - offset) for start, end in seen.intervals]
    return active_shares(spans, kernels) or None


def active_shares(spans: Iterable[DeviceSpan], kernels: Sequence[tuple[int, int]]) -> dict[str, float]:
    """Of each phase's spans, the share in which one of `kernels` (start, end) ran; both by the same clock.

    Where spans of two phases overlap, what ran is taken for either's: the profiler does not say whose it was.
    """
    ordered = [span for span in spans if span.end_ns > span.start_ns]
    if not ordered or not kernels:
        return {}
    seen = computed(kernels, min(start for start, _ in kernels), max(end for _, end in kernels))
    lengths: dict[str, int] = {}
    active: dict[str, int] = {}
    for span in ordered:
        lengths[span.phase] = lengths.get(span.phase, 0) + span.end_ns - span.start_ns
        active[span.phase] = active.get(span.phase, 0) + seen.within(span.start_ns, span.end_ns)
    return {phase: active[phase] / length for phase, length in lengths.items()}


def _as_line(found: Attribution, clocked: float) -> dict[str, Any]:
    """Of all the time it stands for; what is not `clocked` of that is unattributed."""

    def of_part(part: Account) -> dict[str, float | None]:
        return {"share": clocked * part.seconds / found.whole.seconds, "busy": part.busy, "watts": part.watts}

    whole = found.whole
    gpu: Mapping[str, Any] = {
        "busy": clocked * whole.busy,
        "idle": {cause: clocked * share for cause, share in whole.idle.items()},
        "unattributed": clocked * whole.unattributed + (1.0 - clocked),
    }
    return {"gpu": gpu, "parts": {name: of_part(part) for name, part in found.parts.items()}}


def _first_spans(begun: int, on_host: Sequence[Interval], on_device: Iterable[Interval]) -> list[list[Any]]:
    """The first spans of a stretch, for a look through a magnifying glass: in seconds after its beginning."""
    spans = [("host", *span) for span in on_host[:_SHOWN_SPANS]]
    until = spans[-1][3] if spans else begun
    spans += [("gpu", *span) for span in on_device if begun <= span[1] < until]
    spans.sort(key=lambda span: span[2])
    return [
        [lane, PHASES[phase], round(max(0, start - begun) * 1e-9, 7), round((end - begun) * 1e-9, 7)]
        for lane, phase, start, end in spans[:_SHOWN_SPANS]
    ]


def _scaled(value: float | None, by: float) -> float | None:
    return None if value is None else value * by
