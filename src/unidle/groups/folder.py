"""The folder of a group: group.yaml, a page about all runs, and each run in a folder of its own."""

from __future__ import annotations

import contextlib
import operator
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from unidle.config import Config
from unidle.config.convert import in_brief, yaml_text
from unidle.config.files import GROUP_FILE, PBT_FILE, display_path, read_yaml
from unidle.config.validate import check_seed
from unidle.errors import UsageError
from unidle.writing import write_atomically

_MAX_RUNS = 1024


class GroupFolder:
    """`runs/<group>/`: group.yaml, report.html, seed-1/, seed-2/, …."""

    def __init__(self, path: Path, seeds: Sequence[int], failures: Mapping[str, str] | None = None) -> None:
        """`failures`: run → why it failed when the group was last trained."""
        self.path, self.seeds, self.failures = path, tuple(seeds), dict(failures or {})
        self.runs = [path / f"seed-{seed}" for seed in seeds]

    @staticmethod
    def create(path: Path, seeds: Sequence[int]) -> GroupFolder:
        """A new group in the empty folder `path`."""
        folder = GroupFolder(path, seeds)
        folder.save({})
        return folder

    def save(self, failures: Mapping[str, str]) -> None:
        """Write group.yaml, with what has failed."""
        self.failures = dict(failures)
        content = {"seeds": list(self.seeds)} | ({"failures": self.failures} if failures else {})
        write_atomically(self.path / GROUP_FILE, yaml_text(content))

    @property
    def has_checkpoint(self) -> bool:
        """Whether one of the runs has a checkpoint."""
        return any(self.path.glob("*/checkpoints/*.pt"))

    def discard(self) -> None:
        """Remove a group of which no run has a checkpoint, so that its name is free again."""
        if self.has_checkpoint:
            return
        for run in self.runs:
            with contextlib.suppress(OSError):  # what else is there stays
                for name in ("config.yaml", ".lock"):
                    (run / name).unlink(missing_ok=True)
                (run / "checkpoints").rmdir()
                run.rmdir()
        with contextlib.suppress(OSError):
            (self.path / PBT_FILE).unlink(missing_ok=True)
            (self.path / GROUP_FILE).unlink()
            self.path.rmdir()
            self.path.parent.rmdir()  # if there is nothing else in it

    @staticmethod
    def is_one(path: Path) -> bool:
        """Whether `path` is the folder of a group."""
        return os.path.isfile(path / GROUP_FILE)  # False if the path is too long

    @staticmethod
    def open(path: Path) -> GroupFolder:
        """The folder of an earlier group; UsageError if it is not one."""
        if not GroupFolder.is_one(path):
            raise UsageError(f"{display_path(path)} is not the folder of a group: it has no {GROUP_FILE}.")
        content = read_yaml(path / GROUP_FILE)
        seeds, failures = content.get("seeds"), content.get("failures")
        if not isinstance(seeds, list) or not seeds or not all(type(seed) is int and seed >= 0 for seed in seeds):
            raise UsageError(f"{display_path(path / GROUP_FILE)} lists no seeds; restore it, or start a new group.")
        known = failures.items() if isinstance(failures, dict) else ()
        return GroupFolder(path, seeds, {str(name): str(reason) for name, reason in known})


def nothing_to_resume(group: Path) -> str:
    """The message about a group that was stopped so early that none of its runs has a config."""
    return f"{display_path(group)} was stopped before it had saved a run; remove the folder, and start the group again."


def seeds_from(given: int | str | Iterable[int], config: Config) -> tuple[int, ...]:
    """The seeds that `--seeds` asks for: so many from the config's seed on (8), or a list (1,2,5)."""
    if isinstance(given, str):
        try:
            numbers = [int(part) for part in given.split(",")]
        except ValueError:
            raise UsageError(f"--seeds is {given!r}; use a number of runs (8) or a list of seeds (1,2,5).") from None
        given = numbers[0] if "," not in given else numbers
    if not isinstance(given, Iterable):
        given = _whole(given)
        if not 1 <= given <= _MAX_RUNS:
            raise UsageError(f"`seeds` is {given}; train 1 to {_MAX_RUNS:,} runs at a time.")
        given = range(config.run.seed, config.run.seed + given)
    seeds = tuple(map(_whole, given))
    for seed in seeds:
        check_seed(seed)
    twice = [seed for seed in seeds if seeds.count(seed) > 1]
    if twice:
        raise UsageError(f"`seeds` lists {twice[0]} twice; each run needs a seed of its own.")
    if not 1 <= len(seeds) <= _MAX_RUNS:
        raise UsageError(f"`seeds` lists {len(seeds):,} seeds; train 1 to {_MAX_RUNS:,} runs at a time.")
    return seeds


def _whole(value: Any) -> int:
    """A whole number, also NumPy's."""
    try:
        if not isinstance(value, bool):
            return operator.index(value)
    except TypeError:
        pass
    raise UsageError(f"`seeds` is {in_brief(value)}; use a number of runs (8) or a list of seeds ([1, 2, 5]).")
