"""Segments of a run: what a line of `meter.jsonl` tells, and several of them taken together.

A line stands for all the time since the one before, seconds to minutes: the thread's phases and the readings are of
that time, while the GPU was attributed, and spans were kept, for the last part of it only, as a sample.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from unidle.meter.attribution.idle_time import CAUSES, PARTS
from unidle.report.history import Record, number, time_shares_over
from unidle.timeline import PHASES

GPU_ROWS = ("busy", *CAUSES, "unattributed")  # the order of table, legend and chart
HOST_ROWS = (*PHASES, "unattributed")
_READINGS = ("utilisation", "watts", "memory_bytes", "memory_total_bytes", "sm", "cores")  # means, unlike joules


@dataclass(frozen=True)
class Part:
    """Rollout or learning within a segment."""

    share: float
    """Of the time that the segment stands for."""
    busy: float | None
    """Of the part."""
    watts: float | None


@dataclass(frozen=True)
class Segment:
    """How some time was spent; what nobody measured is None, or not there."""

    step: int
    seconds: float
    """Of the run's clock, at the end."""
    begin: float
    """Of the same clock; several segments together begin where the first of them does."""
    covered: float
    """Seconds that it stands for, by which it counts; less than from begin to end where some of them are unknown."""
    host: Mapping[str, float]
    """By phase of the trainer's thread; sums to 1."""
    gpu: Mapping[str, float] | None = None
    """Busy, idle by cause, unattributed; sums to 1."""
    parts: Mapping[str, Part] = field(default_factory=dict)
    readings: Mapping[str, float] = field(default_factory=dict)
    joules: float | None = None
    place: int | None = None
    """Where its line begins in the file, if it has spans."""
    spans_begin: float | None = None
    """Seconds of the run's clock where those spans begin."""


def segment_of(record: Record, place: int | None = None) -> Segment | None:
    """A line of `meter.jsonl`; None if it lacks what every line has."""
    step, seconds, length = (number(record, key) for key in ("step", "seconds", "length"))
    host = _shares(record.get("host"), HOST_ROWS)
    if step is None or seconds is None or not length or length < 0 or not host:
        return None
    covered = number(record, "covered")
    if covered is None or covered <= 0:
        covered = length  # a line of before there was such a field
    place = place if record.get("spans") else None
    read = _mapping(record.get("readings"))
    watts, joules = number(read, "watts"), number(read, "joules")
    return Segment(
        int(step),
        seconds,
        seconds - covered,
        covered,
        host,
        _gpu(record.get("gpu")),
        _parts(record.get("parts")),
        {name: value for name in _READINGS if (value := number(read, name)) is not None},
        # A GPU without an energy counter tells its power: the mean times the time.
        watts * covered if joules is None and watts is not None else joules,
        place,
        None if place is None else seconds - length,
    )


def segments_of_metrics(iterations: list[Record], most: int = 200) -> list[Segment]:
    """What `metrics.jsonl` tells of a run without meter: the shares of the trainer's thread."""
    found, before = [], 0.0
    for record, shares in time_shares_over(iterations, most):
        now = number(record, "wall")
        if now is not None and now > before:
            found.append(Segment(int(record["step"]), now, before, now - before, shares))
            before = now
    return found


def together(segments: Sequence[Segment]) -> Segment | None:
    """Several segments as one: shares and readings are means by the time they stand for, over those that tell them."""
    if not segments:
        return None
    known = [s.joules for s in segments if s.joules is not None]
    on_gpu = [(s.covered, s.gpu) for s in segments if s.gpu is not None]
    shown = next((s for s in segments if s.place is not None), segments[0])
    return Segment(
        segments[-1].step,
        segments[-1].seconds,
        segments[0].begin,
        math.fsum(s.covered for s in segments),
        _mean_shares([(s.covered, s.host) for s in segments], HOST_ROWS),
        _mean_shares(on_gpu, GPU_ROWS) if on_gpu else None,
        _mean_parts(segments),
        {
            name: mean
            for name in _READINGS
            if (mean := _mean((s.covered, s.readings.get(name)) for s in segments)) is not None
        },
        math.fsum(known) if len(known) == len(segments) else None,
        shown.place,
        shown.spans_begin,
    )


def thinned(segments: Sequence[Segment], most: int) -> list[Segment]:
    """At most `most` segments: neighbours together, so that nothing is left out."""
    size = max(1, math.ceil(len(segments) / most))
    groups = (segments[start : start + size] for start in range(0, len(segments), size))
    return [whole for group in groups if (whole := together(group)) is not None]


def joules_so_far(segments: Iterable[Segment]) -> list[float | None]:
    """Energy spent up to the end of each segment; None from the first on that does not tell."""
    total: float | None = 0.0
    found = []
    for segment in segments:
        total = None if total is None or segment.joules is None else total + segment.joules
        found.append(total)
    return found


def _gpu(value: Any) -> dict[str, float] | None:
    """The table of a line, in the order of its rows."""
    table = _mapping(value)
    flat = {**_mapping(table.get("idle")), "busy": table.get("busy"), "unattributed": table.get("unattributed", 0.0)}
    return _shares(flat, GPU_ROWS) if number(table, "busy") is not None else None


def _shares(value: Any, order: Sequence[str]) -> dict[str, float]:
    """Shares by name: those of `order` first, then whatever else there is."""
    table = _mapping(value)
    names = [*(name for name in order if name in table), *(name for name in table if name not in order)]
    return {name: share for name in names if (share := number(table, name)) is not None}


def _parts(value: Any) -> dict[str, Part]:
    table = _mapping(value)
    found = {}
    for name in PARTS:
        part = _mapping(table.get(name))
        share = number(part, "share")
        if share:
            found[name] = Part(share, number(part, "busy"), number(part, "watts"))
    return found


def _mapping(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _mean(weighted: Iterable[tuple[float, float | None]]) -> float | None:
    known = [(weight, value) for weight, value in weighted if value is not None and weight > 0]
    total = math.fsum(weight for weight, _ in known)
    return math.fsum(weight * value for weight, value in known) / total if total else None


def _mean_shares(tables: Sequence[tuple[float, Mapping[str, float]]], order: Sequence[str]) -> dict[str, float]:
    total = math.fsum(seconds for seconds, _ in tables)
    names = {name: None for _, table in tables for name in table}
    means = {name: math.fsum(seconds * t.get(name, 0.0) for seconds, t in tables) / total for name in names}
    return _shares(means, order)


def _mean_parts(segments: Sequence[Segment]) -> dict[str, Part]:
    metered = [s for s in segments if s.parts]
    total = math.fsum(s.covered for s in metered)
    found = {}
    for name in PARTS:
        having = [(s.covered * s.parts[name].share, s.parts[name]) for s in metered if name in s.parts]
        if having:
            found[name] = Part(
                math.fsum(seconds for seconds, _ in having) / total,
                _mean((seconds, part.busy) for seconds, part in having),
                _mean((seconds, part.watts) for seconds, part in having),
            )
    return found
