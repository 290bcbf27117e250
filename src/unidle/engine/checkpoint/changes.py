"""Records in `changes.jsonl` at which steps a run was resumed with other settings or kernels: curves may bend there."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from unidle.config import Config
from unidle.config.fields import word_for_none
from unidle.config.resolve import RECORDED_ON_RESUME, learned_with
from unidle.metrics.jsonl import read_records, reopen

FILE = "changes.jsonl"


def record_changes(
    folder: Path,
    before: Config,
    learned: str,
    after: Config,
    step: int,
    seconds: float,
    kernels: tuple[str, str],
    say: Callable[[str], None] | None = None,
) -> None:
    """Append a record of the changes, unless only the number of timesteps changed; drop records past `step`.

    `learned` are the `learning_settings` of the checkpoint, and `kernels` its kernels and the current ones.
    Before the first step, only changes of the recipe are recorded. `say` receives a message about these, and one if the
    file has damaged lines, which are dropped.
    """
    path = folder / FILE
    # A run may be resumed several times before it writes another checkpoint: then the last record is newer.
    recorded = [r for r in read_records(path) if r["step"] == step > 0]
    kernels_before = next((str(r["kernels"]) for r in reversed(recorded) if "kernels" in r), kernels[0])
    recipe_before = {name: value for name, value in learned_with(learned).items() if name in RECORDED_ON_RESUME}
    for record in recorded:
        recipe_before |= _settings_in(record)
    old = {**before.flat(), **recipe_before, "kernels": kernels_before}
    new = {**after.flat(), "kernels": kernels[1]}
    changed = {name: (old[name], new[name]) for name in new if new[name] != old[name]}
    recipe = {name: new[name] for name in RECORDED_ON_RESUME if name in changed}
    if say is not None and recipe:
        words = " and ".join(f"{name} {_as_text(name, new[name])} (was {_as_text(name, old[name])})" for name in recipe)
        say(f"From step {step:,} on, this run continues with {words}.")
    if recipe or (step and list(changed) not in ([], ["timesteps"])):
        change = ", ".join(
            f"{name} {_as_text(name, was)} → {_as_text(name, now)}" for name, (was, now) in changed.items()
        )
        record = {"step": step, "seconds": seconds, "change": change}
        if "kernels" in changed:
            record["kernels"] = kernels[1]
        if recipe:
            record["settings"] = recipe
        with reopen(path, step, say) as file:
            file.write(json.dumps(record) + "\n")
    elif path.exists():
        reopen(path, step, say).close()


def recorded_settings(folder: Path, step: int) -> list[dict[str, Any]]:
    """The changes of the recipe that were recorded at `step` or later, oldest first, each as setting → value."""
    return [_settings_in(record) for record in read_records(folder / FILE) if record["step"] >= step]


def _settings_in(record: dict[str, Any]) -> dict[str, Any]:
    settings = record.get("settings")
    return {n: settings[n] for n in RECORDED_ON_RESUME if n in settings} if isinstance(settings, dict) else {}


def _as_text(name: str, value: Any) -> str:
    """The value as a user writes it."""
    if value is None:
        return word_for_none(name)
    if isinstance(value, (list, tuple)):
        return ",".join(map(str, value)) or "none"
    return json.dumps(value) if isinstance(value, bool) else str(value)
