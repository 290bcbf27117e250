"""`unidle train`: train a policy, or resume a run."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from unidle.cli.flags import Result, given_settings, normalise_flags, parse, peek, replace_renamed_flags, wants_help
from unidle.cli.job import Job, JobFlags, job_of, with_env_flag
from unidle.cli.ranks import ranks_to_start, require_single_run, start_ranks, with_n_envs_of_job
from unidle.cli.results import WithCode, signalled
from unidle.cli.trust import is_trusted
from unidle.config import Config
from unidle.config.engine_file import read_engine_file
from unidle.config.files import GROUP_FILE, PBT_FILE, display_path, load_yaml, run_config_file
from unidle.config.machine import gpu_name
from unidle.distributed.place import current_place
from unidle.errors import UsageError, explain_out_of_memory
from unidle.groups.folder import nothing_to_resume

if TYPE_CHECKING:
    from unidle.api import TrainedGroup, TrainedRun


@dataclass(frozen=True)
class TrainFlags(JobFlags):
    """Train a policy, or resume a run (--resume).

    The environment may come first: unidle train CartPole-v1. Flags override --engine, which overrides --config, which
    overrides --preset.
    """

    resume: Path | None = None
    """Run or group folder to resume; auto: that of this name, if there is one."""
    trust: bool = False
    """With --resume: trust a run that you did not create, and import the code named in its config."""
    seeds: str | None = None
    """Train several runs at the same time: their number (8), or a list of seeds (1,2,5)."""
    pbt: bool = False
    """With --seeds: population-based training."""
    space: Path | None = None
    """With --pbt: YAML file of the settings to search."""
    gpus: int | None = None
    """Train on this many GPUs of this machine: one process (rank) each, with its share of environments and batches."""
    ranks: int | None = None
    """Like --gpus, but the ranks run on the CPU or share GPUs."""
    n_envs_per_gpu: int | None = None
    """With --gpus, --ranks or torchrun: number of environments of each rank, instead of --n-envs for all together."""
    quiet: bool = False
    """Show no progress, only warnings."""
    json: bool = False
    """Print the result as a JSON object."""


@explain_out_of_memory()
def train_command(argv: list[str]) -> Result | WithCode:
    """`unidle train`"""
    given = argv
    argv = with_n_envs_of_job(argv)
    path = peek(argv, "--resume")
    if path and path != "auto" and not wants_help(argv):
        return _resume(argv)
    job = train_job(argv)
    size = ranks_to_start(job.flags.gpus, job.flags.ranks)
    if size is not None:
        require_single_run("--seeds" if job.flags.seeds else "--pbt" if job.flags.pbt else None)
        return start_ranks(size, given, job.config)

    from unidle.api import start, start_group

    resume: Literal["auto"] | None = "auto" if path else None
    if job.flags.pbt:
        return _train_population(job, argv)
    how: dict[str, Any] = {"quiet": job.flags.quiet, "cwd": job.cwd, "resume": resume, "keep": job.keep}
    if job.flags.seeds is not None:
        return _close_group(start_group(job.config, job.flags.seeds, job.notes, job.maker, **how), job.flags)
    trained = start(job.config, job.notes, job.maker, **how)
    return _close(trained, job.flags)


def train_job(argv: list[str]) -> Job[TrainFlags]:
    """The job that the arguments of `unidle train` start; UsageError if they are invalid."""
    job = job_of(TrainFlags, argv, "train")
    if not job.flags.pbt:
        if job.flags.space is not None:
            raise UsageError("--space is for --pbt, and for `unidle sweep`; add --pbt, or remove it.")
        return job
    if job.flags.seeds is None:
        raise UsageError("--pbt trains a population; add its size, such as --seeds 8.")
    if job.flags.resume is not None:
        raise UsageError("--resume auto cannot continue a population; use --resume and its folder.")
    return job


def _train_population(job: Job[TrainFlags], argv: list[str]) -> Result | WithCode:
    from unidle.sweeps.pbt import start_population

    flags, fixed = job.flags, given_settings(with_env_flag(argv))
    assert flags.seeds is not None  # as `train_job` has checked
    group = start_population(
        job.config, flags.seeds, flags.space, fixed, job.notes, job.maker, quiet=flags.quiet, cwd=job.cwd
    )
    return _close_group(group, flags)


def _resume(given_argv: list[str]) -> Result | WithCode:
    argv, notes = replace_renamed_flags(given_argv)
    argv = normalise_flags(with_env_flag(argv))
    path = Path(peek(argv, "--resume") or "")
    is_group = os.path.isfile(path / GROUP_FILE)  # False if the path is too long
    before = load_yaml(run_config_file(_first_run(path) if is_group else path))
    if peek(argv, "--config") or peek(argv, "--preset"):
        raise UsageError("--resume uses the settings of the run; remove --config and --preset.")
    engine = peek(argv, "--engine")
    given = before
    if engine is not None:
        file = read_engine_file(Path(engine))
        given = before.with_values(file.values, engine)
        if note := file.note(gpu_name):
            notes.append(note)
    for note in notes:
        print(note, file=sys.stderr)
    argv = normalise_flags(argv, given.recipe.algo)
    flags = parse(TrainFlags, argv, "train", TrainFlags(given.run, given.recipe, given.engine, resume=path))
    if flags.site:
        raise UsageError("A resumed run keeps its site; remove --site, or start a new run.")
    old, new = before.flat(), Config(flags.recipe, flags.engine, flags.run).flat()
    changes = {name: value for name, value in new.items() if value != old[name]}
    for name in ("env", "network"):
        if name in changes:  # `resume` takes them only as Python objects
            raise UsageError(f"A resumed run keeps its {name}; remove --{name}, or start a new run.")
    if (size := ranks_to_start(flags.gpus, flags.ranks)) is not None:
        from unidle.engine.checkpoint.trust import require_trust

        require_single_run("A group of runs" if is_group else None)
        # Asked once, here: every rank would, but only rank 0 has a terminal to ask in.
        config, code = Config(flags.recipe, flags.engine, flags.run), ["env", "wrappers", "network"]
        trust = is_trusted(path, code, flags.trust)
        require_trust(path, config, code, trust)
        return start_ranks(size, [*given_argv, *(["--trust"] if trust and not flags.trust else [])], config)

    from unidle.api import resume, resume_group

    if flags.seeds is not None:
        raise UsageError("A group keeps its seeds; remove --seeds, or start a new group.")
    if flags.pbt or flags.space is not None:
        raise UsageError("A population is resumed as it was started; remove --pbt and --space.")
    if is_group and (path / PBT_FILE).is_file():
        from unidle.sweeps.pbt import resume_population

        return _close_group(resume_population(path, trust=flags.trust, quiet=flags.quiet, **changes), flags)
    if is_group:
        return _close_group(resume_group(path, trust=flags.trust, quiet=flags.quiet, **changes), flags)
    trust = is_trusted(path, ["env", "wrappers", "network"], flags.trust)
    return _close(resume(path, trust=trust, quiet=flags.quiet, **changes), flags)


def _first_run(group: Path) -> Path:
    """The first run of a group whose config can be read; all have the same recipe."""
    found = sorted(file.parent for file in group.glob("seed-*/config.yaml"))
    if not found:
        raise UsageError(nothing_to_resume(group))
    for run in found:
        with suppress(UsageError):
            load_yaml(run / "config.yaml")
            return run
    return found[0]


def _close_group(trained: TrainedGroup, flags: TrainFlags) -> Result | WithCode:
    """Print the statistics over the runs, or return them for --json."""
    result = trained.summary() if flags.json else None
    if not flags.json and not flags.quiet:
        from rich.console import Console

        from unidle.groups.display import group_facts
        from unidle.report.terminal.summary import print_facts

        console = Console(highlight=False)
        console.print()
        stopped = {} if trained.stopped_by is None else _how_to_continue(trained.path)
        print_facts(console, group_facts(trained.summary()) | {"report": display_path(trained.report)} | stopped)
    return result if trained.stopped_by is None else signalled(result, trained.stopped_by)


def _how_to_continue(path: Path) -> dict[str, str]:
    return {"continue": f"unidle train --resume {display_path(path)}"}


def _close(trained: TrainedRun, flags: TrainFlags) -> Result | WithCode:
    """Print the summary at the end of training, or return it for --json; only on rank 0."""
    if (place := current_place()) is not None and place.rank:
        return None
    result = trained.summary() if flags.json else None
    if not flags.json and not flags.quiet:
        from rich.console import Console

        from unidle.report.terminal.summary import print_facts, print_summary

        checkpoint = trained.folder.best_or_latest()
        console = Console(highlight=False)
        print_summary(console, trained.path, report=trained.report, checkpoint=checkpoint)
        if trained.stopped_by is not None:
            print_facts(console, _how_to_continue(trained.path))
    return result if trained.stopped_by is None else signalled(result, trained.stopped_by)
