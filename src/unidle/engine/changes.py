"""Notes in `changes.jsonl` which settings a run went on with, and from where: curves may bend there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from unidle.config import Config
from unidle.config.schema import word_for_none
from unidle.journal import reopen

FILE = "changes.jsonl"


def note_changes(
    folder: Path, before: Config, after: Config, step: int, seconds: float, others: dict[str, tuple[str, str]]
) -> None:
    """Append what differs, unless it is only how long the run lasts; drop what was noted past `step`.

    `others` are what differs beside the settings: name → before and after.
    """
    old, new = before.flat(), after.flat()
    changed = {name: (old[name], new[name]) for name in new if new[name] != old[name]} | others
    path = folder / FILE
    if list(changed) not in ([], ["timesteps"]):
        told = ", ".join(
            f"{name} {_in_words(name, was)} → {_in_words(name, now)}" for name, (was, now) in changed.items()
        )
        with reopen(path, step) as file:
            file.write(json.dumps({"step": step, "seconds": seconds, "change": told}) + "\n")
    elif path.exists():
        reopen(path, step).close()


def _in_words(name: str, value: Any) -> str:
    """As a user writes it."""
    if value is None:
        return word_for_none(name)
    return json.dumps(value) if isinstance(value, bool) else str(value)
