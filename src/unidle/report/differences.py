"""The settings in which runs differ."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from unidle.formatting import MISSING
from unidle.report.history import SECTIONS, History
from unidle.report.page.cards import setting_text

_OWN = {"seed", "run_name", "runs_dir"}  # differ by their nature


def differing_settings(histories: Sequence[History]) -> dict[str, list[str]]:
    """Return the settings in which runs differ, besides the seed: name → the value of each run as text."""
    settings = [_settings(history) for history in histories]
    names = dict.fromkeys(name for values in settings for name in values if name not in _OWN)
    differing = [name for name in names if len({repr(values.get(name, MISSING)) for values in settings}) > 1]
    return {
        name: [setting_text(name, values[name]) if name in values else MISSING for values in settings]
        for name in differing
    }


def _settings(history: History) -> dict[str, Any]:
    """Return all settings of a run."""
    return {str(name): value for part in SECTIONS for name, value in history.config[part].items()}
