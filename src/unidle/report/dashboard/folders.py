"""What a folder of runs contains: runs, groups and sweeps with their members, and packs of jobs."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from unidle.config.files import GROUP_FILE, SWEEP_FILE
from unidle.errors import UsageError
from unidle.packing.folder import SUMMARY
from unidle.report.dashboard.files import has_regular

RUN, GROUP, SWEEP, PACK = "run", "group", "sweep", "pack"
_FILES = {RUN: "config.yaml", GROUP: GROUP_FILE, SWEEP: SWEEP_FILE, PACK: SUMMARY}  # that make a folder one
_MEMBERS = {GROUP: (re.compile(r"seed-([0-9]+)"), (RUN,)), SWEEP: (re.compile(r"trial-([0-9]+)"), (RUN, GROUP))}


@dataclass(frozen=True)
class Entry:
    """A run, group, sweep or pack."""

    path: str  # below the folder of runs: my-run, my-group/seed-1, my-sweep/trial-3/seed-1
    kind: str
    folder: Path

    @property
    def name(self) -> str:
        """The name of its folder."""
        return self.folder.name

    def members(self) -> list[Entry]:
        """Return the runs of a group, or the trials of a sweep, in the order of their numbers."""
        if self.kind not in _MEMBERS:
            return []
        pattern, _ = _MEMBERS[self.kind]
        numbers = {name: int(found[1]) for name in folders_in(self.folder) if (found := pattern.fullmatch(name))}
        members = (self.member(name) for name in sorted(numbers, key=numbers.__getitem__))
        return [member for member in members if member is not None]

    def member(self, name: str) -> Entry | None:
        """Return the member with that name; None if there is none."""
        if self.kind not in _MEMBERS:
            return None
        pattern, kinds = _MEMBERS[self.kind]
        if not pattern.fullmatch(name):
            return None
        folder = self.folder / name
        kind = _kind(folder, kinds)
        return Entry(f"{self.path}/{name}", kind, folder) if kind else None

    def runs(self) -> list[Entry]:
        """Return the runs in it: itself, or its members and theirs."""
        return [self] if self.kind == RUN else [run for member in self.members() for run in member.runs()]


class Runs:
    """What is directly in a folder, or the folder itself if it is a run, group, sweep or pack."""

    def __init__(self, folder: Path) -> None:
        if not folder.is_dir():
            raise UsageError(f"{folder} is not a folder; give the folder of your runs, as in `unidle dashboard runs`.")
        self.folder = folder.resolve()
        kind = _kind(self.folder, tuple(_FILES))
        self._only = Entry(self.folder.name, kind, self.folder) if kind else None

    def entries(self) -> Iterator[Entry]:
        """Yield what is there now, sorted by name."""
        if self._only is not None:
            yield self._only
            return
        for name in sorted(folders_in(self.folder)):
            if (entry := self._top(name)) is not None:
                yield entry

    def find(self, path: str) -> Entry | None:
        """Return what is at a path, such as my-group/seed-1; None if there is nothing to show."""
        first, *rest = path.split("/")
        entry = self._top(first)
        for name in rest:
            entry = entry.member(name) if entry is not None else None
        return entry

    def at(self, folder: Path) -> Entry | None:
        """Return the entry in a folder; None if the folder is elsewhere."""
        place = self.folder.parent if self._only is not None else self.folder
        try:
            below = folder.resolve().relative_to(place)
        except (ValueError, OSError):
            return None
        return self.find(below.as_posix())

    def _top(self, name: str) -> Entry | None:
        if self._only is not None:
            return self._only if name == self._only.name else None
        if not _is_valid_name(name):
            return None
        folder = self.folder / name
        kind = _kind(folder, tuple(_FILES))
        return Entry(name, kind, folder) if kind else None


def _kind(folder: Path, kinds: tuple[str, ...]) -> str | None:
    """Return what a folder is; None if it is neither, or a symlink."""
    return next((kind for kind in kinds if has_regular(folder, _FILES[kind])), None)


def folders_in(folder: Path) -> list[str]:
    """Return the names of the folders in a folder, without symlinks."""
    try:
        with os.scandir(folder) as entries:
            return [entry.name for entry in entries if entry.is_dir(follow_symlinks=False)]
    except OSError:  # it was removed meanwhile
        return []


def _is_valid_name(name: str) -> bool:
    """Whether `name` is a valid folder entry that can be part of a URL."""
    if name in ("", ".", "..") or "/" in name or "\0" in name:
        return False
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True
