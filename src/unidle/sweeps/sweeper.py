"""Runs the trials of a sweep in one process: when one ends or is pruned, the next takes its place at once."""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean

from unidle.config import Config
from unidle.engine.callbacks import CallbackContext
from unidle.engine.placement import choose_device
from unidle.engine.trainer import Trainer
from unidle.errors import TrainingError, UsageError
from unidle.groups.scheduler import Member
from unidle.groups.training import NewRun, SharedProcess
from unidle.report.history import number, read_history
from unidle.sweeps.display import SweepDisplay
from unidle.sweeps.folder import SweepFolder
from unidle.sweeps.objectives import measure, return_per_second
from unidle.sweeps.records import TrialRecord
from unidle.sweeps.space import trial_config
from unidle.sweeps.study import AskedTrial, Study
from unidle.sweeps.turn_clock import TurnClock

_MAX_FAILURES = 5  # before the first trial that does not fail, or as many as run at once


@dataclass(eq=False)
class _TrialTraining:
    """A trial that trains: one run per seed."""

    asked: AskedTrial
    config: Config
    runs: list[Path]
    n_begun: int = 0  # runs that have started
    clocks: dict[Path, TurnClock] = field(default_factory=dict)
    trainers: list[Trainer] = field(default_factory=list)
    n_open: int = 0  # runs that have not ended
    values: dict[int, dict[Path, float]] = field(default_factory=dict)  # number of the evaluation → run → value
    is_pruned: bool = False
    error: str | None = None

    def stop(self) -> None:
        """End all runs after their current iterations."""
        for trainer in self.trainers:
            trainer.stop()

    @property
    def is_interrupted(self) -> bool:
        """Whether Ctrl-C stopped one of the runs early."""
        return any(trainer.stopped_by is not None for trainer in self.trainers)


class Sweeper:
    """Fills the slots with trials, and tells Optuna how they went."""

    def __init__(
        self,
        folder: SweepFolder,
        study: Study,
        display: SweepDisplay,
        on_trial_end: Callable[[TrialRecord], None],
        seconds: float | None = None,
    ) -> None:
        """After `seconds`, no more trials are started."""
        self._folder, self._study, self._display = folder, study, display
        self._on_trial_end = on_trial_end
        self._interrupted = study.running()
        self._n_failed = 0
        self._has_succeeded = any(record.state in ("finished", "pruned") for record in study.records())
        self._trials: dict[Member, _TrialTraining] = {}
        self._by_run: dict[Path, _TrialTraining] = {}
        self._until = math.inf if seconds is None else time.monotonic() + seconds
        self._interval = folder.config.run.evaluation_interval
        self._counts_gpu_seconds = "return-per-gpu-second" in folder.plan.objectives

    _process: SharedProcess

    def run(self, new_run: NewRun) -> int | None:
        """Run trials until all are over or the time is up; returns the signal that stopped it early."""
        plan = self._folder.plan
        device = choose_device(self._folder.config.engine.device)
        runs_at_once = plan.at_once * (1 if plan.seeds_in_turn else plan.seeds_per_trial)
        with SharedProcess.among(runs_at_once, device, new_run) as self._process:
            try:
                members = [member for _ in range(plan.at_once) for member in self._start_next()]
            except BaseException:
                for member in self._trials:
                    member.close()
                raise
            workers = sum(trainer.workers for trial in set(self._trials.values()) for trainer in trial.trainers)
            self._process.take_turns(members, workers, self._successors)
            return self._process.interrupts.received

    def evaluated(self, context: CallbackContext) -> None:
        """A run was evaluated: once all runs of its trial were, the trial may be pruned."""
        trial, value = self._by_run[context.folder], number(context.record, "eval/return_mean")
        if self._counts_gpu_seconds:
            trial.asked.record_gpu_seconds({path.name: clock.seconds for path, clock in trial.clocks.items()})
        plan, evaluation = self._folder.plan, context.record["step"] // self._interval
        if value is None or trial.is_pruned or not plan.may_prune or plan.seeds_in_turn:
            return
        if self._counts_gpu_seconds:
            value = return_per_second(value, trial.clocks[context.folder].seconds)
        values = trial.values.setdefault(evaluation, {})
        values[context.folder] = value
        if len(values) < len(trial.runs):
            return
        should_prune = trial.asked.should_prune(evaluation, fmean(values.values()))
        if should_prune and evaluation < self._folder.n_evaluations:
            trial.is_pruned = True
            trial.stop()

    # -- starting ------------------------------------------------------------------------------------------------------

    def _start_next(self) -> list[Member]:
        """Start a trial, first those that an earlier process left; none if no more are to start."""
        while self._may_start():
            asked = self._interrupted.pop(0) if self._interrupted else self._study.ask()
            if asked is None:
                break
            try:
                return self._start(asked)
            except Exception as error:
                self._end(self._study.fail(asked, _reason(error)))
        return []

    def _may_start(self) -> bool:
        return self._process.interrupts.received is None and time.monotonic() < self._until

    def _start(self, asked: AskedTrial) -> list[Member]:
        folder, runs = self._folder, self._folder.runs_of(asked.number)
        config = trial_config(folder.config, asked.settings)
        settings = {each.setting: getattr(config.recipe, each.setting) for each in folder.space.dimensions}
        asked.record_settings(settings)
        folder.create_trial(asked.number)
        self._display.trial_started(asked.number, settings, len(runs))
        return self._train(_TrialTraining(asked, config, runs), 1 if folder.plan.seeds_in_turn else len(runs))

    def _train(self, trial: _TrialTraining, n_runs: int) -> list[Member]:
        """Start the next runs of a trial."""
        folder, config, first = self._folder, trial.config, trial.n_begun
        runs = trial.runs[first : first + n_runs]
        trainers: list[Trainer] = []
        members: list[Member] = []
        try:
            for seed, path in zip(folder.seeds[first:], runs):
                parent = Path(config.run.runs_dir) / path.parent.relative_to(folder.path.parent)
                run = config.with_run(seed=seed, run_name=path.name, runs_dir=str(parent))
                trainer, member = self._process.new_member(run, path, self._display.of(trial.asked.number, path.name))
                trainers.append(trainer)
                members.append(member)
                if self._counts_gpu_seconds:
                    before = trial.asked.gpu_seconds.get(path.name, 0.0)
                    trial.clocks[path] = clock = TurnClock(member.stream, before)
                    member.turns = clock.timed(member.turns)
        except BaseException:
            for trainer in trainers:
                trainer.close()
            raise
        trial.trainers += trainers
        trial.n_begun, trial.n_open = first + len(runs), len(members)
        self._trials.update(dict.fromkeys(members, trial))
        self._by_run.update(dict.fromkeys(runs, trial))
        return members

    # -- ending --------------------------------------------------------------------------------------------------------

    def _successors(self, member: Member) -> Iterable[Member]:
        """The runs that take the place of a trial whose last run has ended."""
        trial = self._trials.pop(member)
        trial.n_open -= 1
        if member.error is not None and trial.error is None:
            trial.error = _reason(member.error)
            member.error = None  # its traceback holds the networks
            trial.stop()  # the other runs count for nothing
        if trial.n_open:
            return ()
        is_partial = trial.n_begun < len(trial.runs)
        is_interrupted = trial.is_interrupted or (is_partial and self._process.interrupts.received is not None)
        for path in trial.runs[: trial.n_begun]:
            self._by_run.pop(path, None)
        trial.trainers.clear()
        gc.collect()  # networks and CUDA graphs, before those of the next trial are built
        if is_partial and trial.error is None and not is_interrupted and (members := self._next_seed(trial)):
            return members
        record = self._result(trial, is_interrupted)
        if record is not None:
            self._end(record)
        return self._start_next()

    def _next_seed(self, trial: _TrialTraining) -> list[Member]:
        """The next run of a trial that trains its seeds in turn; none if it is pruned, or if its run fails."""
        mean_return = measure("return", [read_history(trial.runs[trial.n_begun - 1])], (), None)
        if mean_return is not None and trial.asked.should_prune(trial.n_begun, mean_return):
            trial.is_pruned = True
            return []
        try:
            return self._train(trial, 1)
        except Exception as error:
            trial.error = _reason(error)
            return []

    def _result(self, trial: _TrialTraining, is_interrupted: bool) -> TrialRecord | None:
        """Tell Optuna how a trial went; None if Ctrl-C stopped it, so that it can be resumed."""
        if trial.error is not None:
            return self._study.fail(trial.asked, trial.error)
        if trial.is_pruned:
            return self._study.prune(trial.asked)
        if is_interrupted:
            return None
        runs, seconds = [read_history(path) for path in trial.runs], [clock.seconds for clock in trial.clocks.values()]
        target = self._folder.config.run.target_return
        found = [measure(objective, runs, seconds, target) for objective in self._folder.plan.objectives]
        values = [value for value in found if value is not None]
        if len(values) < len(found):
            return self._study.fail(trial.asked, "A run has no evaluation.")
        return self._study.finish(trial.asked, values)

    def _end(self, record: TrialRecord) -> None:
        self._on_trial_end(record)
        if record.state != "failed":
            self._has_succeeded = True
            return
        self._n_failed += 1
        if not self._has_succeeded and self._n_failed >= max(_MAX_FAILURES, self._folder.plan.at_once):
            raise TrainingError(f"The first {self._n_failed} trials failed, the last because: {record.error}")


def _reason(error: Exception) -> str:
    known = isinstance(error, (UsageError, TrainingError))
    return str(error) if known else f"{type(error).__name__}: {error}"
