"""The rows of a table of runs, groups, sweeps and packs; unchanged files are not read again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from unidle.formatting import percent, score, short_number
from unidle.report.dashboard.figures import UNKNOWN, date_and_time, format_or_dash
from unidle.report.dashboard.files import is_training, last_records, read_mapping, sampled_records, stamp_of
from unidle.report.dashboard.folders import GROUP, PACK, RUN, SWEEP, Entry
from unidle.report.dashboard.packs import jobs_of, started_at, summary_of
from unidle.report.dashboard.runs import as_json
from unidle.report.dashboard.segments import merge, segment_of
from unidle.report.dashboard.trials import objective_of_returns, sweep_stamp, trials_of
from unidle.report.dashboard.view import DONE, FAILED, STOPPED, TRAINING, UNREADABLE, View, state_of
from unidle.report.history import history_of, number
from unidle.report.page.axis import plottable
from unidle.report.statistics import aggregate, spread

_ROW_BYTES = 1 << 18  # read from the end of each file for a row: tens of records
_SPARK_POINTS = 32


@dataclass(frozen=True)
class Figures:
    """What a row shows; unknown figures are None or empty."""

    state: str
    note: str = ""  # what a group, sweep or pack consists of
    env: str | None = None
    preset: str | None = None
    seed: str = ""
    started: float | None = None  # seconds since 1970
    steps: int = 0
    total: int | None = None
    rate: float | None = None  # steps per second
    wall: float = 0.0
    result: float | None = None
    busy: float | None = None
    curve: tuple[Sequence[float], Sequence[float]] = ((), ())  # steps and returns


class Rows:
    """Reads rows, and keeps those whose files have not changed."""

    def __init__(self) -> None:
        self._before: dict[str, tuple[object, Figures]] = {}
        self._now: dict[str, tuple[object, Figures]] = {}

    def of(self, entries: Sequence[Entry]) -> list[View]:
        """Return a row per entry, those that are training first. An entry that cannot be read never raises."""
        self._before, self._now = self._now, {}
        rows = [self._row(entry) for entry in entries]
        return sorted(rows, key=lambda row: row["state"] != TRAINING)

    def state(self, path: str) -> str:
        """Return the state of a run whose row, or whose group's row, was read last."""
        return self._now[path][1].state if path in self._now else UNREADABLE

    def _row(self, entry: Entry) -> View:
        row = row_of(entry, self._figures(entry))
        try:
            as_json(row)
        except ValueError:  # a number that overflows
            return row_of(entry, Figures(UNREADABLE))
        return row

    def _figures(self, entry: Entry) -> Figures:
        try:
            return _READERS[entry.kind](self, entry)
        except Exception:  # whatever is wrong with it, it must not hide the others
            return Figures(UNREADABLE)

    def _kept(self, path: str, stamp: object, read: Callable[[], Figures]) -> Figures:
        """Return the figures read earlier if `stamp` is the same."""
        before = self._now.get(path) or self._before.get(path)  # a run may be asked for on its own and by its group
        figures = before[1] if before is not None and before[0] == stamp else read()
        self._now[path] = stamp, figures
        return figures

    def run(self, entry: Entry) -> Figures:
        """Return the figures of a run."""
        is_live = is_training(entry.folder)
        files = ("config.yaml", "metrics.jsonl", "meter.jsonl")
        stamp = (is_live, *(stamp_of(entry.folder / file) for file in files))
        return self._kept(entry.path, stamp, lambda: _run_figures(entry.folder, is_live))

    def group(self, entry: Entry) -> Figures:
        """Return the figures of the runs of a group together."""
        failures = (read_mapping(entry.folder, "group.yaml") or {}).get("failures")
        failed = failures if isinstance(failures, dict) else {}
        members = entry.members()
        figures = [self._figures(member) for member in members]
        states = tuple(FAILED if member.name in failed else each.state for member, each in zip(members, figures))
        stamp = states, figures
        return self._kept(entry.path, stamp, lambda: _group_figures(entry, figures, states))

    def sweep(self, entry: Entry) -> Figures:
        """Return the figures of a sweep: its trials instead of steps."""
        is_live = is_training(entry.folder)
        stamp = is_live, sweep_stamp(entry)
        return self._kept(entry.path, stamp, lambda: _sweep_figures(entry, is_live))

    def pack(self, entry: Entry) -> Figures:
        """Return the figures of a pack: its jobs instead of steps."""
        stamp = is_training(entry.folder), stamp_of(entry.folder / "summary.json")
        return self._kept(entry.path, stamp, lambda: _pack_figures(entry))


_READERS = {RUN: Rows.run, GROUP: Rows.group, SWEEP: Rows.sweep, PACK: Rows.pack}


def row_of(entry: Entry, figures: Figures) -> View:
    """Return a row as text, with the values to sort it by; unknown figures are –."""
    f = figures
    return {
        "kind": entry.kind,
        "path": entry.path,
        "name": entry.name,
        "note": f.note,
        "env": f.env or UNKNOWN,
        "preset": f.preset or UNKNOWN,
        "seed": f.seed or UNKNOWN,
        "date": format_or_dash(f.started, date_and_time),
        "state": f.state,
        "step": UNKNOWN if f.state == UNREADABLE else f"{f.steps:,}",
        "total": short_number(f.total) if f.total else UNKNOWN,
        "progress": f.steps / f.total if f.total else None,
        "rate": format_or_dash(f.rate, short_number),
        "return": format_or_dash(f.result, score),
        "busy": format_or_dash(f.busy, percent),
        "spark": [[float(f"{value:.4g}") for value in values] for values in f.curve],
        "order": {
            "seed": int(f.seed) if f.seed.isascii() and f.seed.isdigit() and len(f.seed) < 16 else None,
            "date": f.started,
            "step": f.steps,
            "rate": f.rate,
            "return": f.result,
            "busy": f.busy,
        },
    }


def _run_figures(folder: Path, is_live: bool) -> Figures:
    config = read_mapping(folder, "config.yaml")
    if config is None:
        return Figures(UNREADABLE)
    history = history_of(folder, config, last_records(folder, "metrics.jsonl", _ROW_BYTES))
    lines = last_records(folder, "meter.jsonl", _ROW_BYTES)
    latest = merge([segment for line in lines if (segment := segment_of(line)) is not None])
    final, result = history.final_evaluation, history.training_return
    if result is None and final is not None:
        result = number(final, "eval/return_mean")
    seed = history.setting("run", "seed")
    return Figures(
        state=state_of(history, is_live),
        env=_text(history.setting("run", "env")),
        preset=_text(history.setting("run", "preset")),
        seed="" if seed is None else str(seed),
        started=_started(folder, history.provenance),
        steps=history.steps,
        total=history.total_steps,
        rate=history.steps_per_second,
        wall=history.wall,
        result=result,
        busy=latest.gpu["busy"] if latest and latest.gpu else None,
        curve=_curve(folder),
    )


def _text(value: Any) -> str | None:
    return None if value is None else str(value)


def _started(folder: Path, provenance: Sequence[Any]) -> float | None:
    """Return when the first process began to train; of runs of earlier versions, when the config was last written."""
    first = provenance[0] if provenance else None
    try:
        return datetime.fromisoformat(first["started"]).timestamp()  # type: ignore[index]
    except (KeyError, TypeError, ValueError, OverflowError, OSError):
        stamp = stamp_of(folder / "config.yaml")
        return stamp[1] / 1e9 if stamp else None


def _curve(folder: Path) -> tuple[list[float], list[float]]:
    """Return steps and returns spread over a run: of training, or of evaluations if there are none of training."""
    records = sampled_records(folder, "metrics.jsonl", _SPARK_POINTS)
    for key in ("rollout/return_mean", "eval/return_mean"):
        points = {x: y for r in records if (x := number(r, "step")) is not None and plottable(y := number(r, key))}
        if len(points) > 1:
            return list(points), list(points.values())
    return [], []


def _group_figures(entry: Entry, members: Sequence[Figures], states: Sequence[str]) -> Figures:
    curve = aggregate([member.curve for member in members], _SPARK_POINTS)
    wall = max((member.wall for member in members), default=0.0)
    steps = sum(member.steps for member in members)
    totals = [member.total for member in members if member.total]
    return Figures(
        state=_state_of_all(states),
        note=counted(states, "run"),
        env=_common([member.env for member in members]),
        preset=_common([member.preset for member in members]),
        seed=_seeds([member.seed for member in members]),
        started=min((member.started for member in members if member.started is not None), default=None),
        steps=steps,
        total=sum(totals) or None,
        rate=steps / wall if wall else None,
        wall=wall,
        result=spread([member.result for member in members if member.result is not None]).iqm,
        curve=(curve.x, curve.iqm),
    )


def _state_of_all(states: Sequence[str]) -> str:
    """Return training if one is, done if all are, failed if one has, otherwise stopped."""
    if TRAINING in states:
        return TRAINING
    if states and set(states) == {DONE}:
        return DONE
    return FAILED if FAILED in states else STOPPED


def counted(states: Sequence[str], what: str) -> str:
    """4 runs: 3 done, 1 stopped."""
    counts = Counter(states)
    parts = ", ".join(f"{count} {state}" for state, count in counts.items()) if len(counts) > 1 else ""
    return f"{len(states):,} {what}{'' if len(states) == 1 else 's'}{': ' if parts else ''}{parts}"


def _common(values: Sequence[str | None]) -> str | None:
    found = {value for value in values if value is not None}
    return "several" if len(found) > 1 else next(iter(found), None)


def _seeds(seeds: Sequence[str]) -> str:
    """Return 0–7, or 1, 2, 5."""
    known = sorted({int(seed) for seed in seeds if seed.isascii() and seed.isdigit() and len(seed) < 16})
    if len(known) > 2 and known[-1] - known[0] == len(known) - 1:
        return f"{known[0]}–{known[-1]}"
    return ", ".join(map(str, known[:4])) + (", …" if len(known) > 4 else "")


def _sweep_figures(entry: Entry, is_live: bool) -> Figures:
    plan = read_mapping(entry.folder, "sweep.yaml")
    if plan is None:
        return Figures(UNREADABLE)
    trials, wanted = trials_of(entry), plan.get("trials")
    over = [trial for trial in trials if trial.is_over]
    total = wanted if isinstance(wanted, int) and wanted > 0 else None
    job = plan.get("job")
    run = job.get("run") if isinstance(job, dict) else None
    setting = run.get if isinstance(run, dict) else {}.get
    key = objective_of_returns(trials)
    returns = {t.number: t.values[key] for t in over if t.state == "finished" and key in t.values}
    stamp = stamp_of(entry.folder / "sweep.yaml")
    return Figures(
        state=TRAINING if is_live else DONE if total and len(over) >= total else STOPPED,
        note=f"sweep, {counted([trial.state for trial in trials], 'trial')}",
        env=_text(setting("env")),
        preset=_text(setting("preset")),
        started=stamp[1] / 1e9 if stamp else None,
        steps=len(over),
        total=max(total, len(over)) if total else None,
        result=max(returns.values(), default=None),
        curve=(list(returns), list(returns.values())),
    )


def _pack_figures(entry: Entry) -> Figures:
    summary = summary_of(entry.folder)
    if summary is None:
        return Figures(UNREADABLE)
    jobs = jobs_of(summary)
    states = [job["state"] for job in jobs]
    is_over = not {"waiting", "running"} & set(states)
    over = sum(state not in ("waiting", "running") for state in states)
    state = (
        TRAINING if not is_over else DONE if set(states) == {"finished"} else FAILED if "failed" in states else STOPPED
    )
    return Figures(
        state=state,
        note=f"pack, {counted(states, 'job')}",
        started=started_at(summary),
        steps=over,
        total=len(jobs) or None,
    )
