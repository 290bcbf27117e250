"""The Optuna study of a sweep, in a journal file that optuna-dashboard can read too."""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import optuna
from optuna.exceptions import ExperimentalWarning
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend, JournalFileOpenLock
from optuna.trial import FrozenTrial, TrialState

from unidle.config.files import SWEEP_FILE
from unidle.sweeps.folder import SweepFolder
from unidle.sweeps.objectives import is_minimised
from unidle.sweeps.plan import Pruner, Sampler
from unidle.sweeps.records import State, TrialRecord
from unidle.sweeps.space import Space

_STATES: dict[TrialState, State] = {
    TrialState.COMPLETE: "finished",
    TrialState.PRUNED: "pruned",
    TrialState.FAIL: "failed",
    TrialState.RUNNING: "running",
}
_START_UP_TRIALS = 10  # at random, before TPE has learned enough
_IMPORTANCE_FROM = 8  # finished trials with different results
# User attributes in the journal.
_SETTINGS, _ERROR, _GPU_SECONDS, _WORKER = "settings", "error", "gpu_seconds", "worker"


class Study:
    """Asks Optuna for trials, and tells it their results."""

    def __init__(self, folder: SweepFolder) -> None:
        """Create the study, or continue the one in the folder, which must be locked."""
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self._folder, self._space = folder, folder.space
        journal, sweep = str(folder.journal), str(folder.path / SWEEP_FILE)
        if folder.worker is None:  # a killed process may have left them; of a worker's, Optuna removes old ones itself
            for locked in (journal, sweep):
                Path(f"{locked}.lock").unlink(missing_ok=True)
        # Waiting processes remove a lock file that is 30 seconds old, as of a killed process. Every holder creates a
        # new one, so short holds never add up; of a symlink, Optuna would look at the age of the file behind it.
        self._sweep_lock, journal_lock = JournalFileOpenLock(sweep), JournalFileOpenLock(journal)
        with _held(journal_lock):
            _remove_half_line(folder.journal)
        storage = JournalStorage(JournalFileBackend(journal, journal_lock))
        names = [study.study_name for study in storage.get_all_studies()]
        self._study = optuna.create_study(
            study_name=names[0] if names else folder.path.name,  # a folder may be renamed
            storage=storage,
            directions=["minimize" if is_minimised(each) else "maximize" for each in folder.plan.objectives],
            load_if_exists=True,
            pruner=_pruner(folder.plan.pruner, folder.n_evaluations),
        )
        # Not the seed alone: a resumed sweep would draw the same settings again.
        entropy = [folder.config.run.seed, len(self._study.trials)]
        if folder.worker is not None:  # several start before there is a trial
            entropy.append(folder.worker)
        seed = np.random.SeedSequence(entropy).generate_state(1)
        self._study.sampler = _sampler(folder.plan.sampler, int(seed[0]))

    def exclusive(self) -> contextlib.AbstractContextManager[None]:
        """In the block, which must take seconds at most, no other process asks for a trial, nor writes best.yaml."""
        return _held(self._sweep_lock)

    def ask(self) -> AskedTrial | None:
        """A new trial, with its settings; None if there are as many as planned."""
        with self.exclusive():
            if len(self._study.get_trials(deepcopy=False)) >= self._folder.plan.trials:
                return None
            trial = self._study.ask()
            if self._folder.worker is not None:
                trial.set_user_attr(_WORKER, self._folder.worker)
        return AskedTrial(trial, self._space)

    def running(self) -> list[AskedTrial]:
        """The trials that were running when the sweep was stopped; for a worker, its own and unassigned ones."""
        worker = self._folder.worker
        with self.exclusive():
            found = self._study.get_trials(deepcopy=False, states=(TrialState.RUNNING, TrialState.WAITING))
            own = [each for each in found if worker is None or each.user_attrs.get(_WORKER, worker) == worker]
            trials = [optuna.trial.Trial(self._study, each._trial_id) for each in own]
            if worker is not None:
                for trial in trials:
                    trial.set_user_attr(_WORKER, worker)
        return [AskedTrial(trial, self._space) for trial in trials]

    def finish(self, trial: AskedTrial, values: Sequence[float]) -> TrialRecord:
        """The trial is complete, with a value for each objective."""
        return self._record(self._study.tell(trial.asked, list(values)))

    def prune(self, trial: AskedTrial) -> TrialRecord:
        """The trial was pruned."""
        return self._record(self._study.tell(trial.asked, state=TrialState.PRUNED))

    def fail(self, trial: AskedTrial, error: str) -> TrialRecord:
        """The trial failed."""
        trial.asked.set_user_attr(_ERROR, error)
        return self._record(self._study.tell(trial.asked, state=TrialState.FAIL))

    def records(self) -> list[TrialRecord]:
        """All trials so far, in the order of their numbers."""
        return [self._record(trial) for trial in self._study.get_trials(deepcopy=False)]

    def importances(self) -> dict[str, float]:
        """The importance of each parameter, in parts of 1; empty while there are too few trials."""
        values = {record.values for record in self.records() if record.state == "finished"}
        if len(values) < _IMPORTANCE_FROM:
            return {}
        evaluator = optuna.importance.PedAnovaImportanceEvaluator()
        return optuna.importance.get_param_importances(self._study, evaluator=evaluator)

    def _record(self, trial: FrozenTrial) -> TrialRecord:
        state = _STATES.get(trial.state, "running")
        values = tuple(trial.values or ())
        is_known = state != "failed" and all(map(math.isfinite, values))
        return TrialRecord(
            trial.number,
            state,
            values if is_known else (),
            trial.user_attrs.get(_SETTINGS, {}),
            self._folder.trial(trial.number),
            trial.duration.total_seconds() if trial.duration else None,
            dict(trial.intermediate_values),
            dict(trial.params),
            trial.user_attrs.get(_ERROR),
            self._folder.plan.objectives,
        )


class AskedTrial:
    """A trial that runs."""

    def __init__(self, asked: optuna.Trial, space: Space) -> None:
        self.asked, self.number = asked, asked.number
        self.settings = space.suggest(asked)

    def record_settings(self, settings: dict[str, Any]) -> None:
        """Note the settings in the journal, as they are used."""
        plain = {name: list(value) if isinstance(value, tuple) else value for name, value in settings.items()}
        self.asked.set_user_attr(_SETTINGS, plain)

    def should_prune(self, index: int, value: float) -> bool:
        """Report the value at an evaluation, or of a seed; returns whether to stop the trial."""
        if index not in self._saved.intermediate_values:
            self.asked.report(value, index)
        return self.asked.should_prune()

    @property
    def gpu_seconds(self) -> dict[str, float]:
        """The GPU seconds of each run, by its name, up to the latest evaluation."""
        return dict(self._saved.user_attrs.get(_GPU_SECONDS, {}))

    def record_gpu_seconds(self, seconds: dict[str, float]) -> None:
        """Note the GPU seconds of the runs in the journal."""
        self.asked.set_user_attr(_GPU_SECONDS, seconds)

    @property
    def _saved(self) -> FrozenTrial:
        return self.asked.storage.get_trial(self.asked._trial_id)


def _sampler(name: Sampler, seed: int) -> optuna.samplers.BaseSampler:
    if name == "random":
        return optuna.samplers.RandomSampler(seed=seed)
    return optuna.samplers.TPESampler(n_startup_trials=_START_UP_TRIALS, seed=seed)


def _pruner(name: Pruner, n_evaluations: int) -> optuna.pruners.BasePruner:
    match name:
        case "median":
            return optuna.pruners.MedianPruner(n_warmup_steps=n_evaluations // 3)
        case "wilcoxon":
            with warnings.catch_warnings(category=ExperimentalWarning, action="ignore"):
                return optuna.pruners.WilcoxonPruner()
        case "hyperband":
            return optuna.pruners.HyperbandPruner(min_resource=1, max_resource=n_evaluations)
        case _:
            return optuna.pruners.NopPruner()


@contextlib.contextmanager
def _held(lock: JournalFileOpenLock) -> Iterator[None]:
    """Hold a lock that also works between machines."""
    lock.acquire()
    try:
        yield
    finally:
        lock.release()


def _remove_half_line(journal: Path) -> None:
    """Remove what a killed process may have left at the end of the journal."""
    if journal.is_file():
        with journal.open("rb+") as file:
            content = file.read()
            file.truncate(content.rfind(b"\n") + 1)
