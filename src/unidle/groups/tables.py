"""The tables of the group page: the runs and their results, and the settings in which they differ."""

from __future__ import annotations

import os
from collections.abc import Sequence
from html import escape
from pathlib import Path
from urllib.parse import quote

from unidle.formatting import MISSING, duration, score
from unidle.groups.runs import GroupRun
from unidle.report.differences import differing_settings
from unidle.report.history import evaluation_text


def runs_table(page: Path, runs: Sequence[GroupRun], *, has_evaluations: bool) -> str:
    """Return one row per run, with a link from the folder `page` to its report and, below, what went wrong."""
    results = ("final evaluation", "best evaluation") if has_evaluations else ("training return",)
    heads = (*results, "state", "steps", "wall time", "seed")
    rows = ""
    for run in runs:
        figures = _figures(run)
        cells = "".join(f"<td>{escape(figures.get(head, MISSING))}</td>" for head in heads)
        rows += f'<tr><th scope="row">{_link(page, run)}</th>{cells}</tr>'
        if run.problem:
            rows += f'<tr><td colspan="{1 + len(heads)}"><div class="problem">{escape(run.problem)}</div></td></tr>'
    return _section("Runs", f"best first, by {results[0]}", ("run", *heads), rows)


def _figures(run: GroupRun) -> dict[str, str]:
    """Return what is known of a run as text, by column."""
    figures = {"state": run.state}
    history = run.history
    if history is None:
        return figures
    figures |= {"steps": f"{history.steps:,}", "wall time": duration(history.wall)}
    if (seed := history.setting("run", "seed")) is not None:
        figures["seed"] = str(seed)
    if history.training_return is not None:
        figures["training return"] = score(history.training_return)
    if history.final_evaluation is not None:
        figures["final evaluation"] = evaluation_text(history.final_evaluation, spread=False)
    if history.best_evaluation is not None:
        figures["best evaluation"] = evaluation_text(history.best_evaluation, spread=False)
    return figures


def _link(page: Path, run: GroupRun) -> str:
    """Return the run's name, with a link to its report if there is one."""
    report = run.folder / "report.html"
    if not report.is_file():
        return escape(run.name)
    address = quote(os.fsencode(os.path.relpath(report, page)))
    return f'<a href="{address}">{escape(run.name)}</a>'


def settings_table(runs: Sequence[GroupRun]) -> str:
    """Return the settings in which the runs differ, one row per run; a sentence if they differ in their seeds only."""
    known = [run for run in runs if run.history is not None]
    if len(known) < 2:
        return ""
    differing = differing_settings([run.history for run in known if run.history is not None])
    if not differing:
        return '<p class="note">The runs differ only in their seeds.</p>'
    rows = ""
    for run, texts in zip(known, zip(*differing.values())):
        cells = "".join(f"<td>{escape(text)}</td>" for text in texts)
        rows += f'<tr><th scope="row">{escape(run.name)}</th>{cells}</tr>'
    return _section("Settings that differ", "besides the seed; all others are the same", ("run", *differing), rows)


def _section(title: str, remark: str, heads: Sequence[str], rows: str) -> str:
    cells = "".join(f'<th scope="col">{escape(head)}</th>' for head in heads)
    table = f"<table><thead><tr>{cells}</tr></thead><tbody>{rows}</tbody></table>"
    return f'<section><h2>{title}<small>{escape(remark)}</small></h2><div class="card runs">{table}</div></section>'
