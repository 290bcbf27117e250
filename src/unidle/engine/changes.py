"""Notes in `changes.jsonl` which settings a run went on with, and from where: curves may bend there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from unidle.config import Config
from unidle.journal import reopen

FILE = "changes.jsonl"


def note_changes(folder: Path, before: Config, after: Config, step: int, seconds: float) -> None:
    """Append what differs, unless it is only how long the run lasts; drop what was noted past `step`."""
    old, new = before.flat(), after.flat()
    changed = [name for name in new if new[name] != old[name]]
    path = folder / FILE
    if changed not in ([], ["timesteps"]):
        told = ", ".join(f"{name} {_in_words(old[name])} → {_in_words(new[name])}" for name in changed)
        with reopen(path, step) as file:
            file.write(json.dumps({"step": step, "seconds": seconds, "change": told}) + "\n")
    elif path.exists():
        reopen(path, step).close()


def _in_words(value: Any) -> str:
    """As a config file has it; null is a choice that is left to unidle, or none."""
    return json.dumps(value) if value is None or isinstance(value, bool) else str(value)
