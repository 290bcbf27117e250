"""The runs of a group as their folders show them; a run that cannot be read does not hide the others."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from unidle.errors import UsageError
from unidle.report.dashboard.files import is_training
from unidle.report.dashboard.view import DONE, TRAINING, state_of
from unidle.report.history import History, Record, number, read_history

RUNNING, FINISHED, STOPPED, FAILED, UNREADABLE, MISSING, WAITING = (
    "running",
    "finished",
    "stopped",
    "failed",
    "unreadable",
    "missing",
    "not started",
)
_STATES = {TRAINING: RUNNING, DONE: FINISHED}


@dataclass(frozen=True)
class GroupRun:
    """A run of a group."""

    folder: Path
    state: str
    history: History | None  # None if it is missing or unreadable
    problem: str = ""  # why it failed, or why there is no history

    @property
    def name(self) -> str:
        """The name of its folder, such as seed-1."""
        return self.folder.name

    @property
    def final_return(self) -> float | None:
        """Mean return of the latest evaluation."""
        return _mean_return(self.history.final_evaluation) if self.history else None

    @property
    def best_return(self) -> float | None:
        """Mean return of the best evaluation."""
        return _mean_return(self.history.best_evaluation) if self.history else None

    @property
    def training_return(self) -> float | None:
        """Mean return of the latest 100 training episodes."""
        return self.history.training_return if self.history else None


def read_runs(folders: Sequence[Path], failures: Mapping[str, str] | None = None) -> list[GroupRun]:
    """Read the runs in `folders`, in the same order; `failures`: why runs failed, by the names of their folders."""
    return [_read_run(folder, (failures or {}).get(folder.name)) for folder in folders]


def _read_run(folder: Path, failure: str | None) -> GroupRun:
    if not folder.is_dir():
        return GroupRun(folder, FAILED if failure else MISSING, None, failure or "There is no such folder.")
    if not failure and not os.path.lexists(folder / "config.yaml"):
        return GroupRun(folder, WAITING, None, "It has not started yet.")
    is_live = is_training(folder.resolve())  # before the files, so that a finished run is read to its end
    try:
        history = read_history(folder)
    except (UsageError, OSError) as error:
        return GroupRun(folder, FAILED if failure else UNREADABLE, None, failure or str(error))
    if failure:
        return GroupRun(folder, FAILED, history, failure)
    return GroupRun(folder, _STATES.get(state_of(history, is_live), STOPPED), history)


def _mean_return(evaluation: Record | None) -> float | None:
    return None if evaluation is None else number(evaluation, "eval/return_mean")
