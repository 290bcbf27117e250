"""Records in `changes.jsonl` at which steps a run was resumed with other settings or kernels: curves may bend there."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from unidle.config import Config
from unidle.config.fields import word_for_none
from unidle.metrics.jsonl import read_records, reopen

FILE = "changes.jsonl"


def record_changes(
    folder: Path,
    before: Config,
    after: Config,
    step: int,
    seconds: float,
    kernels: tuple[str, str],
    say: Callable[[str], None] | None = None,
) -> None:
    """Append a record of the changes, unless only the number of timesteps changed; drop records past `step`.

    `kernels` are the checkpoint's and the current ones. Changes before the first step are not recorded. `say` receives
    a message if the file has damaged lines, which are dropped.
    """
    path = folder / FILE
    # A run may be resumed several times before it writes another checkpoint: then the last record is newer.
    recorded = [str(r["kernels"]) for r in read_records(path) if r["step"] == step and "kernels" in r]
    old = {**before.flat(), "kernels": recorded[-1] if recorded else kernels[0]}
    new = {**after.flat(), "kernels": kernels[1]}
    changed = {name: (old[name], new[name]) for name in new if new[name] != old[name]}
    if step and list(changed) not in ([], ["timesteps"]):
        change = ", ".join(
            f"{name} {_in_words(name, was)} → {_in_words(name, now)}" for name, (was, now) in changed.items()
        )
        record = {"step": step, "seconds": seconds, "change": change}
        if "kernels" in changed:
            record["kernels"] = kernels[1]
        with reopen(path, step, say) as file:
            file.write(json.dumps(record) + "\n")
    elif path.exists():
        reopen(path, step, say).close()


def _in_words(name: str, value: Any) -> str:
    """The value as a user writes it."""
    if value is None:
        return word_for_none(name)
    return json.dumps(value) if isinstance(value, bool) else str(value)
