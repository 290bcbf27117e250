"""`unidle sweep`: search for the best settings of a job."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from unidle.cli.durations import seconds_of
from unidle.cli.flags import Result, given_settings, normalise_flags, parse, peek, replace_renamed_flags, wants_help
from unidle.cli.job import JobFlags, job_of, with_env_flag
from unidle.cli.results import WithCode, signalled
from unidle.cli.trust import is_trusted
from unidle.config import Config
from unidle.config.files import display_path
from unidle.errors import UsageError, explain_out_of_memory
from unidle.sweeps.objectives import LABELS, Objective
from unidle.sweeps.plan import Plan, Pruner, Sampler

if TYPE_CHECKING:
    from rich.table import Table

    from unidle.sweeps.sweep import Sweep


@dataclass(frozen=True)
class SweepFlags(JobFlags):
    """Search for the best settings of a job: train trials with settings that Optuna chooses, several at a time.

    Takes all settings of `unidle train`; those given are not searched. A trial is judged by the mean return of its
    last evaluation, or by --objective. The best settings are written to best.yaml, for `unidle train --config`. Ctrl-C
    stops and saves the trials that are running; --resume continues them. Needs the extra `sweep`.
    """

    trials: int = Plan.trials
    """Number of trials."""
    at_once: int = Plan.at_once
    """Trials that train at the same time, in one process."""
    seeds_per_trial: int = Plan.seeds_per_trial
    """Runs per trial, with seeds from --seed on; the trial is judged by their mean."""
    space: Path | None = None
    """YAML file that says which settings to search, and over what, or the name of a space of unidle's
    (ppo-large-batch); see docs/sweep.md. Omitted: as usual for the algorithm."""
    sampler: Sampler = Plan.sampler
    """How settings are chosen: tpe learns from the trials so far."""
    pruner: Pruner = Plan.pruner
    """Which trials are stopped early: median those below the median of the others at the same time, wilcoxon those that
    are worse than the best seed by seed; auto: median, or none if trials cannot be compared early."""
    objective: tuple[Objective, ...] = Plan.objectives
    """What is optimised: return of the last evaluation, return-per-gpu-second, or time-to-target (--target-return).
    Several, with commas, give the trials that no other is better than (Pareto front)."""
    budget: str | None = None
    """Time after which no more trials are started, such as 90m or 2h; those that are running finish."""
    resume: Path | None = None
    """Folder of a sweep to continue; --trials, --at-once and --budget may change."""
    worker: int | None = None
    """With --resume: share the sweep with other processes, each with a number of its own."""
    trust: bool = False
    """With --resume: trust a sweep that you did not create, and import the code named in its config."""
    quiet: bool = False
    """Show no progress, only warnings."""
    json: bool = False
    """Print the result as a JSON object."""


@explain_out_of_memory()
def sweep_command(argv: list[str]) -> Result | WithCode:
    """`unidle sweep`"""
    path = peek(argv, "--resume")
    if path and not wants_help(argv):
        return _resume(argv, Path(path))
    job = job_of(SweepFlags, argv, "sweep")
    if job.flags.worker is not None:
        raise UsageError("--worker shares a sweep that has been started; add --resume and its folder.")

    from unidle.sweeps.sweep import start_sweep

    swept = start_sweep(
        job.config,
        plan_of(job.flags),
        job.flags.space,
        given_settings(with_env_flag(argv)),
        job.notes,
        job.maker,
        seconds=_seconds(job.flags),
        quiet=job.flags.quiet,
        cwd=job.cwd,
    )
    return _close(swept, job.flags)


def plan_of(flags: SweepFlags) -> Plan:
    """The plan of a new sweep."""
    return Plan(
        flags.trials, flags.at_once, flags.seeds_per_trial, flags.sampler, flags.pruner, objectives=flags.objective
    )


def _resume(argv: list[str], path: Path) -> Result | WithCode:
    from unidle.sweeps.folder import SweepFolder

    folder = SweepFolder.open(path)
    config, plan = folder.config, folder.plan
    argv, notes = replace_renamed_flags(argv)
    for note in notes:
        print(note, file=sys.stderr)
    before = SweepFlags(
        config.run,
        config.recipe,
        config.engine,
        trials=plan.trials,
        at_once=plan.at_once,
        seeds_per_trial=plan.seeds_per_trial,
        sampler=plan.sampler,
        pruner=plan.pruner,
        objective=plan.objectives,
        resume=path,
    )
    flags = parse(SweepFlags, normalise_flags(normalise_flags(argv), config.recipe.algo), "sweep", before)
    new, old = Config(flags.recipe, flags.engine, flags.run).flat(), config.flat()
    changed = [name for name, value in new.items() if value != old[name]]
    fixed = ("config", "engine_file", "site", "seeds_per_trial", "space", "sampler", "pruner", "objective")
    changed += [name.removesuffix("_file") for name in fixed if getattr(flags, name) != getattr(before, name)]
    if changed:
        flag = changed[0].replace("_", "-")
        raise UsageError(f"A resumed sweep keeps its settings; remove --{flag}, or start a new sweep.")

    from unidle.sweeps.sweep import resume_sweep

    trust = is_trusted(path, ["env", "wrappers", "network"], flags.trust, config)
    seconds = _seconds(flags)
    swept = resume_sweep(
        path,
        trials=flags.trials,
        at_once=flags.at_once,
        seconds=seconds,
        worker=flags.worker,
        trust=trust,
        quiet=flags.quiet,
    )
    return _close(swept, flags)


def _seconds(flags: SweepFlags) -> float | None:
    return None if flags.budget is None else seconds_of("--budget", flags.budget)


def _close(swept: Sweep, flags: SweepFlags) -> Result | WithCode:
    """Print the best settings, or return them for --json."""
    result = swept.summary() if flags.json else None
    if not flags.json and not flags.quiet:
        from rich.console import Console

        from unidle.report.terminal.summary import print_facts
        from unidle.sweeps.records import value_text

        console, best = Console(highlight=False), swept.best_trial
        facts = {}
        if best is not None and len(best.objectives) > 1:
            console.print()
            console.print(_front_table(swept))
            facts["train"] = f"unidle train --config {display_path(swept.path)}/pareto/trial-….yaml"
        elif best is not None:
            console.print()
            print_facts(console, {name: value_text(value) for name, value in best.settings.items()})
            facts["best"] = f"trial {best.number}, {LABELS[best.objectives[0]]} {best.values_in_words[0]}"
            facts["train"] = f"unidle train --config {display_path(swept.best_file)}"
        if any(not trial.is_over for trial in swept.trials):
            facts["continue"] = f"unidle sweep --resume {display_path(swept.path)}"
        console.print()
        print_facts(console, facts | {"report": display_path(swept.report)})
    return result if swept.stopped_by is None else signalled(result, swept.stopped_by)


def _front_table(swept: Sweep) -> Table:
    """The trials that no other is better than."""
    from rich.table import Table

    from unidle.sweeps.records import settings_text

    front = swept.front
    table = Table(box=None, pad_edge=False, header_style="dim")
    for name in ("trial", *(LABELS[objective] for objective in front[0].objectives)):
        table.add_column(name, justify="right")
    table.add_column("settings")
    for trial in front:
        table.add_row(str(trial.number), *trial.values_in_words, settings_text(trial.settings))
    return table
