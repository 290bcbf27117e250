"""The report page of a run: a single HTML file without scripts or external resources."""

from __future__ import annotations

from collections.abc import Callable
from html import escape
from pathlib import Path
from typing import Any

from unidle.formatting import duration, faults, percent, score, short_number
from unidle.report.history import History, Record, number, read_history, time_shares_over
from unidle.report.learning_metrics import SECTION_MEANINGS, learned_records, titled_metrics
from unidle.report.page.axis import time_unit
from unidle.report.page.cards import SMALL, heading, key_figures, section, series, setting_text
from unidle.report.page.document import document
from unidle.report.page.phase_colours import phase_style
from unidle.report.page.plasticity import plasticity_section
from unidle.report.page.provenance import changes_note, provenance_section
from unidle.report.page.site_graph import site_graph_section
from unidle.report.page.success import success_section
from unidle.report.page.svg import SMOOTH_FROM, Reference, Series, line_chart, stacked_bar
from unidle.writing import write_atomically


def write_report(folder: Path, say: Callable[[str], None] | None = None) -> Path:
    """Write `report.html` into a run folder, from its `config.yaml`, `metrics.jsonl` and `page_graph.json`.

    `say` receives a message if `metrics.jsonl` has damaged lines.
    """
    page = _page(read_history(folder, say))
    return write_atomically(folder / "report.html", page)


def _page(history: History) -> str:
    sections = [_heading(history), _figures(history), _faults(history), changes_note(history)]
    if history.iterations or history.evaluations:
        sections += [_returns(history), success_section(history), plasticity_section(history)]
        sections.append(site_graph_section(history.folder))
        sections += [_speed(history), _learning(history)]
    else:
        sections.append('<p class="note">No iteration has been recorded yet.</p>')
    sections += [_config(history), provenance_section(history)]
    source = f"Generated from config.yaml and metrics.jsonl in {history.folder.resolve()}"
    return document(f"{history.name} · unidle", "\n".join(filter(None, sections)), source)


def _heading(history: History) -> str:
    facts = {
        "environment": history.setting("run", "env"),
        "algorithm": history.setting("recipe", "algo"),
        "preset": history.setting("run", "preset"),
        "seed": history.setting("run", "seed"),
        "overlap": history.overlap,
        "device": history.setting("engine", "device"),
    }
    return heading("unidle run report", history.name, facts)


def _figures(history: History) -> str:
    final, best = history.final_evaluation, history.best_evaluation
    speed, training = history.steps_per_second, history.training_return
    figures = [
        ("Steps", f"{history.steps:,}", history.progress),
        ("Wall time", duration(history.wall), ""),
        (
            "Steps per second",
            "–" if speed is None else short_number(speed),
            "average of the run",
        ),
        ("Best evaluation", *_evaluation_figure(best)),
        ("Final evaluation", *_evaluation_figure(final)),
        ("Training return", "–" if training is None else score(training), "last 100 episodes"),
    ]
    if history.success is not None:
        best_success = max(number(r, "eval/success") or 0.0 for r in history.evaluations)
        figures.insert(5, ("Success", percent(history.success), f"final evaluation; best {percent(best_success)}"))
    return key_figures(figures)


def _evaluation_figure(record: Record | None) -> tuple[str, str]:
    if record is None:
        return "–", "none yet"
    std = number(record, "eval/return_std")
    spread = "" if std is None else f"± {score(std)} "
    success = number(record, "eval/success")
    rate = "" if success is None else f", success {percent(success)}"
    return score(float(record["eval/return_mean"])), f"{spread}at step {short_number(record['step'])}{rate}"


def _faults(history: History) -> str:
    counts = history.fault_counts
    if not counts:
        return ""
    where = "see the records of kind fault in metrics.jsonl for details."
    return f'<p class="note">Environment faults: {escape(faults(counts))}; {where}</p>'


def _returns(history: History) -> str:
    target = history.setting("run", "target_return")
    reference = Reference(float(target), "target") if isinstance(target, (int, float)) else None
    seconds, unit = time_unit(history.wall)
    charts = [
        line_chart(
            title,
            _return_series(history, key, scale),
            label,
            "return per episode",
            reference=reference,
        )
        for title, key, scale, label in (
            ("Return over steps", "step", 1.0, "environment steps"),
            ("Return over wall time", "wall", seconds, f"wall time ({unit})"),
        )
    ]
    remark = "shaded: one standard deviation of an evaluation" if history.evaluations else ""
    return section("Return", remark, "two", charts)


def _return_series(history: History, key: str, scale: float) -> list[Series]:
    evaluations = [r for r in history.evaluations if number(r, key) is not None]
    means = [number(r, "eval/return_mean") or 0.0 for r in evaluations]
    spreads = [number(r, "eval/return_std") or 0.0 for r in evaluations]
    return [
        series("training, last 100 episodes", history.iterations, "rollout/return_mean", key, scale),
        Series(
            "evaluation",
            [r[key] / scale for r in evaluations],
            means,
            low=[mean - std for mean, std in zip(means, spreads)],
            high=[mean + std for mean, std in zip(means, spreads)],
        ),
    ]


def _speed(history: History) -> str:
    windows = time_shares_over(history.iterations)
    parts = list(dict.fromkeys(part for _, shares in windows for part in shares))
    # A window starts at the end of the previous one, and the first at the start of the run.
    steps = [0.0, *(float(record["step"]) for record, _ in windows)]
    spans = [shares for _, shares in (*windows[:1], *windows)]
    layers = [
        Series(part, steps, [shares.get(part, 0.0) for shares in spans], style=phase_style(part)) for part in parts
    ]
    rate = series("steps per second", history.iterations, "rollout/steps_per_second")
    charts = [
        line_chart(
            "Steps per second",
            [rate],
            "environment steps",
            "steps/s",
            size=SMALL,
            from_zero=True,
            smooth=True,
        ),
        stacked_bar("Where the time went", history.time_shares, size=SMALL),
        line_chart(
            "Time by phase over the run",
            layers,
            "environment steps",
            "share of wall time",
            size=SMALL,
            stacked=True,
            as_percent=True,
        ),
    ]
    return section("Speed", _smoothing(history.iterations), "three", charts)


def _learning(history: History) -> str:
    limit = history.setting("recipe", "target_kl")
    references = {"train/approx_kl": Reference(float(limit), "target_kl")} if isinstance(limit, (int, float)) else {}
    learned = learned_records(history.iterations)
    charts = [
        line_chart(
            title,
            [series(title, learned, key)],
            "environment steps",
            meaning,
            size=SMALL,
            reference=references.get(key),
            smooth=True,
        )
        for key, (title, meaning) in titled_metrics(learned).items()
    ]
    return section("Learning", _smoothing(learned), "three", charts) if charts else ""


def _smoothing(records: list[Record]) -> str:
    """Return what the line styles of charts with `smooth` mean; empty if they are too short to be smoothed."""
    return "faint: each iteration; bold: running mean" if len(records) >= SMOOTH_FROM else ""


def _config(history: History) -> str:
    recipe, engine, run = (_settings(section, values) for section, values in history.own_settings.items())
    return (
        '<section><h2>Config<small>config.yaml of this run</small></h2><div class="grid config">'
        f'{recipe}<div class="grid">{engine}{run}</div></div></section>'
    )


def _settings(section: str, settings: dict[str, Any]) -> str:
    """Return a card of settings; the recipe is long, so its table has two columns."""
    rows = [
        f'<tr><th scope="row">{escape(str(name))}</th><td>{escape(setting_text(str(name), value))}</td></tr>'
        for name, value in settings.items()
    ]
    half = (len(rows) + 1) // 2 if section == "recipe" else len(rows)
    tables = "".join(f"<table>{''.join(part)}</table>" for part in (rows[:half], rows[half:]) if part)
    layout = "halves" if section == "recipe" else ""
    title = f"<h3>{section}<small>{SECTION_MEANINGS[section]}</small></h3>"
    return f'<div class="card">{title}<div class="{layout}">{tables}</div></div>'
