"""What the GPU did with its time, and what it waited for: a pure function from intervals to a table.

Every instant of a window is worth 1, divided between *busy*, the causes of idleness, and *unattributed*: the table sums
to 100 % whatever it is given. All times are nanoseconds of one clock, the host's.

**Busy** is time in which a kernel ran. CUDA events tell when a phase's work began and ended on the device, not how much
of that span was kernels and how much gaps between them; a short Kineto window tells the *active share* of each phase.
So an instant inside a span is busy by its phase's share. Streams run side by side: of several at an instant,
1 − ∏(1 − share) is busy, as if their gaps were independent. Copies run no kernel: their share is 0 unless said.
The span of a phase without a known share is unattributed, for a guess would make a launch-bound learner look busy.

**Idle inside a span** was spent waiting for that phase's own next kernel: the cause is the phase, and for `learn` it is
its launches. Of several streams each has a part in proportion to its own gaps.

**Idle between spans** was spent waiting for the next span, that is, for the host lane that launched it: the cause is
the phase this lane was in, instant by instant, so that a gap is split in proportion to the time in each. Where that
lane wrote nothing, because it waited for another, the other lanes tell, in equal parts. Where nobody wrote anything the
time is unattributed; a phase that has no name here, such as an evaluation, is *other*.

**Parts.** An instant belongs to the rollout, to learning, to both at once (overlap), or to the rest, as the phases of
its spans do; between spans, as the host's phases do, and the next span where these do not tell (`sync`, nothing).
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

# Phase → the name of the idleness that it causes, in the order to show them.
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
_TELLS_NO_PART = {"sync"}
_COPIES = {"host→device": 0.0, "device→host": 0.0}


@dataclass(frozen=True)
class HostSpan:
    """A host lane (thread) was in a phase."""

    phase: str
    start_ns: int
    end_ns: int
    lane: str = "main"


@dataclass(frozen=True)
class DeviceSpan:
    """A phase's work on one stream, from its first to its last, by CUDA events."""

    phase: str
    start_ns: int
    end_ns: int
    stream: int = 0
    lane: str = "main"
    """The host lane that launched it."""


def host_spans(intervals: Iterable[tuple[int, int, int]], lane: str = "main") -> list[HostSpan]:
    """Intervals of a `Timeline` as spans."""
    return [HostSpan(PHASES[phase], start, end, lane) for phase, start, end in intervals]


@dataclass(frozen=True)
class Account:
    """How a stretch of time was spent; all shares are of its length, and they sum to 1."""

    seconds: float
    busy: float
    idle: Mapping[str, float]
    """By cause, all of them, in order."""
    unattributed: float
    watts: float | None
    """Mean power; None where no sample covers any of it."""

    def rows(self) -> list[tuple[str, float]]:
        """The table: busy, idle by cause, unattributed."""
        return [("busy", self.busy), *self.idle.items(), ("unattributed", self.unattributed)]


@dataclass(frozen=True)
class Attribution:
    """The account of a window, and of its parts that have any length."""

    whole: Account
    parts: Mapping[str, Account]
    uncalibrated: tuple[str, ...]
    """Phases whose active share nobody measured; their spans are unattributed."""


def attribute_idle(
    start_ns: int,
    end_ns: int,
    device: Sequence[DeviceSpan],
    host: Sequence[HostSpan],
    active_share: Mapping[str, float],
    power: Sequence[Sample] = (),
) -> Attribution:
    """Account for the window from `start_ns` to `end_ns`.

    Spans may overlap, come in any order and reach beyond the window; those that end before they start are left out.
    `active_share` is the kernel-active share of each phase's spans, 0 to 1. A power sample is taken for the mean since
    the sample before it: with parts shorter than the samples are apart, the powers of the parts draw near each other.
    """
    if end_ns <= start_ns:
        raise ValueError("The window has no length.")
    shares = {**_COPIES, **{phase: min(1.0, max(0.0, share)) for phase, share in active_share.items()}}
    work = sorted((s for s in device if s.end_ns > s.start_ns), key=lambda s: (s.start_ns, s.lane, s.phase))
    starts = [span.start_ns for span in work]
    power = sorted(power, key=lambda sample: sample.at_ns)
    power_times = [sample.at_ns for sample in power]
    ledgers = {part: _Ledger() for part in PARTS}
    inside, between = cache(partial(_inside_spans, shares=shares)), cache(_between_spans)  # the same few, over and over
    for begin, end, on_device, on_host in _moments(start_ns, end_ns, work, host, power_times):
        if on_device:
            split, part = inside(on_device)
        else:
            place = bisect_left(starts, end)
            following = (work[place].lane, work[place].phase) if place < len(work) else None
            split, part = between(on_host, following)
        place = bisect_left(power_times, end)
        ledgers[part].add(end - begin, split, power[place].value if 0 < place < len(power) else None)
    return Attribution(
        _account(list(ledgers.values())),
        {part: _account([ledger]) for part, ledger in ledgers.items() if ledger.length_ns},
        tuple(sorted({span.phase for span in work} - shares.keys())),
    )


# What is going on at an instant: (stream, phase) on the device, (lane, phase) on the host.
_OnDevice = frozenset[tuple[int, str]]
_OnHost = frozenset[tuple[str, str]]


def _moments(
    start_ns: int, end_ns: int, work: Iterable[DeviceSpan], host: Iterable[HostSpan], other_edges: Iterable[int]
) -> Iterator[tuple[int, int, _OnDevice, _OnHost]]:
    """The window cut at every edge: (begin, end, what is on the device, what is on the host), oldest first."""
    changes: list[tuple[int, int, Counter[Any], tuple[int | str, str]]] = []
    on_device: Counter[tuple[int, str]] = Counter()
    on_host: Counter[tuple[str, str]] = Counter()

    def note(span: DeviceSpan | HostSpan, now: Counter[Any], key: tuple[int | str, str]) -> None:
        begin, end = max(span.start_ns, start_ns), min(span.end_ns, end_ns)
        if begin < end:
            changes.append((begin, 1, now, key))
            changes.append((end, -1, now, key))

    for span in work:
        note(span, on_device, (span.stream, span.phase))
    for lane_span in host:
        note(lane_span, on_host, (lane_span.lane, lane_span.phase))
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
    """How an instant is divided in which the device had work, and the part that it belongs to."""
    streams: dict[int, tuple[float, str]] = {}  # active share of each stream, and who is to blame for the rest of it
    for stream, phase in sorted(on_device):
        known = phase in shares
        now = (shares[phase], _cause(phase)) if known else (0.0, "unattributed")
        # A stream does one thing at a time: of spans that overlap on it, the busiest is believed.
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
    """The same where the device had none; `following` are the host lane and the phase of its next span."""
    lanes: dict[str, set[str]] = {}
    for lane, phase in on_host:
        lanes.setdefault(lane, set()).add(phase)
    if following is not None and following[0] in lanes:
        lanes = {following[0]: lanes[following[0]]}
    split: dict[str, float] = {}
    for lane in sorted(lanes):
        for phase in sorted(lanes[lane]):
            cause = _cause(phase)
            split[cause] = split.get(cause, 0.0) + 1 / (len(lanes) * len(lanes[lane]))
    telling = {phase for phases in lanes.values() for phase in phases} - _TELLS_NO_PART
    if not telling and following is not None:
        telling = {following[1]}
    return split or {"unattributed": 1.0}, _part_of(telling)


def _cause(phase: str) -> str:
    return CAUSE_OF_PHASE.get(phase, "other")


def _part_of(phases: Set[str]) -> str:
    if phases & _LEARNING:
        return "both" if phases & _ROLLOUT else "learning"
    return "rollout" if phases & _ROLLOUT else "rest"


@dataclass
class _Ledger:
    """What is added up of a part; times in nanoseconds."""

    length_ns: int = 0
    entries: dict[str, float] = field(default_factory=dict)
    measured_ns: int = 0  # of its length, what power samples cover
    watt_ns: float = 0.0

    def add(self, length_ns: int, split: Mapping[str, float], watts: float | None) -> None:
        self.length_ns += length_ns
        for name, share in split.items():
            self.entries[name] = self.entries.get(name, 0.0) + share * length_ns
        if watts is not None:
            self.measured_ns += length_ns
            self.watt_ns += watts * length_ns


def _account(ledgers: Sequence[_Ledger]) -> Account:
    length = sum(ledger.length_ns for ledger in ledgers)
    measured = sum(ledger.measured_ns for ledger in ledgers)

    def share(name: str) -> float:
        return math.fsum(ledger.entries.get(name, 0.0) for ledger in ledgers) / length

    return Account(
        length * 1e-9,
        share("busy"),
        {cause: share(cause) for cause in CAUSES},
        share("unattributed"),
        math.fsum(ledger.watt_ns for ledger in ledgers) / measured if measured else None,
    )
