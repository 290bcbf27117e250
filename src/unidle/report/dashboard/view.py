"""The data of a run's page as one JSON object: sentences and figures as text, charts as columns."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from unidle.formatting import duration, percent
from unidle.report.dashboard.figures import format_or_dash, key_figures
from unidle.report.dashboard.segments import Segment, downsampled, joules_so_far, merge, segments_of_metrics
from unidle.report.dashboard.verdict import parts_text, verdict
from unidle.report.history import History, Record, number
from unidle.report.learning_metrics import SECTION_MEANINGS, changing_metrics, learned_records
from unidle.report.page.axis import running_mean, thinned_indices
from unidle.report.page.cards import setting_text

View = dict[str, Any]

TRAINING, DONE, STOPPED, FAILED, UNREADABLE = "training", "done", "stopped", "failed", "unreadable"
_MAX_POINTS = 600  # points per chart; more cannot be distinguished on a screen
_LOSS_POINTS = 200  # of each loss: there are many of them
_SMOOTH_FROM = 100  # points; shorter series need no smoothing
_MIN_SHARE = 0.0005  # smaller shares would be 0.0 % in the table and get no row


@dataclass(frozen=True)
class RunRecords:
    """The records read from a run's files."""

    history: History
    segments: Sequence[Segment]  # of meter.jsonl; none in a run without it
    changes: Sequence[Record]  # of changes.jsonl
    is_training: bool


def state_of(history: History, is_training: bool) -> str:
    """Return training, done (all steps or target return reached) or stopped."""
    if is_training:
        return TRAINING
    total, target = history.setting("run", "timesteps"), history.setting("run", "target_return")
    highest = history.highest_return
    has_all = isinstance(total, int) and history.steps >= total
    is_good = isinstance(target, (int, float)) and highest is not None and highest >= target
    return DONE if has_all or is_good else STOPPED


def view_of(records: RunRecords) -> View:
    """Return the object that the page draws."""
    history = records.history
    segments = list(records.segments) or segments_of_metrics(history.iterations)
    whole, drawn = merge(segments), downsampled(segments, _MAX_POINTS)
    energy = _Energy(segments)
    return {
        "name": history.name,
        "facts": _facts(history),
        "state": state_of(history, records.is_training),
        "verdict": verdict(whole),
        "parts": _parts(whole),
        "source": "meter.jsonl" if records.segments else "metrics.jsonl",
        "figures": key_figures(history, whole),
        "tables": {
            "gpu": _table(whole.gpu if whole else None, [s for s in segments if s.gpu is not None]),
            "host": _table(whole.host if whole else None, segments),
        },
        "timeline": _timeline(drawn),
        "power": _power(drawn),
        "speed": _speed(history),
        "returns": _curves(history, energy, "rollout/return_mean", "eval/return_mean", "eval/return_std"),
        "success": _curves(history, energy, "rollout/success", "eval/success"),
        "target": _target(history),
        "changes": _changes(records.changes, energy),
        "losses": _losses(history, energy),
        "config": _config(history),
        "has_joules": energy.is_known,
    }


def clock(record: Record) -> float | None:
    """Return the run's clock, in seconds, when a record was written."""
    wall = number(record, "wall")
    return number(record, "seconds") if wall is None else wall


class _Energy:
    """Energy used up to any time, interpolated linearly within segments."""

    def __init__(self, segments: Sequence[Segment]) -> None:
        totals = joules_so_far(segments)
        known = [(s.seconds, total) for s, total in zip(segments, totals) if total is not None]
        self.is_known = bool(known)
        self._times = [segments[0].begin, *(time for time, _ in known)] if known else []
        self._totals = [0.0, *(total for _, total in known)]

    def at(self, seconds: float | None) -> float | None:
        if seconds is None or not self.is_known or seconds > self._times[-1]:
            return None
        after = bisect_left(self._times, seconds)
        if after == 0:
            return 0.0
        begin, end = self._times[after - 1], self._times[after]
        before, until = self._totals[after - 1], self._totals[after]
        return before + (until - before) * (seconds - begin) / (end - begin)


def _facts(history: History) -> list[list[str]]:
    facts = {
        "environment": history.setting("run", "env"),
        "algorithm": history.setting("recipe", "algo"),
        "preset": history.setting("run", "preset"),
        "environments": history.setting("recipe", "n_envs"),
        "overlap": history.overlap,
        "seed": history.setting("run", "seed"),
    }
    return [[name, str(value)] for name, value in facts.items() if value is not None]


def _table(shares: Mapping[str, float] | None, metered: Sequence[Segment]) -> list[list[Any]] | None:
    """Return name, share and time of each row that does not round to 0; None without metered segments."""
    if not shares:
        return None
    seconds = math.fsum(s.covered for s in metered)
    return [
        [name, percent(share), duration(share * seconds)]
        for name, share in shares.items()
        if share >= _MIN_SHARE or name == "busy"
    ]


def _parts(whole: Segment | None) -> View | None:
    if whole is None or not whole.parts:
        return None
    rows = [
        [
            name,
            percent(part.share),
            format_or_dash(part.busy, percent),
            format_or_dash(part.watts, lambda watts: f"{watts:.0f} W"),
        ]
        for name, part in whole.parts.items()
    ]
    return {"sentence": parts_text(whole), "rows": rows}


def _timeline(drawn: Sequence[Segment]) -> View:
    """Return shares over time, one column per row of the table."""
    return {
        "begin": [round(s.begin, 3) for s in drawn],
        "end": [round(s.seconds, 3) for s in drawn],
        "step": [s.step for s in drawn],
        "offset": [s.offset for s in drawn],
        "spans_begin": [None if s.spans_begin is None else round(s.spans_begin, 3) for s in drawn],
        "gpu": _columns([s.gpu for s in drawn]),
        "host": _columns([s.host for s in drawn]),
    }


def _columns(tables: Sequence[Any]) -> dict[str, list[float | None]]:
    names = list(dict.fromkeys(name for table in tables if table for name in table))
    columns = {name: [None if t is None else round(t.get(name, 0.0), 4) for t in tables] for name in names}
    return {name: column for name, column in columns.items() if any(column)}


def _power(drawn: Sequence[Segment]) -> View | None:
    if not any("watts" in s.readings or s.joules is not None for s in drawn):
        return None
    return {
        "seconds": [round(s.seconds, 3) for s in drawn],
        "watts": [s.readings.get("watts") for s in drawn],
        "joules": joules_so_far(drawn),
    }


def _speed(history: History) -> View:
    placed = [(at, r) for r in history.iterations if (at := clock(r)) is not None]
    rates = [number(r, "rollout/steps_per_second") for _, r in placed]
    kept = thinned_indices(rates, _MAX_POINTS)
    smooth = running_mean(rates, len(rates) // 50) if len(rates) >= _SMOOTH_FROM else None
    return {
        "seconds": [placed[i][0] for i in kept],
        "rate": [rates[i] for i in kept],
        "mean": [smooth[i] for i in kept] if smooth else None,
    }


def _curves(history: History, energy: _Energy, training: str, evaluation: str, spread: str = "") -> View | None:
    """Return training and evaluation curves over steps, seconds and joules; None without data."""
    found = {
        "training": _curve(history.iterations, training, energy),
        "evaluation": _curve(history.evaluations, evaluation, energy, spread),
    }
    return found if any(curve["value"] for curve in found.values()) else None


def _curve(records: Sequence[Record], key: str, energy: _Energy, spread: str = "", most: int = _MAX_POINTS) -> View:
    known = [r for r in records if number(r, key) is not None]
    known = [known[i] for i in thinned_indices([number(r, key) for r in known], most)]
    return {
        "value": [number(r, key) for r in known],
        "spread": [number(r, spread) for r in known],
        "steps": [r["step"] for r in known],
        "seconds": [clock(r) for r in known],
        "joules": [energy.at(clock(r)) for r in known],
    }


def _losses(history: History, energy: _Energy) -> list[View]:
    """Return a curve per metric of learning."""
    learned = learned_records(history.iterations)
    return [
        {"title": title, "meaning": meaning, **_curve(learned, key, energy, most=_LOSS_POINTS)}
        for key, (title, meaning) in changing_metrics(learned).items()
    ]


def _config(history: History) -> list[list[Any]]:
    """Return name, meaning, and the settings as text, of each section of config.yaml."""
    return [
        [name, SECTION_MEANINGS[name], [[str(key), setting_text(str(key), value)] for key, value in values.items()]]
        for name, values in history.own_settings.items()
        if values
    ]


def _target(history: History) -> float | None:
    return number(history.config["run"], "target_return")


def _changes(changes: Sequence[Record], energy: _Energy) -> list[View]:
    """Return the changes made during the run as markers."""
    return [
        {
            "steps": number(r, "step"),
            "seconds": number(r, "seconds"),
            "joules": energy.at(number(r, "seconds")),
            "change": str(r["change"]),
        }
        for r in changes
        if "change" in r
    ]
