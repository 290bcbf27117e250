"""The page of a sweep: how it went, which settings mattered, and a table of the trials; one file without scripts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from html import escape
from itertools import accumulate
from pathlib import Path

from unidle.formatting import MISSING, duration, percent
from unidle.report.page.cards import heading, key_figures, section
from unidle.report.page.document import document
from unidle.report.page.phase_colours import Style
from unidle.report.page.svg import Series, line_chart
from unidle.sweeps.folder import SweepFolder
from unidle.sweeps.objectives import LABELS, is_minimised, is_plottable
from unidle.sweeps.parallel import parallel_coordinates
from unidle.sweeps.pareto import pareto_chart
from unidle.sweeps.records import TrialRecord, best_of, front_of, settings_text, value_text
from unidle.writing import write_atomically

_BAR_HEIGHT, _BAR_WIDTH, _NAME_WIDTH = 22, 260, 170


def write_sweep_page(folder: SweepFolder, trials: Sequence[TrialRecord], importances: Mapping[str, float]) -> Path:
    """Write `report.html` into the folder of a sweep; `importances` is empty while there are too few trials."""
    finished = [trial for trial in trials if trial.state == "finished" and trial.values]
    sections = [_heading(folder), _figures(folder, trials)]
    if finished:
        charts = [_history(finished), _importance(folder, importances)]
        sections.append(section("Progress", "", "two", charts))
        if len(folder.plan.objectives) > 1:
            front = "in colour: the trials that no other is better than"
            sections.append(section("Trade-off", front, "two", [pareto_chart(finished)]))
        remark = "highlighted: the best trial and the best tenth"
        sections.append(section("Settings", remark, "one", [parallel_coordinates(folder.space, finished)]))
    else:
        sections.append('<p class="note">No trial has finished yet.</p>')
    sections.append(_table(folder, trials))
    name, body = folder.path.name, "\n".join(sections)
    page = document(f"{name} · unidle", body, f"Generated from journal.log in {folder.path}")
    return write_atomically(folder.path / "report.html", page)


def _heading(folder: SweepFolder) -> str:
    plan, run = folder.plan, folder.config.run
    facts = {
        "environment": run.env,
        "algorithm": folder.config.recipe.algo,
        "preset": run.preset,
        "sampler": plan.sampler,
        "pruner": plan.pruner,
        "seeds per trial": plan.seeds_per_trial,
        "objective": " and ".join(LABELS[objective] for objective in plan.objectives),
    }
    return heading("unidle sweep report", folder.path.name, facts)


def _figures(folder: SweepFolder, trials: Sequence[TrialRecord]) -> str:
    states, best = Counter(trial.state for trial in trials), best_of(trials)
    ranked = sorted((t for t in trials if t.state == "finished" and t.values), key=lambda trial: trial.merits)
    name = LABELS[folder.plan.objectives[0]]
    figures = [
        ("Trials", f"{len(trials)}", f"of {folder.plan.trials}"),
        ("Finished", f"{states['finished']}", f"{states['pruned']} pruned, {states['failed']} failed"),
        (f"Best {name}", best.values_in_words[0] if best else MISSING, f"trial {best.number}" if best else ""),
        (
            f"Median {name}",
            ranked[len(ranked) // 2].values_in_words[0] if ranked else MISSING,
            "of the finished trials",
        ),
    ]
    return key_figures(figures)


def _history(finished: Sequence[TrialRecord]) -> str:
    objective = finished[0].objectives[0]
    shown = [trial for trial in finished if is_plottable(objective, trial.values[0])]
    numbers, values = [float(trial.number) for trial in shown], [trial.values[0] for trial in shown]
    best: list[float] = list(accumulate(values, min if is_minimised(objective) else max))
    lines = [
        Series("trial", numbers, values, style=Style("c5")),
        Series("best so far", numbers, best, style=Style("c0")),
    ]
    name = LABELS[objective]
    return line_chart(f"{name.capitalize()} of the finished trials", lines, "trial", name)


def _importance(folder: SweepFolder, importances: Mapping[str, float]) -> str:
    """Return bars of how much each setting mattered."""
    title = '<text class="chart-title" x="2" y="17">Importance of the settings</text>'
    names = {dimension.parameter: dimension.name for dimension in folder.space.dimensions}
    bars = []
    for index, (parameter, share) in enumerate(importances.items()):
        y = 36 + _BAR_HEIGHT * index
        width = max(1.0, share * _BAR_WIDTH)
        bars.append(
            f'<text class="chart-name" x="{_NAME_WIDTH - 8}" y="{y + 12}" text-anchor="end">'
            f"{escape(names.get(parameter, parameter))}</text>"
            f'<rect class="fill c0" x="{_NAME_WIDTH}" y="{y}" width="{width:.1f}" height="16" rx="2"/>'
            f'<text class="chart-figure" x="{_NAME_WIDTH + width + 6:.1f}" y="{y + 12}">{percent(share)}</text>'
        )
    if not bars:
        bars.append('<text class="chart-empty" x="2" y="48">Too few finished trials to tell.</text>')
    height = max(300, 44 + _BAR_HEIGHT * len(importances))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="chart" viewBox="0 0 500 {height}" role="img" '
        f'aria-label="Importance of the settings">{title}{"".join(bars)}</svg>'
    )


def _table(folder: SweepFolder, trials: Sequence[TrialRecord]) -> str:
    """Return one row per trial, the best first, with a link to its report."""
    ranked = sorted(trials, key=_rank)
    front = {trial.number for trial in front_of(trials)} if len(folder.plan.objectives) > 1 else set()
    labels = [LABELS[objective] for objective in folder.plan.objectives]
    names = [dimension.setting for dimension in folder.space.dimensions]
    heads = "".join(f'<th scope="col">{escape(head)}</th>' for head in ("trial", *labels, "state", "time", *names))
    rows = []
    for trial in ranked:
        cells = [
            *trial.values_in_words,
            f"{trial.state}, Pareto front" if trial.number in front else trial.state,
            MISSING if trial.seconds is None else duration(trial.seconds),
            *(value_text(trial.settings[name]) if name in trial.settings else MISSING for name in names),
        ]
        tooltip = escape(trial.error or settings_text(trial.settings))
        row = "".join(f"<td>{escape(cell)}</td>" for cell in cells)
        rows.append(f'<tr title="{tooltip}"><th scope="row">{_link(trial)}</th>{row}</tr>')
    table = f'<table class="tasks trials"><tr>{heads}</tr>{"".join(rows)}</table>'
    return section("Trials", "the best first; each links to its run", "one", [table])


def _rank(trial: TrialRecord) -> tuple[bool, float, int]:
    """Sort key: finished trials first, the best first."""
    return trial.state != "finished", -trial.merits[0] if trial.values else 0.0, trial.number


def _link(trial: TrialRecord) -> str:
    """Return the number of a trial, with a link to its report if there is one."""
    name = trial.path.name
    return (
        f'<a href="{name}/report.html">{trial.number}</a>'
        if (trial.path / "report.html").is_file()
        else str(trial.number)
    )
