"""`unidle.sweep` and `unidle.resume_sweep`: search for the best settings of a job."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import gymnasium

from unidle.api import Build, maker_for, maker_of, resolve_job
from unidle.config import Config
from unidle.config.files import display_path
from unidle.config.machine import limit_threads
from unidle.config.resolve import shown_notes
from unidle.distributed.place import require_one_rank
from unidle.engine.build import resolve_network
from unidle.engine.callbacks import Callbacks
from unidle.engine.checkpoint.run_name import new_path
from unidle.engine.checkpoint.trust import require_trust
from unidle.envs.make import EnvFactory, EnvMaker
from unidle.envs.probe import probe
from unidle.envs.vector.host_envs import vector_size
from unidle.errors import UsageError
from unidle.groups.folder import GroupFolder
from unidle.groups.page import write_group_page
from unidle.nn.actor_critic import NetworkFactory
from unidle.output import guarded_output
from unidle.report.page.report import write_report
from unidle.sweeps.display import SweepDisplay
from unidle.sweeps.folder import SweepFolder
from unidle.sweeps.objectives import LABELS, Objective
from unidle.sweeps.page import write_sweep_page
from unidle.sweeps.plan import Plan, Pruner, Sampler
from unidle.sweeps.records import TrialRecord, best_of, front_of
from unidle.sweeps.space import Space, is_own, read_space

if TYPE_CHECKING:
    from unidle.sweeps.study import Study  # imports Optuna, which is an extra


class Sweep:
    """A sweep folder: trials of different settings, and the best of them."""

    stopped_by: int | None = None  # the signal that stopped the sweep early

    def __init__(self, path: Path, trials: Sequence[TrialRecord]) -> None:
        self.path, self.trials = path, list(trials)

    @property
    def best_trial(self) -> TrialRecord | None:
        """The finished trial that is the best by the first objective; None if none has finished."""
        return best_of(self.trials)

    @property
    def front(self) -> list[TrialRecord]:
        """The finished trials that no other is better than in all objectives: with one objective, the best."""
        return front_of(self.trials)

    @property
    def best(self) -> dict[str, Any] | None:
        """The settings of the best trial."""
        return None if self.best_trial is None else self.best_trial.settings

    @property
    def best_file(self) -> Path:
        """The config file of the best trial, for `unidle train --config`."""
        return self.path / "best.yaml"

    @property
    def report(self) -> Path:
        """Path of the HTML page about all trials."""
        return self.path / "report.html"

    def summary(self) -> dict[str, Any]:
        """The result as plain values."""
        states = [trial.state for trial in self.trials]
        best = self.best_trial
        return {
            "sweep": display_path(self.path),
            **{state: states.count(state) for state in ("finished", "pruned", "failed", "running")},
            "best_trial": best and best.number,
            "best_values": best and dict(zip(best.objectives, best.values)),
            "best": self.best,
            "config": display_path(self.best_file) if best else None,
            "front": [
                {"trial": trial.number, **dict(zip(trial.objectives, trial.values)), "settings": trial.settings}
                for trial in self.front
            ],
        }


def sweep(
    env: str | EnvFactory | gymnasium.Env,
    *,
    trials: int = Plan.trials,
    at_once: int = Plan.at_once,
    seeds_per_trial: int = Plan.seeds_per_trial,
    space: str | Path | Mapping[str, Any] | None = None,
    sampler: Sampler = Plan.sampler,
    pruner: Pruner = Plan.pruner,
    objective: Objective | Sequence[Objective] = Plan.objectives,
    seconds: float | None = None,
    preset: str | None = None,
    config: str | Path | None = None,
    engine: str | Path | None = None,
    network: str | NetworkFactory | None = None,
    quiet: bool = False,
    **settings: Any,
) -> Sweep:
    """Search for the best settings: train trials with settings that Optuna chooses, `at_once` at a time.

    `space` is a YAML file or a mapping from settings to ranges or choices; by default those usual for the algorithm,
    without the `settings` given here. With several objectives, `Sweep.front` are the trials that no other is better
    than. After `seconds`, no more trials are started. The other arguments are those of `train`.
    """
    objectives = (objective,) if isinstance(objective, str) else tuple(objective)
    plan = Plan(trials, at_once, seeds_per_trial, sampler, pruner, objectives)
    job = resolve_job(env, preset, config, engine, network, settings)
    given = Path(space) if isinstance(space, str) else space
    fixed = [name for name, value in settings.items() if not (isinstance(value, str) and value == "auto")]
    return start_sweep(
        job.config, plan, given, fixed, job.notes, job.maker, job.network, seconds=seconds, quiet=quiet, cwd=job.cwd
    )


def start_sweep(
    config: Config,
    plan: Plan,
    space: Path | Mapping[str, Any] | None = None,
    fixed: Collection[str] = (),
    notes: Sequence[str] = (),
    maker: EnvMaker | None = None,
    network: NetworkFactory | None = None,
    *,
    seconds: float | None = None,
    quiet: bool = False,
    cwd: Path | None = None,
) -> Sweep:
    """Start a sweep of a validated config in a new folder; a default space leaves out the settings `fixed`."""
    cwd = cwd or Path.cwd()
    maker = maker_for(maker or maker_of(config), config)
    config, plan, searched = checked_sweep(config, plan, space, fixed, maker, cwd)
    network = network or resolve_network(config.recipe.network)[0]
    folder = SweepFolder(new_path(config, cwd, "sweep"), plan, searched, config)
    folder.create()
    return _train(folder, maker, network, notes, seconds, quiet, cwd)


def checked_sweep(
    config: Config,
    plan: Plan,
    space: Path | Mapping[str, Any] | None,
    fixed: Collection[str],
    maker: EnvMaker,
    cwd: Path,
) -> tuple[Config, Plan, Space]:
    """The settings, the plan and the space of a new sweep; UsageError if it cannot be started."""
    require_one_rank("A sweep")
    _require_optuna()
    plan.check()
    plan = plan.settled()
    if "time-to-target" in plan.objectives and config.run.target_return is None:
        raise UsageError("The objective time-to-target needs a target; add --target-return.")
    if config.run.evaluation_interval == 0:
        raise UsageError("A sweep judges trials by their evaluations, but `eval_every` is 0; remove it.")
    if config.run.init_from is not None:
        config = config.with_run(init_from=str(cwd / config.run.init_from))
    if vector_size(maker) is not None and is_own(space):
        fixed = [*fixed, "n_envs"]
    searched = read_space(space, config, fixed)
    if vector_size(maker) is not None and "n_envs" in searched.plain:
        raise UsageError(f"`n_envs` cannot be searched: {maker.name} decides it; remove it from the space.")
    probe(maker, config.recipe.discretize)  # an environment that cannot be created fails here, not in every trial
    return config, plan, searched


def resume_sweep(
    path: str | Path,
    *,
    trials: int | None = None,
    at_once: int | None = None,
    seconds: float | None = None,
    worker: int | None = None,
    trust: bool = False,
    quiet: bool = False,
) -> Sweep:
    """Continue a sweep: finished trials are kept, and those that were running resume from their checkpoints.

    `trials` and `at_once` change the plan. Several processes, also on several machines, may share the sweep, each as
    another `worker`, a number. `trust`: import the code named in a sweep that you did not create.
    """
    require_one_rank("A sweep")
    _require_optuna()
    cwd = Path.cwd()
    folder = SweepFolder.open(cwd / path)
    plan = folder.plan
    folder.plan = dataclasses.replace(
        plan,
        trials=plan.trials if trials is None else trials,
        at_once=plan.at_once if at_once is None else at_once,
    )
    folder.plan.check()
    require_trust(folder.path, folder.config, ["env", "wrappers", "network"], trust)
    if worker is not None and folder.plan != plan:
        raise UsageError("A worker does not change a sweep; remove --trials and --at-once.")
    folder.lock(worker)
    if folder.plan != plan:
        folder.save()
    maker = maker_for(maker_of(folder.config), folder.config)
    return _train(folder, maker, resolve_network(folder.config.recipe.network)[0], (), seconds, quiet, cwd)


def _require_optuna() -> None:
    if find_spec("optuna") is None:
        raise UsageError("A sweep needs the package optuna; run: pip install 'unidle[sweep]'.")


@guarded_output()
def _train(
    folder: SweepFolder,
    maker: EnvMaker,
    network: NetworkFactory | None,
    notes: Sequence[str],
    seconds: float | None,
    quiet: bool,
    cwd: Path,
) -> Sweep:
    """Run the trials of a locked folder, and unlock it."""
    from unidle.sweeps.study import Study
    from unidle.sweeps.sweeper import Sweeper

    limit_threads()
    try:
        study = Study(folder)
        records = study.records()
        with SweepDisplay(folder.plan.trials, records, quiet=quiet) as display:
            for note in shown_notes(notes, quiet):
                display.on_message(note)
            display.show_facts(_facts(folder))
            for record in records:
                if record.is_over and not (record.path / "trial.yaml").exists():
                    _close_trial(folder, record)  # that the process was killed before it could
            _save_results(folder, study)

            def on_trial_end(record: TrialRecord) -> None:
                _close_trial(folder, record)
                _save_results(folder, study)
                display.trial_ended(record)

            sweeper = Sweeper(folder, study, display, on_trial_end, seconds)
            callbacks = Callbacks(after_evaluation=(sweeper.evaluated,))
            build = Build(maker, network, callbacks, (), quiet, cwd)
            stopped_by = sweeper.run(build.new_run)
            _save_results(folder, study)
        swept = Sweep(folder.path, study.records())
    finally:
        folder.unlock()
    is_complete = sum(trial.is_over for trial in swept.trials) >= folder.plan.trials
    swept.stopped_by = None if is_complete else stopped_by
    return swept


def _facts(folder: SweepFolder) -> dict[str, str]:
    plan, run = folder.plan, folder.config.run
    seeds = f", {plan.seeds_per_trial} seeds each" if plan.seeds_per_trial > 1 else ""
    return {
        "sweep": display_path(folder.path),
        "task": f"{run.env}, {folder.config.recipe.algo.upper()}, {run.timesteps:,} steps per run",
        "trials": f"{plan.trials}, {plan.at_once} at a time{seeds}; sampler {plan.sampler}, pruner {plan.pruner}",
        "objective": " and ".join(LABELS[objective] for objective in plan.objectives),
        "searched": ", ".join(folder.space.plain),
    }


def _close_trial(folder: SweepFolder, record: TrialRecord) -> None:
    """Write what its folder says of a trial that has ended, and the reports of its runs."""
    folder.save_trial(record)
    runs = [path for path in folder.runs_of(record.number) if (path / "config.yaml").is_file()]
    with suppress(OSError):  # the runs themselves are saved
        for path in runs:
            write_report(path)
        if GroupFolder.is_one(record.path):
            write_group_page(record.path, runs)


def _save_results(folder: SweepFolder, study: Study) -> None:
    """Write best.yaml and the page of the sweep."""
    with study.exclusive():  # so that no older results replace newer ones of another worker
        records = study.records()
        if (best := best_of(records)) is not None:
            folder.save_best(best)
            if len(folder.plan.objectives) > 1:
                folder.save_front(front_of(records))
    n_shown = -1
    # The page takes too long for the lock, so it is written again if trials of other workers have ended meanwhile.
    while (n_over := sum(record.is_over for record in records)) != n_shown:
        with suppress(OSError):  # the trials themselves are saved
            write_sweep_page(folder, records, study.importances())
        n_shown, records = n_over, study.records()
