"""Several runs on one plot: the runs of a group with their interquartile mean, or runs and groups that are compared."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from unidle.formatting import MISSING, duration, score
from unidle.report.dashboard.figures import format_or_dash
from unidle.report.dashboard.files import Tail, read_mapping
from unidle.report.dashboard.folders import Entry
from unidle.report.dashboard.rows import Rows
from unidle.report.dashboard.view import DONE, View
from unidle.report.differences import differing_settings
from unidle.report.history import Record, history_of, number
from unidle.report.page.axis import plottable, thinned_indices
from unidle.report.statistics import MIN_RUNS, aggregate, prolonged, spread

_ALL_POINTS, _RUN_POINTS, _MEAN_POINTS = 12_000, 50, 150  # of all lines; of one at least; of a mean
_MOST_POINTS = 400  # of one line
_TRAINING, _EVALUATION = "rollout/return_mean", "eval/return_mean"


class _Point(NamedTuple):
    step: float
    wall: float
    value: float


@dataclass
class _Returns:
    """The returns of one run, as its metrics.jsonl grows."""

    tail: Tail
    points: dict[str, list[_Point]] = field(default_factory=lambda: {_TRAINING: [], _EVALUATION: []})

    def refresh(self) -> bool:
        """Read new records; returns whether there are any."""
        restarted, found = self.tail.new_records()
        if restarted:
            for points in self.points.values():
                points.clear()
        for _, record in found:
            self._add(record)
        return restarted or bool(found)

    def _add(self, record: Record) -> None:
        for key, points in self.points.items():
            step, wall, value = (number(record, name) for name in ("step", "wall", key))
            if step is not None and wall is not None and plottable(value):
                points.append(_Point(step, wall, value))


class SeveralReader:
    """Follows several runs; `entries` returns what is shown now: runs, and groups as the mean of their runs."""

    def __init__(self, entries: Callable[[], list[Entry]], group: Entry | None = None) -> None:
        """With a `group`, the entries are its runs, and the mean of all of them is shown too."""
        self._list, self._group = entries, group
        self._rows = Rows()
        self._returns: dict[str, _Returns] = {}
        self._entries: list[Entry] = []
        self._shown: list[View] = []
        self._group_row: View = {}

    def refresh(self) -> bool:
        """Read what is new; returns whether anything is."""
        self._entries = self._list()
        runs = [run for entry in self._entries for run in entry.runs()]
        self._returns = {
            run.path: self._returns.get(run.path) or _Returns(Tail(run.folder, "metrics.jsonl")) for run in runs
        }
        news = [returns.refresh() for returns in self._returns.values()]
        asked = [*self._entries, *([self._group] if self._group else [])]
        rows = {row["path"]: row for row in self._rows.of(asked)}
        shown = [rows[entry.path] for entry in self._entries]
        self._group_row = rows[self._group.path] if self._group else {}
        before, self._shown = self._shown, shown
        return any(news) or before != shown

    def view(self) -> View:
        """Return what the page draws."""
        key, group = self._measure(), self._group
        return {
            "name": group.name if group else "",
            "state": self._group_row.get("state", ""),
            "facts": self._facts(),
            "figures": self._figures(key) if group else [],
            "measure": "evaluation" if key == _EVALUATION else "training, last 100 episodes",
            "rows": self._shown,
            "lines": self._lines(key),
            "settings": self._settings(),
        }

    def _measure(self) -> str:
        """Return what is drawn: evaluations, if a group has one, or if all that are compared have one."""
        known = [returns.points for returns in self._returns.values() if any(returns.points.values())]
        has_evaluation = [bool(points[_EVALUATION]) for points in known]
        return _EVALUATION if known and (any if self._group else all)(has_evaluation) else _TRAINING

    def _facts(self) -> list[list[str]]:
        names = {"environment": "env", "preset": "preset", "seeds": "seed", "started": "date"}
        return [[name, self._group_row[key]] for name, key in names.items()] if self._group else []

    def _figures(self, key: str) -> list[list[str]]:
        """Return the figures over all runs of a group."""
        row = self._group_row
        what = "Evaluation" if key == _EVALUATION else "Training return"
        latest = [points[-1].value for returns in self._returns.values() if (points := returns.points[key])]
        result = spread(latest)
        walls = [points[-1].wall for returns in self._returns.values() for points in returns.points.values() if points]
        interval = (
            f"an interval needs {MIN_RUNS} runs"
            if result.low is None or result.high is None
            else f"95 % interval {score(result.low)} to {score(result.high)}"
        )
        deviation = "" if result.std is None else f" ± {score(result.std)}"
        return [
            ["Runs", f"{len(self._entries):,}", row["note"].partition(": ")[2]],
            ["Steps", row["step"], f"of {row['total']}"],
            ["Time", duration(max(walls)) if walls else MISSING, "of the longest run"],
            ["Steps/s", row["rate"], "all runs together"],
            [f"{what}, interquartile mean", format_or_dash(result.iqm, score), interval],
            ["Median", format_or_dash(result.median, score), f"mean {format_or_dash(result.mean, score)}{deviation}"],
            ["Best", format_or_dash(result.best, score), ""],
            ["Worst", format_or_dash(result.worst, score), ""],
        ]

    def _lines(self, key: str) -> list[View]:
        """Return one line per entry and, of a group, the mean of its runs first."""
        size = max(1, len(self._entries))
        limit = min(_MOST_POINTS, max(_RUN_POINTS, _ALL_POINTS // size))
        lines = [self._line(entry, key, limit) for entry in self._entries]
        if self._group is not None and len(lines) > 1:
            mean = self._mean("interquartile mean", self._entries, key)
            return [mean, *({**line, "is_thin": True} for line in lines)]
        return lines

    def _line(self, entry: Entry, key: str, limit: int) -> View:
        runs = entry.runs()
        if len(runs) > 1:
            return self._mean(entry.path, runs, key)
        points = [point for run in runs for point in self._returns[run.path].points[key]]
        kept = [points[i] for i in thinned_indices([point.value for point in points], limit)]
        y = [point.value for point in kept]
        return {
            "name": entry.name if self._group else entry.path,
            "is_mean": False,
            "steps": {"x": [point.step for point in kept], "y": y},
            "seconds": {"x": [point.wall for point in kept], "y": y},
        }

    def _mean(self, name: str, runs: Sequence[Entry], key: str) -> View:
        """Return the interquartile mean of runs with its interval."""
        points = [self._returns[run.path].points[key] for run in runs]
        finished = [self._rows.state(run.path) == DONE for run in runs]
        y = [[point.value for point in each] for each in points]
        by_step = [([point.step for point in each], values) for each, values in zip(points, y)]
        by_wall = prolonged([([point.wall for point in each], values) for each, values in zip(points, y)], finished)
        curves = {"steps": aggregate(by_step, _MEAN_POINTS), "seconds": aggregate(by_wall, _MEAN_POINTS)}
        return {
            "name": name,
            "is_mean": True,
            **{
                axis: {"x": curve.x, "y": curve.iqm, "low": curve.low, "high": curve.high}
                for axis, curve in curves.items()
            },
        }

    def _settings(self) -> dict[str, Any]:
        """Return the settings in which the entries differ; of a group, those of its first run count."""
        firsts = [(entry, run) for entry in self._entries if (run := next(iter(entry.runs()), None)) is not None]
        configs = [(entry, run, read_mapping(run.folder, "config.yaml")) for entry, run in firsts]
        known = [(entry, history_of(run.folder, tree, [])) for entry, run, tree in configs if tree is not None]
        differing = differing_settings([history for _, history in known])
        return {
            "names": list(differing),
            "rows": [
                [entry.name if self._group else entry.path, *texts]
                for (entry, _), texts in zip(known, zip(*differing.values()))
            ],
            "n_known": len(known),
        }
