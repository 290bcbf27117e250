"""`unidle slurm`: submit training, a sweep or a named job to SLURM."""

from __future__ import annotations

import dataclasses
import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from unidle.cli.flags import TABLE_WIDTH, Result, given_settings, parse, peek, wants_help
from unidle.cli.ranks import ranks_to_start, require_single_run, with_n_envs_of_job
from unidle.config.files import GROUP_FILE, display_path
from unidle.config.jobs import NamedJob, job_names, load_job
from unidle.config.presets import load_preset
from unidle.config.settings import OrAuto
from unidle.errors import UsageError
from unidle.slurm.resources import Array, Resources, array_of
from unidle.slurm.script import TASK, Script
from unidle.slurm.submission import SCRIPT, JobRefusedError, refuse_second_job, require_sbatch, submit, write_script

if TYPE_CHECKING:
    from unidle.cli.train import TrainFlags
    from unidle.config import Config
    from unidle.sweeps.folder import SweepFolder


@dataclass(frozen=True)
class _SlurmFlags:
    """Submit training to SLURM: unidle slurm train …, unidle slurm sweep …, or a named job.

    Takes the flags of `unidle train` or `unidle sweep` as well, and checks them before anything is submitted. The job
    saves a checkpoint before its time limit and when it is preempted, is requeued, and continues exactly where it was.
    Without arguments, the named jobs are listed with what each needs.
    """

    job: Annotated[str | None, tyro.conf.Positional] = None
    """train, sweep, or a named job."""
    time: str | None = None
    """Time limit, such as 8:00:00 or 2-12; required, except for named jobs."""
    partition: str | None = None
    """Partition; none: the cluster's default."""
    gres: str | None = None
    """GPU, such as gpu:a100:1."""
    cpus_per_task: OrAuto[int] = None
    """Cores; auto: as the preset recommends."""
    mem: str | None = None
    """Memory, such as 32G; none: the cluster's default."""
    account: str | None = None
    """Account that is charged."""
    qos: str | None = None
    """Quality of service."""
    constraint: str | None = None
    """Features that the node must have."""
    array: str | None = None
    """Job array: seeds=1-10, seeds=1,2,5 or seeds=1-10%3 (three at a time) trains one run per seed, in one group;
    for a sweep, jobs=4 share its trials."""
    signal: int = 120
    """Seconds before the time limit at which the job saves a checkpoint and is requeued."""
    sbatch: str = ""
    """Other options of sbatch, such as '--exclusive --mail-type=END'."""
    dry_run: bool = False
    """Print the script; submit and write nothing."""
    json: bool = False
    """Print the result as a JSON object."""


_SWITCHES = ("--dry-run", "--json")
_OWN = {f"--{field.name.replace('_', '-')}" for field in dataclasses.fields(_SlurmFlags)} - {"--job"}


def slurm_command(argv: list[str]) -> Result:
    """`unidle slurm`"""
    if wants_help(argv):
        parse(_SlurmFlags, ["--help"], "slurm")
    if not [word for word in argv if word != "--json"]:
        return _list_jobs(as_json="--json" in argv)
    own, rest = _split(argv)
    flags = parse(_SlurmFlags, own, "slurm")
    if not rest or rest[0].startswith("-"):
        raise UsageError(f"Say what to run: unidle slurm train …, sweep …, or one of {', '.join(job_names())}.")
    job, *arguments = rest
    if job not in ("train", "sweep", *job_names()):
        raise UsageError(f"There is no job `{job}`; use train, sweep, or one of {', '.join(job_names())}.")
    named = None if job in ("train", "sweep") else load_job(job)
    array = None if flags.array is None else array_of(flags.array)
    if not flags.dry_run:
        require_sbatch()
    limit = _with_defaults(flags, named)
    planned = _sweep(arguments, limit, array) if job == "sweep" else _train(arguments, limit, array, named)
    if flags.dry_run:
        text = planned.script.text()
        if flags.json:
            return {"script": text}
        print(text, end="")
        return None
    return _submit(planned, flags)


def _split(argv: list[str]) -> tuple[list[str], list[str]]:
    """The flags of `unidle slurm` in `argv`, and the rest."""
    own, rest = [], []
    words = iter(argv)
    for word in words:
        flag, equals, _ = word.partition("=")
        flag = flag.replace("_", "-")
        if flag not in _OWN:
            rest.append(word)
            continue
        own.append(word)
        if not equals and flag not in _SWITCHES and (value := next(words, None)) is not None:
            own[-1] = f"{word}={value}"
    return own, rest


def _with_defaults(flags: _SlurmFlags, named: NamedJob | None) -> _SlurmFlags:
    """The flags, with what a named job asks for where the user does not say; UsageError without a time limit."""
    defaults: dict[str, Any] = dict(named.slurm) if named is not None else {}
    flags = dataclasses.replace(flags, **{name: defaults[name] for name in defaults if getattr(flags, name) is None})
    if flags.time is None:
        raise UsageError("A SLURM job needs a time limit; add --time, such as --time 8:00:00.")
    return flags


# -- what to submit ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Planned:
    """A checked job; nothing is written yet."""

    script: Script
    is_new: bool  # whether nothing was in its folder before
    seeds: tuple[int, ...] = ()  # of an array, one task each
    sweep: SweepFolder | None = None


def _train(arguments: list[str], flags: _SlurmFlags, array: Array | None, named: NamedJob | None) -> _Planned:
    from unidle.cli.train import train_job
    from unidle.groups.folder import seeds_from

    if array is not None and array.kind != "seeds":
        raise UsageError("--array jobs is for a sweep; a training job takes --array seeds=1-10.")
    if named is not None and peek(arguments, "--preset") is not None:
        raise UsageError(f"The job {named.name} has its preset; remove --preset, or use unidle slurm train.")
    words = [*arguments, *(named.flags if named is not None else ())]
    _refuse_folder(words)
    job = train_job(_on_any_machine(with_n_envs_of_job(words)))
    _check_ranks(job.flags, job.config)
    seeds: tuple[int, ...] = ()
    if array is not None:
        if job.flags.seeds is not None or peek(words, "--seed") is not None:
            raise UsageError("--array gives each task its seed; remove --seed and --seeds.")
        seeds = seeds_from(array.ids, job.config)
    last = "population" if job.flags.pbt else "seeds" if seeds or job.flags.seeds is not None else None
    folder, is_new = _folder(job.config, job.cwd, last, GROUP_FILE if last else None, flags, job.flags.resume)
    if seeds and not is_new:
        _require_same_seeds(folder, seeds)
    command = ["train", *_without(words, "--run-name", "--resume", *(["--runs-dir"] if seeds else []))]
    if seeds:
        group = str(Path(job.config.run.runs_dir) / folder.name)
        command += ["--runs-dir", group, "--run-name", f"seed-{TASK}", "--seed", TASK]
    else:
        command += ["--run-name", folder.name]
    if not job.flags.pbt:  # of which the supervisor resumes the folder
        command += ["--resume", "auto"]
    resources = _resources(flags, job.config)
    script = Script(
        folder.name,
        folder,
        f"seed-{TASK}" if seeds else ".",
        command,
        resources,
        job.cwd,
        None if array is None else array.given,
    )
    return _Planned(script, is_new, seeds)


def _check_ranks(flags: TrainFlags, config: Config) -> None:
    """UsageError if the job cannot be trained by as many ranks as it asks for."""
    from unidle.distributed.share import not_pinned, share_of

    # Its GPUs are those of the node where the job runs, not of this machine.
    is_valid = flags.gpus is not None and flags.gpus >= 1 and flags.ranks is None
    size = flags.gpus if is_valid else ranks_to_start(flags.gpus, flags.ranks)
    if size is None or size == 1:
        return
    require_single_run("--seeds" if flags.seeds else "--pbt" if flags.pbt else None)
    share_of(config.recipe, size)
    not_pinned(config.engine)


def _sweep(arguments: list[str], flags: _SlurmFlags, array: Array | None) -> _Planned:
    from unidle.api import maker_for
    from unidle.cli.job import job_of, with_env_flag
    from unidle.cli.sweep import SweepFlags, plan_of
    from unidle.sweeps.folder import SweepFolder
    from unidle.sweeps.sweep import checked_sweep

    if array is not None and array.kind != "jobs":
        raise UsageError("--array seeds is for training; the jobs of a sweep are --array jobs=4.")
    _refuse_folder(arguments)
    job = job_of(SweepFlags, _on_any_machine(arguments), "sweep")
    fixed, maker = given_settings(with_env_flag(arguments)), maker_for(job.maker, job.config)
    config, plan, space = checked_sweep(job.config, plan_of(job.flags), job.flags.space, fixed, maker, job.cwd)
    folder, is_new = _folder(config, job.cwd, "sweep", None, flags, None)
    config = config.with_run(run_name=folder.name)
    if (device := peek(arguments, "--device")) is not None:
        config = config.with_values({"device": device}, "--device")
    command = ["sweep", "--resume", str(folder)]
    command += [] if array is None else ["--worker", TASK]
    command += [] if job.flags.budget is None else ["--budget", job.flags.budget]
    resources = _resources(flags, config)
    script = Script(folder.name, folder, ".", command, resources, job.cwd, None if array is None else array.given)
    return _Planned(script, is_new, sweep=SweepFolder(folder, plan, space, config))


def _on_any_machine(words: list[str]) -> list[str]:
    """The arguments, without a GPU that the machine which submits the job need not have."""
    device = peek(words, "--device")
    return _without(words, "--device") if device and re.fullmatch(r"cuda(:\d+)?", device) else words


def _refuse_folder(words: list[str]) -> None:
    """UsageError for `--resume FOLDER`."""
    path = peek(words, "--resume")
    if path not in (None, "auto"):
        raise UsageError(
            f"To continue a job, submit its script again (sbatch {path}/{SCRIPT}), or repeat its command with --resume "
            "auto."
        )


def _folder(
    config: Config, cwd: Path, last: str | None, file: str | None, flags: _SlurmFlags, resume: Path | None
) -> tuple[Path, bool]:
    """The folder of the job, and whether it is new; with --dry-run, none is created."""
    from unidle.engine.checkpoint.run_name import existing_path, new_path, planned_path

    if resume is not None:
        before = existing_path(config, cwd, last, file or "config.yaml")
        if before is not None:
            return before, False
    path = (planned_path if flags.dry_run else new_path)(config, cwd, last)
    if resume is None:
        refuse_second_job(path)
    return path, not path.is_dir() or not any(path.iterdir())


def _require_same_seeds(folder: Path, seeds: Sequence[int]) -> None:
    from unidle.groups.folder import GroupFolder

    before = GroupFolder.open(folder).seeds
    if {*before} != {*seeds}:
        had = ",".join(map(str, before))
        raise UsageError(
            f"The group {display_path(folder)} has other seeds ({had}); give these, or another --run-name."
        )


def _without(words: Sequence[str], *flags: str) -> list[str]:
    """`words` without these flags and their values."""
    kept = []
    rest = iter(words)
    for word in rest:
        flag, equals, _ = word.partition("=")
        if flag.replace("_", "-") not in flags:
            kept.append(word)
        elif not equals:
            next(rest, None)
    return kept


def _resources(flags: _SlurmFlags, config: Config) -> Resources:
    assert flags.time is not None  # see `_with_defaults`
    cores = flags.cpus_per_task
    if cores is None:
        cores = load_preset(config.run.preset or "classic").cores
    asked = (flags.partition, flags.gres, flags.mem, flags.account, flags.qos, flags.constraint)
    resources = Resources(flags.time, cores, flags.signal, *asked, more=flags.sbatch)
    resources.check()
    return resources


# -- submitting --------------------------------------------------------------------------------------------------------


def _create_folder(planned: _Planned) -> Path:
    """Create the folder of a job; returns the path of its script."""
    from unidle.groups.folder import GroupFolder

    script = planned.script
    script.folder.mkdir(parents=True, exist_ok=True)
    if planned.seeds and planned.is_new:
        for run in GroupFolder.create(script.folder, planned.seeds).runs:
            run.mkdir()  # for the output
    if planned.sweep is not None:
        planned.sweep.create()
        planned.sweep.unlock()
    return write_script(script)


def _remove_folder(planned: _Planned) -> None:
    """Remove the folder of a job that was not submitted, unless there was something in it before."""
    if planned.is_new:
        shutil.rmtree(planned.script.folder, ignore_errors=True)


def _submit(planned: _Planned, flags: _SlurmFlags) -> Result:
    script = planned.script
    try:
        path = _create_folder(planned)
    except BaseException:
        _remove_folder(planned)
        raise
    try:
        job = submit(path, script.cwd)
    except JobRefusedError:  # after anything else, such as Ctrl-C, SLURM may have accepted the job
        _remove_folder(planned)
        raise
    result = {
        "job": job,
        "folder": display_path(script.folder),
        "script": display_path(path),
        "output": display_path(script.output_of(job)),
    }
    if flags.json:
        return result
    from rich.console import Console

    from unidle.report.terminal.summary import print_facts

    resources = script.resources
    asked = f"{resources.cpus_per_task} cores, {resources.time}"
    asked += "" if script.array is None else f", tasks {script.array}"
    print_facts(Console(highlight=False), {**result, "job": f"{job}, {asked}", "cancel": f"scancel {job}"})
    return None


# -- named jobs --------------------------------------------------------------------------------------------------------


def _list_jobs(*, as_json: bool) -> Result:
    rows: list[dict[str, Any]] = []
    for name in job_names():
        job = load_job(name)
        preset = job.preset
        rows.append(
            {
                "job": name,
                "description": job.description,
                "preset": preset.name,
                "n_envs": preset.recipe.n_envs,
                "cores": preset.cores,
                **job.slurm,
            }
        )
    if as_json:
        return {"jobs": rows}
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 2, 0, 0))
    columns = {"job": "job", "preset": "preset", "environments": "n_envs", "cores": "cores", "GPU": "gres"}
    columns |= {"memory": "mem", "time limit": "time", "trains": "description"}
    for column in columns:
        table.add_column(column, no_wrap=column != "trains")
    for row in rows:
        table.add_row(*(str(row[key]) for key in columns.values()))
    Console(highlight=False, width=max(Console().width, TABLE_WIDTH)).print(table)
    print("\nSubmit one: unidle slurm mt10-2m --partition gpu. Any other job: unidle slurm train --help.")
    return None
