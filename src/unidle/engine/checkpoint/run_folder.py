"""The run folder and its checkpoints: written atomically, loaded without unpickling code."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import IO, Any

from unidle.config import Config
from unidle.config.convert import yaml_text
from unidle.config.files import display_path, load_yaml, read_yaml, refuse_second_run, run_config_file
from unidle.config.resolve import edited_settings
from unidle.engine.checkpoint.changes import recorded_settings
from unidle.engine.checkpoint.checkpoint_file import (
    DamagedCheckpointError,
    first_intact,
    load_checkpoint,
    save_checkpoint,
)
from unidle.engine.checkpoint.folder_lock import lock_folder
from unidle.engine.checkpoint.provenance import SECTION, with_entry
from unidle.engine.checkpoint.trust import sign
from unidle.errors import UsageError
from unidle.locks import release
from unidle.writing import refuse_link, write_atomically

_NAME = re.compile(r"step-(\d+)\.pt")


class RunFolder:
    """`runs/<name>/`: config.yaml, metrics.jsonl, changes.jsonl, tensorboard/, checkpoints/, report.html, …."""

    is_kept = True  # whether the run writes files: see `NoFolder`
    has_checkpoints = True
    ranks = 1  # that write checkpoints here: see `RankFolder`

    def __init__(self, path: Path) -> None:
        self.path = path
        self.checkpoints = path / "checkpoints"
        self.best = self.checkpoints / "best.pt"
        self.provenance: dict[str, Any] | None = None  # of this process, until `save_config` has written it
        self._lock: IO[str] | None = None

    @staticmethod
    def create(path: Path, config: Config, provenance: dict[str, Any] | None = None) -> RunFolder:
        """A new folder for `config`; UsageError if there is already a run there."""
        refuse_second_run(path)
        folder = RunFolder(path)
        try:
            folder.checkpoints.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise _cannot_create(path, error) from None
        folder.lock()
        folder.provenance = provenance
        folder.save_config(config)
        sign(path, folder.config())
        return folder

    @staticmethod
    def reserve(runs_dir: Path, name: str) -> Path:
        """Create the folder `name`, `name-2`, …, the first that no other process has created."""
        for number in count(1):
            path = runs_dir / (name if number == 1 else f"{name}-{number}")
            try:
                path.mkdir(parents=True)
            except FileExistsError:
                continue
            except OSError as error:
                raise _cannot_create(path, error) from None
            return path
        raise AssertionError

    @staticmethod
    def open(path: Path) -> RunFolder:
        """The folder of an earlier run; UsageError if it is not one."""
        run_config_file(path)
        return RunFolder(path)

    def config(self) -> Config:
        """The settings this run was started with."""
        return load_yaml(self.path / "config.yaml")

    def save_config(self, config: Config, step: int = 0) -> None:
        """Write config.yaml: the settings, and what the run was made with; it starts, or resumes, at `step`."""
        path = self.path / "config.yaml"
        entries = read_yaml(path).get(SECTION) if path.is_file() else None
        if self.provenance is not None:
            entries = with_entry(entries, {"step": step, **self.provenance})
            self.provenance = None
        section = yaml_text({SECTION: entries}) if entries else ""
        write_atomically(path, config.to_yaml() + section)

    def lock(self) -> None:
        """Keep other processes from training in this folder; released when this process ends, however it ends."""
        refuse_link(self.checkpoints)
        try:
            self.checkpoints.mkdir(exist_ok=True)
            self._lock = lock_folder(self.path)
        except OSError as error:
            shown = display_path(self.path)
            raise UsageError(f"Cannot write to {shown} ({error.strerror}); copy the run elsewhere.") from None
        for incomplete in (*self.checkpoints.glob("*.tmp"), *self.path.glob("*.[0-9]*.tmp")):
            with suppress(OSError):  # a file that cannot be removed is reported by the write that it blocks
                incomplete.unlink()  # left by a process that was killed; no other process writes here now

    def unlock(self) -> None:
        """Release the lock."""
        if self._lock is not None:
            release(self._lock)

    def saved(self) -> list[Path]:
        """Numbered checkpoints, oldest first."""
        return sorted(path for path in self.checkpoints.glob("step-*.pt") if _NAME.fullmatch(path.name))

    def save(self, state: dict[str, Any], step: int, keep: int) -> Path:
        """Write a checkpoint; once it is complete on the disk, drop all but the latest `keep`.

        With several ranks, a checkpoint is complete when each has written its part.
        """
        path = self.checkpoints / f"step-{step:012d}.pt"
        save_checkpoint(path, state)
        saved = self.saved()
        complete = [each for each in saved if all(part_of(each, rank).exists() for rank in range(1, self.ranks))]
        for old in saved:
            if complete and old < complete[-keep:][0]:
                for file in (old, *self.checkpoints.glob(part_of(old, "*").name)):
                    file.unlink(missing_ok=True)
        return path

    def save_best(self, state: dict[str, Any]) -> None:
        """Write the checkpoint to evaluate and predict with."""
        save_checkpoint(self.best, state)

    def latest(self) -> Path | None:
        """The newest numbered checkpoint."""
        saved = self.saved()
        return saved[-1] if saved else None

    def load_latest(self, say: Callable[[str], None]) -> dict[str, Any] | None:
        """The state in the newest intact checkpoint; None if none was saved.

        Damaged ones are renamed, with a message: they must not count as kept. UsageError if all are damaged, or if
        settings in config.yaml that affect learning were edited since.
        """
        newest_first, where = self.saved()[::-1], display_path(self.checkpoints)
        if not newest_first:
            return None
        try:
            state, damaged = first_intact(newest_first, load_checkpoint)
        except DamagedCheckpointError:
            raise UsageError(
                f"All checkpoints in {where} are damaged; restore one from a backup, or start a new run."
            ) from None
        self.refuse_edits(state)
        for each in damaged:
            each.replace(each.with_name(f"{each.name}.damaged"))
        if damaged:
            names, used = " and ".join(each.name for each in damaged), newest_first[len(damaged)].name
            say(f"{names} in {where}: damaged, renamed to *.damaged; using {used}.")
        return state

    def refuse_edits(self, state: dict[str, Any]) -> None:
        """UsageError if config.yaml differs from the settings that a checkpoint was trained with."""
        path = self.path / "config.yaml"
        changes = recorded_settings(self.path, state["step"])
        edited = edited_settings(state["settings"], self.config(), changes)
        if edited:
            raise UsageError(
                f"{display_path(path)} was edited, but a resumed run keeps its recipe: {edited}; undo that, or start a "
                "new run."
            )

    def policies(self) -> list[Path]:
        """The checkpoints to evaluate or predict with, in order of preference: the best, then the latest ones."""
        found = [self.best] if self.best.exists() else []
        found += reversed(self.saved())
        if not found:
            shown = display_path(self.path)
            raise UsageError(f"{shown} has no checkpoint yet; train it with: unidle train --resume {shown}")
        return found

    def best_or_latest(self) -> Path:
        """The checkpoint to evaluate or predict with: the best if an evaluation chose one, else the latest."""
        return self.policies()[0]


def part_of(checkpoint: Path, rank: int | str) -> Path:
    """The file beside `checkpoint`, which rank 0 writes, with the state of another rank."""
    return checkpoint.with_name(f"{checkpoint.stem}.rank-{rank}.pt")


def _cannot_create(path: Path, error: OSError) -> UsageError:
    shown = display_path(path)
    return UsageError(f"Cannot create the run folder {shown} ({error.strerror}); choose another --runs-dir.")


def without_replay_buffer(state: dict[str, Any]) -> dict[str, Any]:
    """A checkpoint without the replay buffer, which may be most of its size."""
    algo = state["algo"]
    if "experience" not in algo:
        return state
    experience = {name: value for name, value in algo["experience"].items() if name != "memory"}
    return {**state, "algo": {**algo, "experience": experience}}
