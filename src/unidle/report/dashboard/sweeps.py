"""The page of a sweep: its trials, and those that no other is better than."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

from unidle.formatting import duration, score, short_number
from unidle.report.dashboard.figures import UNKNOWN, format_or_dash
from unidle.report.dashboard.files import has_workers, is_training, read_mapping
from unidle.report.dashboard.folders import Entry
from unidle.report.dashboard.rows import Rows
from unidle.report.dashboard.trials import Trial, objectives_of, sweep_stamp, trials_of
from unidle.report.page.cards import setting_text


class SweepReader:
    """Follows the folder of a sweep."""

    def __init__(self, entry: Entry) -> None:
        self._entry = entry
        self._rows = Rows()
        self._stamp: Hashable = None
        self._trials: list[Trial] = []
        self._row: dict[str, Any] = {}

    def refresh(self) -> bool:
        """Read trials that have started or ended; returns whether there are any."""
        folder = self._entry.folder
        stamp = is_training(folder) or has_workers(folder), sweep_stamp(self._entry)
        if stamp == self._stamp:
            return False
        self._stamp, self._trials = stamp, trials_of(self._entry)
        (self._row,) = self._rows.of([self._entry])
        return True

    def view(self) -> dict[str, Any]:
        """Return what the page shows."""
        plan = read_mapping(self._entry.folder, "sweep.yaml") or {}
        objectives = objectives_of(self._trials)
        names = list(dict.fromkeys(str(name) for trial in self._trials for name in trial.settings))
        return {
            "name": self._entry.name,
            "state": self._row["state"],
            "facts": _facts(self._row, plan),
            "figures": _figures(self._trials, self._row, objectives),
            "objectives": objectives,
            "settings": names,
            "trials": [_trial(trial, objectives, names) for trial in self._trials],
        }


def _facts(row: Mapping[str, Any], plan: Mapping[str, Any]) -> list[list[str]]:
    facts = {
        "environment": row["env"],
        "preset": row["preset"],
        "sampler": plan.get("sampler"),
        "pruner": plan.get("pruner"),
        "seeds per trial": plan.get("seeds_per_trial"),
    }
    return [[name, str(value)] for name, value in facts.items() if value is not None]


def _figures(trials: Sequence[Trial], row: Mapping[str, Any], objectives: Sequence[str]) -> list[list[str]]:
    states = [trial.state for trial in trials]
    figures = [
        ["Trials", f"{len(trials):,}", f"of {row['total']}"],
        [
            "Finished",
            f"{states.count('finished'):,}",
            f"{states.count('pruned')} pruned, {states.count('failed')} failed",
        ],
        ["Best return", row["return"], ""],
    ]
    if len(objectives) > 1:
        figures.append(["Pareto front", f"{sum(t.is_best for t in trials):,}", "trials that no other is better than"])
    return figures


def _trial(trial: Trial, objectives: Sequence[str], names: Sequence[str]) -> dict[str, Any]:
    return {
        "number": trial.number,
        "path": trial.entry.path if trial.entry is not None else None,
        "kind": trial.entry.kind if trial.entry is not None else None,
        "state": trial.state,
        "values": [trial.values.get(name) for name in objectives],
        "texts": [
            format_or_dash(trial.values.get(name), duration if name.startswith("time") else score)
            for name in objectives
        ],
        "settings": [_text(name, trial.settings[name]) if name in trial.settings else UNKNOWN for name in names],
        "numbers": [_number(trial.settings.get(name)) for name in names],
        "error": trial.error,
        "is_best": trial.is_best,
    }


def _text(name: str, value: Any) -> str:
    return short_number(value, 4) if isinstance(value, float) else setting_text(name, value)


def _number(value: Any) -> float | None:
    """Return a number to sort by; None for what is none."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return float(value) if type(value) is int and abs(value) < 2**53 else None
