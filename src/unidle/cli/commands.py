"""The commands: parse, call the library, and say what came out, or return it if it is to be JSON."""

from __future__ import annotations

import dataclasses
import os
import sys
import traceback
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from unidle.cli.dashboard import dashboard_command as dashboard_command
from unidle.cli.diagnose import diagnose_command as diagnose_command
from unidle.cli.flags import parse, peek, settle, wants_help
from unidle.cli.job import JobFlags, job_of
from unidle.cli.scaling import scaling_command as scaling_command
from unidle.cli.tune import tune_command as tune_command
from unidle.config import Config
from unidle.config.engine_file import read_engine_file
from unidle.config.files import load_yaml, run_config_file
from unidle.config.machine import available_cores, available_memory, gpu_name
from unidle.config.presets import load_preset, preset_names
from unidle.errors import UsageError, explain_out_of_memory

if TYPE_CHECKING:
    from unidle.api import TrainedRun

Result = dict[str, Any] | None  # the object that --json prints; None: it was said in words


@dataclass(frozen=True)
class _TrainFlags(JobFlags):
    """Train a policy. Flags override --engine, which overrides --config, which overrides --preset."""

    resume: Path | None = None
    """Run folder to go on with, exactly where its latest checkpoint stands."""
    quiet: bool = False
    """Show no progress, only what you should know."""
    json: bool = False
    """Print the result as one JSON object."""


@explain_out_of_memory()
def train_command(argv: list[str]) -> Result:
    """`unidle train`"""
    if peek(argv, "--resume") and not wants_help(argv):
        return _resume(settle(argv))
    job = job_of(_TrainFlags, argv, "train")

    from unidle.api import start

    return _close(start(job.config, job.notes, job.maker, quiet=job.flags.quiet), job.flags)


def _resume(argv: list[str]) -> Result:
    path = Path(peek(argv, "--resume") or "")
    before = load_yaml(run_config_file(path))
    if peek(argv, "--config") or peek(argv, "--preset"):
        raise UsageError("--resume goes on with the run's own settings; leave out --config and --preset.")
    engine = peek(argv, "--engine")
    given = before
    if engine is not None:
        file = read_engine_file(Path(engine))
        given = before.with_values(file.values, engine)
        if note := file.note(gpu_name):
            print(note, file=sys.stderr)
    argv = settle(argv, given.recipe.algo)
    flags = parse(_TrainFlags, argv, "train", _TrainFlags(given.recipe, given.engine, given.run, resume=path))
    if flags.site:
        raise UsageError("A resumed run keeps its site; leave out --site, or start a new run.")
    old, new = before.flat(), Config(flags.recipe, flags.engine, flags.run).flat()
    changes = {name: value for name, value in new.items() if value != old[name]}
    for name in ("env", "network"):
        if name in changes:  # `resume` takes these for Python objects that the config cannot name
            raise UsageError(f"A resumed run keeps its {name}; leave out --{name}, or start a new run.")

    from unidle.api import resume

    return _close(resume(path, quiet=flags.quiet, **changes), flags)


def _close(trained: TrainedRun, flags: _TrainFlags) -> Result:
    """The short report at the end of training."""
    if flags.json:
        return trained.summary()
    if not flags.quiet:
        from rich.console import Console

        from unidle.report.terminal.summary import print_summary

        checkpoint = trained.folder.for_use()
        print_summary(Console(highlight=False), trained.path, report=trained.report, checkpoint=checkpoint)
    return None


@dataclass(frozen=True)
class _EvalFlags:
    """Play episodes with the best policy of a run, in new environments."""

    run: Annotated[Path, tyro.conf.Positional]
    """Run folder, as runs/my-run."""
    episodes: int = 20
    """Episodes to play."""
    seed: int | None = None
    """Seed of the episodes; none: one that training never used."""
    stochastic: bool = False
    """Sample actions instead of taking the most likely ones."""
    video: bool = False
    """Film the first episode, by its most likely actions, as video.mp4 in the run folder (extra `video`)."""
    json: bool = False
    """Print the result as one JSON object."""


def eval_command(argv: list[str]) -> Result:
    """`unidle eval`"""
    flags = parse(_EvalFlags, argv, "eval")

    from unidle.api import load

    run = load(flags.run)
    result = run.evaluate(flags.episodes, seed=flags.seed, deterministic=not flags.stochastic)
    if result.trace is not None:
        _keep_story(flags.run, run.agent.step, result.trace)
    film = None
    if flags.video:
        from unidle.engine.evaluate.play import FIRST_EVALUATION_ENV
        from unidle.envs.pool.slot import episode_seed
        from unidle.report.video import film_episode

        seed = run.config.run.seed + 1 if flags.seed is None else flags.seed  # as `evaluate` takes it
        first = episode_seed(seed, FIRST_EVALUATION_ENV, 0)
        film = film_episode(run.agent, run.maker(), flags.run / "video.mp4", first)
    if flags.json:
        return {
            "run": str(flags.run),
            "step": run.agent.step,
            "episodes": result.episodes,
            "mean_return": result.mean_return,
            "std_return": result.std_return,
            "mean_length": result.mean_length,
            "success": result.success,
            "returns": result.returns,
            "video": str(film) if film else None,
        }
    print(f"{result.episodes} episodes with the policy of step {run.agent.step:,}")
    print(f"mean return {result.mean_return:.1f} ± {result.std_return:.1f}, mean length {result.mean_length:.0f}")
    if result.success is not None:
        print(f"success     {result.success:.0%} of the episodes")
    if film:
        print(f"film        {film}")
    return None


def _keep_story(folder: Path, step: int, story: dict[str, Any]) -> None:
    """Let the report draw what the first episode did; an evaluation is as good without, so it never fails by this."""
    from unidle.engine.evaluate.episode_trace import write_trace
    from unidle.report.dashboard.files import is_training
    from unidle.report.page.report import write_report

    if is_training(folder.resolve()):
        return  # the report is that process's: it tells of evaluations of its own
    try:
        write_trace(folder, step, story)
        write_report(folder)  # which draws it
    except OSError as error:
        said = f"The report in {folder} stays as it was ({error.strerror}); make the folder writable."
        print(f"unidle: {said}", file=sys.stderr)


_TABLE_WIDTH = 120  # what the table of presets needs, and the monitor's in a pipe


@dataclass(frozen=True)
class _PresetsFlags:
    """List the presets, what each needs, and which of them suit this machine."""

    json: bool = False
    """Print the result as one JSON object."""


def presets_command(argv: list[str]) -> Result:
    """`unidle presets`"""
    flags = parse(_PresetsFlags, argv, "presets")
    cores, memory = available_cores(), available_memory()
    rows = []
    for name in preset_names():
        preset = load_preset(name)
        recipe = preset.apply(Config()).recipe
        rows.append(
            {
                "preset": name,
                "n_envs": recipe.n_envs,
                "n_steps": recipe.n_steps,
                "total_batch": recipe.total_batch,
                "batch_size": recipe.batch_size,
                "n_epochs": vars(recipe).get("n_epochs"),
                "network": list(recipe.net_arch),
                "cores": preset.cores,
                "memory_gb": round(preset.memory() / 2**30, 1),
                "fits": preset.fits(cores, memory),
                "instead": preset.smaller(cores, memory),
                "measured": preset.measured,
                "description": preset.description,
            }
        )
    if flags.json:
        return {"cores": cores, "memory_gb": round(memory / 2**30, 1), "presets": rows}
    from rich.console import Console

    from unidle.report.terminal.presets import print_presets

    # In a pipe, rich takes 80 columns for granted and would cut off the one that tells what fits.
    console = Console()
    print_presets(Console(width=max(console.width, _TABLE_WIDTH)), rows, cores, memory)
    return None


@dataclass(frozen=True)
class _CheckFlags:
    """Check an environment for the mistakes that make training fail or learn nothing."""

    env: Annotated[str, tyro.conf.Positional]
    """Gymnasium id, or module:callable that returns an environment."""
    env_kwargs: dict[str, Any] = field(default_factory=dict)
    """Arguments of the environment, as YAML: '{continuous: true}'."""
    json: bool = False
    """Print the result as one JSON object."""


def check_env_command(argv: list[str]) -> Result:
    """`unidle check-env`"""
    flags = parse(_CheckFlags, argv, "check-env")

    from unidle.envs.check_env import check_env
    from unidle.envs.make import env_maker

    found = check_env(env_maker(flags.env, flags.env_kwargs).on_host())
    if flags.json:
        return dataclasses.asdict(found)
    print(f"{flags.env} is sound: {found.steps} steps, {found.episodes} episodes checked.")
    for name, value in found.facts.items():
        print(f"  {name:<12} {value}")
    for remark in found.remarks:
        print(f"  note: {remark}")
    return None


@dataclass(frozen=True)
class _ExportFlags:
    """Write the best policy of a run, its normalisers included, in a form that needs no unidle."""

    run: Annotated[Path, tyro.conf.Positional]
    """Run folder, as runs/my-run."""
    onnx: bool = False
    """Write policy.onnx into the run folder (extra `onnx`)."""
    json: bool = False
    """Print the result as one JSON object."""


def export_command(argv: list[str]) -> Result:
    """`unidle export`"""
    flags = parse(_ExportFlags, argv, "export")
    if not flags.onnx:
        raise UsageError("Say which form to write: --onnx.")

    from unidle.api import load
    from unidle.engine.export import export_onnx

    agent, path = load(flags.run).agent, flags.run / "policy.onnx"
    try:
        export_onnx(agent, path)
    except OSError as error:
        raise UsageError(f"{path} cannot be written ({error.strerror}); make the folder writable.") from None
    if flags.json:
        return {"path": str(path)}
    print(path)
    return None


@dataclass(frozen=True)
class _ReportFlags:
    """Write report.html of a run from its metrics, also while it is still training."""

    run: Annotated[Path, tyro.conf.Positional]
    """Run folder, as runs/my-run."""
    html: Path | None = None
    """Write the run's page of the dashboard instead, as one file (extra `dashboard`): to this path, which ends in
    .html, or without one to dashboard.html in the run folder."""
    json: bool = False
    """Print the result as one JSON object."""


_IN_THE_RUN = "--html=."  # what a bare --html means


def report_command(argv: list[str]) -> Result:
    """`unidle report`"""
    following = [*argv[1:], ""]
    bare = [word == "--html" and not after.endswith(".html") for word, after in zip(argv, following)]
    flags = parse(_ReportFlags, [_IN_THE_RUN if is_bare else word for word, is_bare in zip(argv, bare)], "report")
    try:
        if flags.html is None:
            from unidle.report.page.report import write_report

            path = write_report(flags.run)
        else:
            from unidle.report.dashboard.page import write_page

            path = write_page(flags.run, flags.run / "dashboard.html" if flags.html == Path() else flags.html)
    except OSError as error:
        where, hope = flags.html or flags.run, "name another file" if flags.html else "make the folder writable"
        raise UsageError(f"The page cannot be written to {where} ({error.strerror}); {hope}.") from None
    if flags.json:
        return {"path": str(path)}
    print(path)
    return None


@dataclass(frozen=True)
class _MonitorFlags:
    """Show what GPUs and CPU do right now, until Ctrl-C.

    Each reading comes with its least, mean and largest value over the last ten seconds, a sparkline that loses no
    burst, and how often it is really renewed; a value that was only asked for again does not count. A reading that a
    GPU does not have is a –. Without an NVIDIA GPU you see the CPU side. Needs the extra `meter`.
    """

    interval: float = 0.1
    """Seconds between two looks. NVIDIA's readings are renewed ten times a second at most."""
    csv: Path | None = None
    """Write each new value to this file too: time, source, reading, value, unit."""
    pid: int | None = None
    """Show also what this process and all that it started use together."""
    once: bool = False
    """Look for one second, print one table and exit."""
    json: bool = False
    """Look for one second and print the result as one JSON object."""


def monitor_command(argv: list[str]) -> Result:
    """`unidle monitor`"""
    flags = parse(_MonitorFlags, argv, "monitor")
    if not 0.01 <= flags.interval <= 60:
        raise UsageError(f"--interval {flags.interval:g} is not between 0.01 and 60 seconds; 0.1 suits most GPUs.")

    from rich.console import Console

    from unidle.report.terminal.monitor import ONCE_S, WINDOW_S, Monitor, look_once, watch

    is_once = flags.once or flags.json
    monitor = Monitor(flags.pid, flags.csv, ONCE_S if is_once else WINDOW_S)
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=_TABLE_WIDTH)
    try:
        if not is_once:
            watch(monitor, console, flags.interval)
            return None
        look_once(monitor, flags.interval)
        if flags.json:
            return monitor.result()
        console.print(monitor.panel(console.width))
    except KeyboardInterrupt:
        pass  # there is nothing to save
    finally:
        monitor.close()
    return None


@dataclass(frozen=True)
class _WatchFlags:
    """Run a command as it is, and say at its end what its GPU waited for: unidle watch -- python train.py

    Works for any Python training program, whatever its library; nothing in it needs to change. Its output, its input,
    signals and its exit status pass through; the report goes to standard error. Without a GPU it says what the main
    process spent its time on. Needs the extra `meter`.
    """

    out: Path | None = None
    """Write the report to this folder too: watch.json and watch.txt."""
    windows: bool = False
    """Switch on torch's profiler now and then, to know when kernels ran; not if the program captures CUDA graphs."""


def watch_command(argv: list[str]) -> Result:
    """`unidle watch`; ends with the exit status of the command, or by the signal that ended it."""
    place = argv.index("--") if "--" in argv else len(argv)
    command = argv[place + 1 :]
    if not command and not {"-h", "--help"} & set(argv):
        raise UsageError("Say what to watch, after two dashes: unidle watch -- python train.py.")
    flags = parse(_WatchFlags, argv[:place], "watch")

    from unidle.meter.watch.command import end_as, watch
    from unidle.report.terminal.watch import concluded, lines, write

    if flags.out:  # now, and not when hours of training are over
        _make_folder(flags.out)
    watched = watch(command, windows=flags.windows)
    try:  # whatever becomes of the report, the command's exit status is its own
        found = concluded(watched)
        try:
            print("", *lines(watched, *found), sep="\n", file=sys.stderr, flush=True)
        finally:
            if flags.out:
                write(flags.out, watched, *found)
    except OSError as error:
        print(f"unidle: The report could not be written: {error.strerror}.", file=sys.stderr, flush=True)
    except Exception:
        traceback.print_exc()
    finally:
        end_as(watched.status)


def _make_folder(path: Path) -> None:
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"--out {path} cannot be made: {error.strerror}; name another folder.") from None
    if not os.access(path, os.W_OK):
        raise UsageError(f"--out {path} may not be written to; name another folder.")
