"""The folder of a sweep: what it searches, the journal of its trials, and each trial in a folder of its own."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import IO

import yaml

from unidle.config import Config
from unidle.config.convert import yaml_text
from unidle.config.files import SWEEP_FILE, config_from, display_path, parse_yaml, read_yaml
from unidle.config.settings import Run
from unidle.engine.checkpoint.folder_lock import lock_folder
from unidle.engine.checkpoint.trust import sign
from unidle.errors import UsageError
from unidle.groups.folder import GroupFolder
from unidle.locks import release
from unidle.report.dashboard.files import has_workers, is_training, worker_folder
from unidle.sweeps.objectives import LABELS
from unidle.sweeps.plan import Plan
from unidle.sweeps.records import TrialRecord
from unidle.sweeps.space import Space, read_space, trial_config
from unidle.writing import write_atomically

# What best.yaml leaves to the command line: where the run goes, and how it is watched.
_TASK = ("env", "env_kwargs", "wrappers", "frame_stack", "init_from", "timesteps", "preset", "allow_recipe_change")


class SweepFolder:
    """`runs/<sweep>/`: sweep.yaml, journal.log, best.yaml, report.html, trial-0/, trial-1/, …."""

    def __init__(self, path: Path, plan: Plan, space: Space, config: Config) -> None:
        self.path, self.plan, self.space, self.config = path, plan, space, config
        self.journal, self.best = path / "journal.log", path / "best.yaml"
        self.worker: int | None = None  # of those that share the sweep; None: this process has it for itself
        self._lock: IO[str] | None = None

    def create(self) -> None:
        """Write sweep.yaml into the empty folder, and lock it."""
        self.path.mkdir(parents=True, exist_ok=True)
        self.lock()
        self.save()
        sign(self.path, self.config)

    def save(self) -> None:
        """Write sweep.yaml."""
        tree = {**asdict(self.plan), "space": self.space.plain, "job": yaml.safe_load(self.config.to_yaml())}
        write_atomically(self.path / SWEEP_FILE, yaml_text(tree))

    @staticmethod
    def open(path: Path) -> SweepFolder:
        """The folder of an earlier sweep; UsageError if it is not one."""
        file = path / SWEEP_FILE
        if not os.path.isfile(file):  # False if the path is too long
            raise UsageError(f"{display_path(path)} is not the folder of a sweep: it has no {SWEEP_FILE}.")
        tree, source = read_yaml(file), display_path(file)
        job, space = tree.pop("job", None), tree.pop("space", None)
        if not isinstance(job, dict) or not isinstance(space, dict) or not tree.keys() <= asdict(Plan()).keys():
            raise UsageError(f"{source} is not what a sweep wrote; restore it, or start a new sweep.")
        objectives = tuple(tree.pop("objectives", Plan.objectives))
        plan, config = Plan(**tree, objectives=objectives), config_from(job, source)
        plan.check()
        return SweepFolder(path, plan, read_space(space, config), config)

    def lock(self, worker: int | None = None) -> None:
        """Keep other processes from continuing this sweep; released when this process ends.

        A `worker` shares it with others, each with a number of its own.
        """
        own = self.path if worker is None else worker_folder(self.path, worker)
        try:
            own.mkdir(parents=True, exist_ok=True)
            self._lock = lock_folder(own)
        except OSError as error:
            raise UsageError(
                f"Cannot write to {display_path(self.path)} ({error.strerror}); copy the sweep elsewhere."
            ) from None
        self.worker = worker
        # Only now, so that of two that start at the same time, one at least sees the other.
        if is_training(self.path) if worker is not None else has_workers(self.path):
            self.unlock()
            raise UsageError(
                f"Another process works on {display_path(self.path)}"
                + (" alone; stop it first." if worker is not None else "; wait for it, or join it with --worker.")
            )

    def unlock(self) -> None:
        """Release the lock."""
        if self._lock is not None:
            release(self._lock)

    # -- trials --------------------------------------------------------------------------------------------------------

    def trial(self, number: int) -> Path:
        """The folder of a trial: its run, or, with several seeds, a group of runs."""
        return self.path / f"trial-{number}"

    @property
    def n_evaluations(self) -> int:
        """How many evaluations a trial has."""
        run = self.config.run
        return max(1, run.timesteps // run.evaluation_interval)

    @property
    def seeds(self) -> list[int]:
        """The seeds of every trial."""
        first = self.config.run.seed
        return list(range(first, first + self.plan.seeds_per_trial))

    def runs_of(self, number: int) -> list[Path]:
        """The folders of a trial's runs, one per seed."""
        path = self.trial(number)
        return [path] if len(self.seeds) == 1 else GroupFolder(path, self.seeds).runs

    def create_trial(self, number: int) -> None:
        """Create the folder of a trial, if it is not there."""
        path = self.trial(number)
        path.mkdir(exist_ok=True)
        if len(self.seeds) > 1 and not GroupFolder.is_one(path):
            GroupFolder.create(path, self.seeds)

    def save_trial(self, record: TrialRecord) -> None:
        """Write trial.yaml: how a trial ended."""
        values: dict[str, float] = dict(zip(record.objectives, record.values))
        facts = {"trial": record.number, "state": record.state, **values, "error": record.error}
        known = {name: value for name, value in facts.items() if value is not None}
        record.path.mkdir(exist_ok=True)
        text = yaml_text({**known, "settings": record.settings})
        write_atomically(record.path / "trial.yaml", text)

    def save_best(self, best: TrialRecord) -> None:
        """Write best.yaml, for `unidle train --config`."""
        write_atomically(self.best, self._job_of(best))

    def save_front(self, front: Sequence[TrialRecord]) -> None:
        """Write pareto/trial-3.yaml and so on, for `unidle train --config`: the trials that none is better than."""
        folder = self.path / "pareto"
        folder.mkdir(exist_ok=True)
        files = {self.front_file(record): record for record in front}
        for path in {*folder.glob("trial-*.yaml")} - files.keys():
            path.unlink()
        for path, record in files.items():
            write_atomically(path, self._job_of(record))

    def front_file(self, record: TrialRecord) -> Path:
        """The config file of a trial of the Pareto front."""
        return self.path / "pareto" / f"{record.path.name}.yaml"

    def _job_of(self, trial: TrialRecord) -> str:
        """The content of a config file with the settings of a trial."""
        config = trial_config(self.config, trial.settings)
        tree, default = parse_yaml(config.to_yaml(), "the trial"), Run()
        task = {name: tree["run"][name] for name in _TASK if getattr(config.run, name) != getattr(default, name)}
        text = yaml_text({"recipe": tree["recipe"], "run": task})
        values = [f"{LABELS[name]} {words}" for name, words in zip(trial.objectives, trial.values_in_words)]
        return f"# Trial {trial.number} of {display_path(self.path)}: {', '.join(values)}.\n{text}"
