"""The report page of a group: all runs on one plot, their interquartile mean, and a table of the runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from unidle.formatting import MISSING, duration, score, short_number
from unidle.groups.exploits import exploits_table
from unidle.groups.runs import FINISHED, GroupRun, read_runs
from unidle.groups.tables import runs_table, settings_table
from unidle.report.history import History, Record, number
from unidle.report.page.axis import thinned_indices, time_unit
from unidle.report.page.cards import heading, key_figures, section
from unidle.report.page.document import document
from unidle.report.page.phase_colours import COLOURS, Style, series_style
from unidle.report.page.svg import Reference, Series, line_chart
from unidle.report.statistics import MIN_RUNS, Spread, aggregate, prolonged, spread
from unidle.writing import write_atomically

_MEAN_STYLE, _SHARED_STYLE = series_style(0), Style("c5")
_COLOURED = COLOURS - 1  # runs with a colour of their own; if there are more, all are grey
_ALL_POINTS = 20_000  # of all runs in one chart, so that a page of 1,000 runs is about a megabyte
_RUN_POINTS = 50  # of one run, at least


@dataclass(frozen=True)
class _Measure:
    """A return that the page is about: of evaluations, or of training if there are none."""

    name: str
    key: str
    records: Callable[[History], list[Record]]
    latest: Callable[[GroupRun], float | None]


_EVALUATION = _Measure(
    "Final evaluation", "eval/return_mean", lambda history: history.evaluations, lambda run: run.final_return
)
_TRAINING = _Measure(
    "Training return", "rollout/return_mean", lambda history: history.iterations, lambda run: run.training_return
)


def write_group_page(path: Path, runs: Sequence[Path], failures: Mapping[str, str] | None = None) -> Path:
    """Write `report.html` into the folder of a group, from the files of its `runs`; returns its path.

    `failures`: why runs failed, by the names of their folders. Runs that are unfinished, damaged or missing have a row
    that says so.
    """
    page = _page(path, read_runs(runs, failures))
    return write_atomically(path / "report.html", page)


def _page(path: Path, runs: list[GroupRun]) -> str:
    measure = _EVALUATION if any(run.final_return is not None for run in runs) else _TRAINING
    ranked = sorted(runs, key=lambda run: _descending(measure.latest(run)))
    histories = [run.history for run in runs if run.history is not None]
    sections = [_heading(path, histories), _figures(runs, histories), _results(ranked, measure)]
    if any(history.iterations or history.evaluations for history in histories):
        sections.append(_returns(runs, measure))
    else:
        sections.append('<p class="note">No run has recorded an iteration yet.</p>')
    sections += [runs_table(path, ranked, has_evaluations=measure is _EVALUATION), settings_table(ranked)]
    sections.append(exploits_table(path))
    source = f"Generated from config.yaml and metrics.jsonl of each run in {path.resolve()}"
    return document(f"{path.resolve().name} · unidle", "\n".join(filter(None, sections)), source)


def _descending(value: float | None) -> tuple[bool, float]:
    """Sort key: the highest first, unknown ones last."""
    return (value is None, -(value or 0.0))


def _heading(path: Path, histories: list[History]) -> str:
    facts = {
        "environment": _common(histories, "run", "env"),
        "algorithm": _common(histories, "recipe", "algo"),
        "preset": _common(histories, "run", "preset"),
        "overlap": _common(histories, "recipe", "overlap"),
        "device": _common(histories, "engine", "device"),
    }
    return heading("unidle group report", path.resolve().name, facts)


def _common(histories: list[History], part: str, name: str) -> str | None:
    """Return a setting's value in the runs; *several* if they differ, None if none has it."""
    values = {None if (value := history.setting(part, name)) is None else str(value) for history in histories}
    return "several" if len(values) > 1 else next(iter(values), None)


def _figures(runs: list[GroupRun], histories: list[History]) -> str:
    states = ", ".join(f"{count} {state}" for state, count in Counter(run.state for run in runs).items())
    steps, wall = sum(history.steps for history in histories), max((history.wall for history in histories), default=0.0)
    planned = sum(history.total_steps or 0 for history in histories)
    return key_figures(
        [
            ("Runs", f"{len(runs):,}", states),
            ("Steps", short_number(steps, 4), f"of {short_number(planned, 4)} planned" if planned else ""),
            ("Wall time", duration(wall), "of the longest run"),
            ("Steps per second", short_number(steps / wall) if wall else MISSING, "all runs together"),
        ]
    )


def _results(ranked: list[GroupRun], measure: _Measure) -> str:
    """Return the figures over all runs with a result; empty if there are none."""
    known = [(run, value) for run in ranked if (value := measure.latest(run)) is not None]
    if not known:
        return ""
    result = spread([value for _, value in known])
    spread_text = "" if result.std is None else f" ± {score(result.std)}"
    figures = [
        ("Interquartile mean", _score(result.iqm), _interval(result)),
        ("Median", _score(result.median), f"mean {_score(result.mean)}{spread_text}"),
        ("Best", _score(result.best), known[0][0].name),
        ("Worst", _score(result.worst), known[-1][0].name),
    ]
    remark = f"of {len(known)} run{'s' if len(known) > 1 else ''}; unfinished ones count with their latest"
    return f"<section><h2>{measure.name}<small>{remark}</small></h2>{key_figures(figures)}</section>"


def _score(value: float | None) -> str:
    return MISSING if value is None else score(value)


def _interval(result: Spread) -> str:
    if result.low is None or result.high is None:
        return f"an interval needs {MIN_RUNS} runs"
    return f"95 % interval {score(result.low)} to {score(result.high)}"


def _returns(runs: list[GroupRun], measure: _Measure) -> str:
    histories = [run.history for run in runs if run.history is not None]
    targets = {number(history.config["run"], "target_return") for history in histories}
    target = targets.pop() if len(targets) == 1 else None
    reference = None if target is None else Reference(target, "target")
    seconds, unit = time_unit(max(history.wall for history in histories))
    name = "Evaluation return" if measure is _EVALUATION else "Training return"
    charts = [
        line_chart(title, _curves(runs, measure, key, scale), label, "return per episode", reference=reference)
        for title, key, scale, label in (
            (f"{name} over steps", "step", 1.0, "environment steps of each run"),
            (f"{name} over wall time", "wall", seconds, f"wall time ({unit})"),
        )
    ]
    remark = ["thin: each run; bold: interquartile mean"] if len(histories) > 1 else []
    if len(histories) >= MIN_RUNS:
        remark.append("shaded: its 95 % interval")
    return section("Return", "; ".join(remark), "two", charts)


def _curves(runs: list[GroupRun], measure: _Measure, key: str, scale: float) -> list[Series]:
    """Return the series of each run and, from two runs on, of the interquartile mean."""
    lines = [(run, *points) for run in runs if (points := _points(run, measure, key, scale))]
    curves: Sequence[tuple[Sequence[float], Sequence[float]]] = [(x, y) for _, x, y in lines]
    if key == "wall":
        curves = prolonged(curves, [run.state == FINISHED for run, _, _ in lines])
    curve = aggregate(curves)
    limit = max(_RUN_POINTS, _ALL_POINTS // max(1, len(lines)))
    has_colours = len(lines) <= _COLOURED
    series = []
    for index, (run, x, y) in enumerate(lines):
        kept = thinned_indices(y, limit)
        style = series_style(index + 1) if has_colours else _SHARED_STYLE
        thinned = [x[i] for i in kept], [y[i] for i in kept]
        series.append(Series(run.name, *thinned, style=style, thin=len(lines) > 1, in_legend=has_colours))
    mean = Series("interquartile mean", curve.x, curve.iqm, curve.low, curve.high, _MEAN_STYLE)
    return [mean, *series] if len(lines) > 1 else series


def _points(run: GroupRun, measure: _Measure, key: str, scale: float) -> tuple[list[float], list[float]] | None:
    """Return x and y of a run's curve; None if it has no point."""
    records = measure.records(run.history) if run.history else []
    points = [(number(r, key), number(r, measure.key)) for r in records]
    known = [(x / scale, y) for x, y in points if x is not None and y is not None]
    return ([x for x, _ in known], [y for _, y in known]) if known else None
