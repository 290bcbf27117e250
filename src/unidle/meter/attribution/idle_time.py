"""Splits GPU time into busy, idle by cause, and unattributed: a pure function from intervals to a table.

Every instant of the window has weight 1, which is divided between *busy*, the causes of idle time and *unattributed*,
so the table always sums to 100 %. All times are nanoseconds on the host's clock.

**Busy** is time in which a kernel ran. CUDA events give the start and end of a phase's work on the device, but not how
much of that span is kernels and how much is gaps between them. A short Kineto window measures this *active share* of
each phase, and an instant inside a span counts as busy by that share. If several streams have spans at an instant,
1 − ∏(1 − share) is busy, as if their gaps were independent. Copies run no kernel, so their share defaults to 0. A span
whose phase has no known share is unattributed: a guess would make a launch-bound learner look busy.

**Idle inside a span** is time spent waiting for that phase's own next kernel. The cause is the phase; for `learn` it is
kernel launches. With several streams, each gets a part in proportion to its own gaps.

**Idle between spans** is time spent waiting for the host thread that launches the next span. The cause is the phase
this thread is in, instant by instant. Where it recorded nothing because it waited for another thread, the other threads
share the cause equally. Where no thread recorded anything, the time is unattributed. A phase without an entry here,
such as evaluation, counts as *other*.

**Parts.** An instant belongs to the rollout, to learning, to both (overlap) or to the rest, according to the phases of
its spans. Between spans the host's phases decide, or the next span where they are not conclusive (`sync`, nothing).
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import pairwise
from typing import Any

from unidle.meter.sensors.reading import Sample
from unidle.timeline import PHASES

# Phase → idle cause, in display order.
CAUSE_OF_PHASE = {
    "environment": "environment",
    "host→device": "host→device",
    "inference": "inference",
    "device→host": "device→host",
    "storage": "storage",
    "learn": "learn (launch)",
    "sync": "sync",
    "checkpoint": "checkpoint",
    "logging": "logging",
    "other": "other",
}
CAUSES = tuple(CAUSE_OF_PHASE.values())
PARTS = ("rollout", "learning", "both", "rest")

_ROLLOUT = {"environment", "host→device", "inference", "device→host", "storage"}
_LEARNING = {"learn"}
_INCONCLUSIVE = {"sync"}
_COPIES = {"host→device": 0.0, "device→host": 0.0}


@dataclass(frozen=True)
class HostSpan:
    """Time that a host thread spent in a phase."""

    phase: str
    start_ns: int
    end_ns: int
    thread: str = "main"


@dataclass(frozen=True)
class DeviceSpan:
    """A phase's work on one stream, from its first to its last kernel, by CUDA events."""

    phase: str
    start_ns: int
    end_ns: int
    stream: int = 0
    thread: str = "main"
    """The host thread that launched it."""


def host_spans(intervals: Iterable[tuple[int, int, int]], thread: str = "main") -> list[HostSpan]:
    """Convert the intervals of a `Timeline` to spans."""
    return [HostSpan(PHASES[phase], start, end, thread) for phase, start, end in intervals]


@dataclass(frozen=True)
class Breakdown:
    """How the GPU spent a segment of time; shares are fractions of its length and sum to 1."""

    seconds: float
    busy: float
    idle: Mapping[str, float]
    """Share of each cause, in display order."""
    unattributed: float
    watts: float | None
    """Mean power; None if no power sample falls into the segment."""

    def rows(self) -> list[tuple[str, float]]:
        """Return the table: busy, idle by cause, unattributed."""
        return [("busy", self.busy), *self.idle.items(), ("unattributed", self.unattributed)]


@dataclass(frozen=True)
class Attribution:
    """The breakdown of a window and of each non-empty part of it."""

    whole: Breakdown
    parts: Mapping[str, Breakdown]
    uncalibrated: tuple[str, ...]
    """Phases without a measured active share; their spans are unattributed."""


def attribute_idle(
    start_ns: int,
    end_ns: int,
    device: Sequence[DeviceSpan],
    host: Sequence[HostSpan],
    active_share: Mapping[str, float],
    power: Sequence[Sample] = (),
) -> Attribution:
    """Attribute the window from `start_ns` to `end_ns`.

    Spans may overlap, come in any order and extend beyond the window; a span that ends before it starts is ignored.
    `active_share` is the kernel-active share of each phase's spans, 0 to 1. A power sample counts as the mean since the
    previous sample, so parts shorter than the sampling period show similar power.
    """
    if end_ns <= start_ns:
        raise ValueError("The window has no length.")
    shares = {**_COPIES, **{phase: min(1.0, max(0.0, share)) for phase, share in active_share.items()}}
    work = sorted((s for s in device if s.end_ns > s.start_ns), key=lambda s: (s.start_ns, s.thread, s.phase))
    starts = [span.start_ns for span in work]
    power = sorted(power, key=lambda sample: sample.at_ns)
    power_times = [sample.at_ns for sample in power]
    ledgers = {part: _Ledger() for part in PARTS}
    inside, between = cache(partial(_inside_spans, shares=shares)), cache(_between_spans)  # few distinct arguments
    for begin, end, on_device, on_host in _split_at_edges(start_ns, end_ns, work, host, power_times):
        if on_device:
            split, part = inside(on_device)
        else:
            place = bisect_left(starts, end)
            following = (work[place].thread, work[place].phase) if place < len(work) else None
            split, part = between(on_host, following)
        place = bisect_left(power_times, end)
        ledgers[part].add(end - begin, split, power[place].value if 0 < place < len(power) else None)
    return Attribution(
        _breakdown(list(ledgers.values())),
        {part: _breakdown([ledger]) for part, ledger in ledgers.items() if ledger.length_ns},
        tuple(sorted({span.phase for span in work} - shares.keys())),
    )


# Activity at an instant: (stream, phase) on the device, (thread, phase) on the host.
_OnDevice = frozenset[tuple[int, str]]
_OnHost = frozenset[tuple[str, str]]


def _split_at_edges(
    start_ns: int, end_ns: int, work: Iterable[DeviceSpan], host: Iterable[HostSpan], other_edges: Iterable[int]
) -> Iterator[tuple[int, int, _OnDevice, _OnHost]]:
    """Cut the window at every edge: (begin, end, phases on the device, phases on the host), oldest first."""
    changes: list[tuple[int, int, Counter[Any], tuple[int | str, str]]] = []
    on_device: Counter[tuple[int, str]] = Counter()
    on_host: Counter[tuple[str, str]] = Counter()

    def add(span: DeviceSpan | HostSpan, now: Counter[Any], key: tuple[int | str, str]) -> None:
        begin, end = max(span.start_ns, start_ns), min(span.end_ns, end_ns)
        if begin < end:
            changes.append((begin, 1, now, key))
            changes.append((end, -1, now, key))

    for span in work:
        add(span, on_device, (span.stream, span.phase))
    for host_span in host:
        add(host_span, on_host, (host_span.thread, host_span.phase))
    changes.sort(key=lambda change: change[0])
    inner = {edge for edge in other_edges if start_ns < edge < end_ns}
    edges = sorted({start_ns, end_ns, *(change[0] for change in changes), *inner})
    done = 0
    for begin, end in pairwise(edges):
        while done < len(changes) and changes[done][0] <= begin:
            _, step, now, key = changes[done]
            now[key] += step
            if not now[key]:
                del now[key]
            done += 1
        yield begin, end, frozenset(on_device), frozenset(on_host)


def _inside_spans(on_device: _OnDevice, shares: Mapping[str, float]) -> tuple[dict[str, float], str]:
    """Return the shares of an instant at which the device had work, and the part it belongs to."""
    streams: dict[int, tuple[float, str]] = {}  # stream → active share, cause of its gaps
    for stream, phase in sorted(on_device):
        known = phase in shares
        now = (shares[phase], _cause(phase)) if known else (0.0, "unattributed")
        # A stream does one thing at a time: of overlapping spans on it, the busiest counts.
        if stream not in streams or now[0] > streams[stream][0]:
            streams[stream] = now
    idle = math.prod(1 - share for share, _ in streams.values())
    gaps = sum(1 - share for share, _ in streams.values())
    split = {"busy": 1 - idle}
    for share, cause in streams.values():
        if idle:
            split[cause] = split.get(cause, 0.0) + idle * (1 - share) / gaps
    return split, _part_of({phase for _, phase in on_device})


def _between_spans(on_host: _OnHost, following: tuple[str, str] | None) -> tuple[dict[str, float], str]:
    """The same for an instant without device work; `following` is the (thread, phase) of the next device span."""
    threads: dict[str, set[str]] = {}
    for thread, phase in on_host:
        threads.setdefault(thread, set()).add(phase)
    if following is not None and following[0] in threads:
        threads = {following[0]: threads[following[0]]}
    split: dict[str, float] = {}
    for thread in sorted(threads):
        for phase in sorted(threads[thread]):
            cause = _cause(phase)
            split[cause] = split.get(cause, 0.0) + 1 / (len(threads) * len(threads[thread]))
    conclusive = {phase for phases in threads.values() for phase in phases} - _INCONCLUSIVE
    if not conclusive and following is not None:
        conclusive = {following[1]}
    return split or {"unattributed": 1.0}, _part_of(conclusive)


def _cause(phase: str) -> str:
    return CAUSE_OF_PHASE.get(phase, "other")


def _part_of(phases: Set[str]) -> str:
    if phases & _LEARNING:
        return "both" if phases & _ROLLOUT else "learning"
    return "rollout" if phases & _ROLLOUT else "rest"


@dataclass
class _Ledger:
    """Running totals of one part, in nanoseconds."""

    length_ns: int = 0
    entries: dict[str, float] = field(default_factory=dict)
    measured_ns: int = 0  # time covered by power samples
    watt_ns: float = 0.0

    def add(self, length_ns: int, split: Mapping[str, float], watts: float | None) -> None:
        self.length_ns += length_ns
        for name, share in split.items():
            self.entries[name] = self.entries.get(name, 0.0) + share * length_ns
        if watts is not None:
            self.measured_ns += length_ns
            self.watt_ns += watts * length_ns


def _breakdown(ledgers: Sequence[_Ledger]) -> Breakdown:
    length = sum(ledger.length_ns for ledger in ledgers)
    measured = sum(ledger.measured_ns for ledger in ledgers)

    def share(name: str) -> float:
        return math.fsum(ledger.entries.get(name, 0.0) for ledger in ledgers) / length

    return Breakdown(
        length * 1e-9,
        share("busy"),
        {cause: share(cause) for cause in CAUSES},
        share("unattributed"),
        math.fsum(ledger.watt_ns for ledger in ledgers) / measured if measured else None,
    )
