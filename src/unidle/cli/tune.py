"""`unidle tune`: find faster engine settings for a training job by measuring."""

from __future__ import annotations

import dataclasses
import shlex
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unidle.cli.durations import seconds_of
from unidle.cli.flags import normalise_flags, replace_renamed_flags
from unidle.cli.job import Job, JobFlags, job_of
from unidle.config import Engine, Recipe
from unidle.config.engine_file import Machine, engine_yaml
from unidle.errors import TrainingError, UsageError
from unidle.tuning.job import is_valid

if TYPE_CHECKING:
    from unidle.tuning.search.outcomes import Tuned

_MIN_BUDGET = 30
# Flags left out of the train command: `unidle train` does not have them, or the engine file sets them.
_EXCLUDED = ("budget", "out", "json", "engine", "allow_recipe_change")
_SWITCHES = {
    f"--{no}{f.name.replace('_', '-')}"
    for f in dataclasses.fields(Engine)
    if "bool" in str(f.type)
    for no in ("", "no-")
} | {"--allow-recipe-change", "--no-allow-recipe-change"}


@dataclass(frozen=True)
class _TuneFlags(JobFlags):
    """Find faster engine settings for a training job: change one, measure, keep it if it helps.

    Takes all settings of `unidle train`. Runs the job in short segments, alternating between the current settings and
    one change, until the 95 % confidence interval of the speed ratio is conclusive. Changes are tried in order of
    predicted speed-up: workers, slices, pinning, graphs, threads, device. The settings that helped are written to a
    file for `unidle train --engine`. The recipe, and so learning, stays unchanged. With --allow-recipe-change, tune
    also tries overlap and doubling n_envs, n_steps, batch_size and n_epochs, and compares return gained per second. A
    trial that crashes, hangs or runs out of memory is recorded and skipped. Ctrl-C stops and keeps the results so far.
    """

    budget: str = "120s"
    """Total time, such as 90s, 5m or 1h; at least 30s, because each comparison starts the job twice."""
    out: Path = Path("engine.yaml")
    """Output file for the engine settings; an existing file is overwritten once a change has been measured."""
    json: bool = False
    """Print the result as a JSON object."""


def tune_command(argv: list[str]) -> dict[str, Any] | None:
    """`unidle tune`"""
    job = job_of(_TuneFlags, argv, "tune")
    budget, out = _seconds(job.flags.budget), job.flags.out
    _check_writable(out)

    from rich.console import Console

    from unidle.report.terminal.tune import TuningDisplay, conclusion
    from unidle.tuning.search.tune import tune

    console = Console(highlight=False, markup=False, stderr=job.flags.json)
    for note in job.notes:
        console.print(note, soft_wrap=True)
    with TuningDisplay(console) as display:
        tuned = tune(job.config, budget, display)
    if tuned.setup is None:
        raise TrainingError("Stopped before anything was measured.")
    command = _train_command(argv, job, tuned)
    machine = Machine(tuned.setup.cores, tuned.setup.gpu)
    if tuned.has_measured:
        out.write_text(engine_yaml(tuned.engine, machine, _comment(job, tuned, command)), encoding="utf-8")
    if job.flags.json:
        return {
            "times_as_fast": tuned.times_as_fast,
            "steps_per_second": {"before": tuned.first_rate, "after": tuned.rate},
            "changes": [outcome.plain() for outcome in tuned.outcomes],
            "engine": tuned.engine,
            "recipe": _recipe_changes(job.config.recipe, tuned.config.recipe),
            "machine": {"cores": machine.cores, "gpu": machine.gpu},
            "seconds": tuned.seconds,
            "ended_by": tuned.ended_by or None,
            "engine_file": str(out) if tuned.has_measured else None,
            "command": command if tuned.has_measured else None,
        }
    console.print()
    for line in conclusion(tuned, str(out), command):
        console.print(line, soft_wrap=True)
    return None


def _seconds(text: str) -> float:
    seconds = seconds_of("--budget", text)
    if seconds < _MIN_BUDGET:
        raise UsageError(
            f"--budget {text} is too short: one comparison starts the job twice and runs at least six segments; "
            f"use at least {_MIN_BUDGET}s."
        )
    return seconds


def _check_writable(out: Path) -> None:
    """UsageError if the file cannot be written: fail before minutes of measuring, not after."""
    existed = out.exists()
    try:
        with out.open("a", encoding="utf-8"):
            pass
    except OSError as error:
        raise UsageError(f"--out {out} cannot be written ({error.strerror}); choose another path.") from None
    if not existed:
        out.unlink()


def _recipe_changes(before: Recipe, after: Recipe) -> dict[str, Any]:
    return {name: value for name, value in vars(after).items() if value != getattr(before, name)}


def _train_command(argv: list[str], job: Job[_TuneFlags], tuned: Tuned) -> str:
    """The command that trains with the result: the user's flags, except those in the engine file."""
    changed = _recipe_changes(job.config.recipe, tuned.config.recipe)
    dropped = {*(f.name for f in dataclasses.fields(Engine)), *_EXCLUDED, *changed}
    words = normalise_flags(replace_renamed_flags(argv)[0])
    kept: list[str] = []
    skipping = False
    for word in words:
        if word.startswith("--"):
            name, equals, _ = word.partition("=")
            plain = name.removeprefix("--").replace("-", "_")
            is_dropped = plain in dropped or name in _SWITCHES
            skipping = is_dropped and not equals and name not in _SWITCHES and plain != "json"
            if is_dropped:
                continue
        elif skipping:
            skipping = False
            continue
        kept.append(word)
    flags = [word for name, value in changed.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    run = dataclasses.replace(tuned.config.run, allow_recipe_change=False)
    if not is_valid(dataclasses.replace(tuned.config, run=run)):  # a preset that reproduces published results
        flags.append("--allow-recipe-change")
    return shlex.join(["unidle", "train", *kept, *flags, "--engine", str(job.flags.out)])


def _comment(job: Job[_TuneFlags], tuned: Tuned, command: str) -> str:
    result = "no change was faster"
    if any(outcome.kept and not outcome.change.is_recipe for outcome in tuned.outcomes):
        result = f"{tuned.times_as_fast:.2f} times as fast (the product of the measured speed-ups)"
    today = datetime.now(UTC).strftime("%Y-%m-%d")
    return (
        f"Found by `unidle tune` on {today} for {job.config.run.env}: {result}."
        f"\nEngine settings only: they affect speed, not learning.\nTrain with: {command}"
    )
