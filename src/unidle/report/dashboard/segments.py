"""Segments of a run, read from lines of `meter.jsonl`, and merging several of them.

A line represents all the time since the previous one, seconds to minutes. Host phases and readings cover all of it; GPU
attribution and spans are a sample of its last part.
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
    """Share of the segment's time."""
    busy: float | None
    """GPU busy share of the part."""
    watts: float | None


@dataclass(frozen=True)
class Segment:
    """How a period of time was spent; unmeasured values are None or missing."""

    step: int
    seconds: float
    """End, by the run's clock."""
    begin: float
    """Start, by the run's clock."""
    covered: float
    """Seconds that it represents, its weight; less than end − begin if some are unknown."""
    host: Mapping[str, float]
    """Share of each phase of the trainer's thread; sums to 1."""
    gpu: Mapping[str, float] | None = None
    """Busy, idle by cause, unattributed; sums to 1."""
    parts: Mapping[str, Part] = field(default_factory=dict)
    readings: Mapping[str, float] = field(default_factory=dict)
    joules: float | None = None
    offset: int | None = None
    """Offset of its line in the file, if it has spans."""
    spans_begin: float | None = None
    """Start of those spans, by the run's clock."""


def segment_of(record: Record, offset: int | None = None) -> Segment | None:
    """Convert a line of `meter.jsonl`; None if required fields are missing."""
    step, seconds, length = (number(record, key) for key in ("step", "seconds", "length"))
    host = _shares(record.get("host"), HOST_ROWS)
    if step is None or seconds is None or not length or length < 0 or not host:
        return None
    covered = number(record, "covered")
    if covered is None or covered <= 0:
        covered = length  # older files do not have the field
    offset = offset if record.get("spans") else None
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
        # Without an energy counter: mean power times time.
        watts * covered if joules is None and watts is not None else joules,
        offset,
        None if offset is None else seconds - length,
    )


def segments_of_metrics(iterations: list[Record], most: int = 200) -> list[Segment]:
    """Return segments of a run without meter from its metrics: phases of the trainer's thread only."""
    found, before = [], 0.0
    for record, shares in time_shares_over(iterations, most):
        now = number(record, "wall")
        if now is not None and now > before:
            found.append(Segment(int(record["step"]), now, before, now - before, shares))
            before = now
    return found


def merge(segments: Sequence[Segment]) -> Segment | None:
    """Merge segments: shares and readings are means weighted by the time they represent, over those that have them."""
    if not segments:
        return None
    known = [s.joules for s in segments if s.joules is not None]
    on_gpu = [(s.covered, s.gpu) for s in segments if s.gpu is not None]
    shown = next((s for s in segments if s.offset is not None), segments[0])
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
        shown.offset,
        shown.spans_begin,
    )


def downsampled(segments: Sequence[Segment], most: int) -> list[Segment]:
    """Merge neighbours into at most `most` segments."""
    size = max(1, math.ceil(len(segments) / most))
    groups = (segments[start : start + size] for start in range(0, len(segments), size))
    return [whole for group in groups if (whole := merge(group)) is not None]


def joules_so_far(segments: Iterable[Segment]) -> list[float | None]:
    """Return the energy used up to the end of each segment; None from the first segment without it."""
    total: float | None = 0.0
    found = []
    for segment in segments:
        total = None if total is None or segment.joules is None else total + segment.joules
        found.append(total)
    return found


def _gpu(value: Any) -> dict[str, float] | None:
    """Return the GPU table of a line in row order."""
    table = _mapping(value)
    flat = {**_mapping(table.get("idle")), "busy": table.get("busy"), "unattributed": table.get("unattributed", 0.0)}
    return _shares(flat, GPU_ROWS) if number(table, "busy") is not None else None


def _shares(value: Any, order: Sequence[str]) -> dict[str, float]:
    """Return shares by name, those in `order` first."""
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
