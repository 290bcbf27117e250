"""The trials of a sweep, from the files that each of them leaves."""

from __future__ import annotations

import math
import re
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from unidle.report.dashboard.files import has_regular, is_training, read_mapping, stamp_of
from unidle.report.dashboard.folders import Entry, folders_in

_FOLDER = re.compile(r"trial-([0-9]+)")
_FACTS = {"trial", "state", "error", "settings"}  # of trial.yaml; what else it has are values of objectives
_RETURNS = ("return", "value")
_NEVER = 1e9  # seconds: a time to a target from here on says that the target was not reached


@dataclass(frozen=True)
class Trial:
    """A trial of a sweep."""

    number: int
    name: str
    state: str  # running, stopped, or as trial.yaml says: finished, pruned, failed
    values: Mapping[str, float]  # objective → value
    settings: Mapping[str, Any]
    error: str
    entry: Entry | None  # None if it has no run
    is_best: bool  # no other trial is better in all objectives

    @property
    def is_over(self) -> bool:
        """Whether it has ended, however it ended."""
        return self.state not in ("running", "stopped")


def trials_of(sweep: Entry) -> list[Trial]:
    """Return the trials of a sweep, in the order of their numbers."""
    numbers = _numbers(sweep)
    return [_trial(sweep, name, numbers[name]) for name in sorted(numbers, key=numbers.__getitem__)]


def sweep_stamp(sweep: Entry) -> Hashable:
    """Return what changes when a trial starts or ends."""
    folders = (sweep.folder / name for name in ("sweep.yaml", "pareto", *sorted(_numbers(sweep))))
    return tuple(map(stamp_of, folders))


def _numbers(sweep: Entry) -> dict[str, int]:
    """Return name → number of each folder of a trial."""
    return {name: int(found[1]) for name in folders_in(sweep.folder) if (found := _FOLDER.fullmatch(name))}


def _trial(sweep: Entry, name: str, number: int) -> Trial:
    entry = sweep.member(name)
    record = read_mapping(sweep.folder / name, "trial.yaml")
    if record is None:
        is_live = entry is not None and any(is_training(run.folder) for run in entry.runs())
        return Trial(number, name, "running" if is_live else "stopped", {}, {}, "", entry, False)
    settings = record.get("settings")
    return Trial(
        number,
        name,
        str(record.get("state")),
        {str(key): float(value) for key, value in record.items() if key not in _FACTS and _is_value(str(key), value)},
        settings if isinstance(settings, dict) else {},
        str(record.get("error") or ""),
        entry,
        has_regular(sweep.folder / "pareto", f"{name}.yaml"),
    )


def _is_value(objective: str, value: Any) -> bool:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    try:
        return math.isfinite(float(value)) and not (objective.startswith("time") and value >= _NEVER)
    except OverflowError:  # an integer with hundreds of digits
        return False


def objectives_of(trials: Sequence[Trial]) -> list[str]:
    """Return the objectives that a trial has a value of."""
    return list(dict.fromkeys(name for trial in trials for name in trial.values))


def objective_of_returns(trials: Sequence[Trial]) -> str:
    """Return the objective whose values are returns; empty if there is none."""
    return next((name for name in objectives_of(trials) if name in _RETURNS), "")
