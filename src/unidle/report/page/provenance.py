"""The section of the report page on what the run was made with, and what was changed when it was resumed."""

from __future__ import annotations

from html import escape
from typing import Any

from unidle.report.history import History, Record, number

_NAMES = ("started", "command", "versions", "cpu", "gpu", "git", "slurm")


def changes_note(history: History) -> str:
    """What was changed on the way, as a note; empty if nothing was."""
    changes = [(number(r, "step"), r.get("change")) for r in history.changes]
    shown = [f"from step {step:,.0f} on {change}" for step, change in changes if step is not None and change]
    return f'<p class="note">Resumed with other settings: {escape("; ".join(shown))}.</p>' if shown else ""


def provenance_section(history: History) -> str:
    """Command, versions, processors and git commit of each process that trained; empty for runs of earlier versions."""
    entries = [entry for entry in history.provenance if isinstance(entry, dict)]
    if not entries:
        return ""
    cards = "".join(_card(entry, is_first=index == 0) for index, entry in enumerate(entries))
    return f'<section><h2>Provenance</h2><div class="grid config">{cards}</div></section>'


def _card(entry: Record, *, is_first: bool) -> str:
    step = number(entry, "step")
    title = "Start" if is_first else "Resumed" if step is None else f"Resumed at step {step:,.0f}"
    rows = "".join(
        f'<tr><th scope="row">{name}</th><td>{escape(_in_words(name, entry[name]))}</td></tr>'
        for name in _NAMES
        if entry.get(name) is not None
    )
    return f'<div class="card"><h3>{title}</h3><table>{rows}</table></div>'


def _in_words(name: str, value: Any) -> str:
    if not isinstance(value, dict):
        return str(value)
    if name == "git":
        commit = str(value.get("commit") or "no commit yet")
        return f"{commit}, with uncommitted changes" if value.get("dirty") else commit
    return ", ".join(f"{part} {version}" for part, version in value.items() if version is not None)
