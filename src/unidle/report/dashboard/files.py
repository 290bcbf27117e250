"""Reading a runs folder and nothing else: no link is followed, only plain files are opened, half-written lines wait."""

from __future__ import annotations

import fcntl
import json
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from unidle.errors import UsageError
from unidle.report.history import Record

_SEAM = 64  # bytes before the end of what was read; if they changed, it is another file


class Runs:
    """The runs of a folder, or one run alone where the folder is a run itself."""

    def __init__(self, folder: Path) -> None:
        if not folder.is_dir():
            raise UsageError(f"{folder} is no folder; give the one that holds your runs, as `unidle dashboard runs`.")
        self.folder = folder.resolve()
        self._is_one_run = (self.folder / "config.yaml").is_file()

    def names(self) -> list[str]:
        """Names of the runs there are now, in order."""
        if self._is_one_run:
            return [self.folder.name]
        with os.scandir(self.folder) as entries:
            names = [entry.name for entry in entries if entry.is_dir(follow_symlinks=False)]
        return sorted(name for name in names if self.find(name) is not None)

    def find(self, name: str) -> Path | None:
        """The folder of the run of that name; None if there is none right here."""
        if not _is_plain(name):
            return None
        if self._is_one_run:
            return self.folder if name == self.folder.name else None
        folder = self.folder / name
        config = open_plain(folder, "config.yaml")
        if config is None:
            return None
        config.close()
        return folder


def _is_plain(name: str) -> bool:
    """Whether `name` can be that of an entry in a folder, and be told in an address."""
    if not name or name in (".", "..") or "/" in name or "\0" in name:
        return False
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def open_plain(folder: Path, name: str) -> BinaryIO | None:
    """A plain file of `folder`, open for reading; None if there is none, or if it or the folder is a link."""
    try:
        place = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:
        return None
    try:
        handle = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=place)
    except OSError:
        return None
    finally:
        os.close(place)
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        return None
    return os.fdopen(handle, "rb")


def is_training(folder: Path) -> bool:
    """Whether a process holds the run's lock. Asking takes it for microseconds; who wants to train tries for longer."""
    lock = open_plain(folder, ".lock")
    if lock is None:
        return False
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            return True
    return False


def record_of(line: bytes) -> Record | None:
    """What a line says; None if it is no JSON object."""
    try:
        value = json.loads(line)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


class Tail:
    """A growing file of JSON lines, read once: each call tells only what is new."""

    def __init__(self, folder: Path, name: str) -> None:
        self._folder, self._name = folder, name
        self._inode = 0
        self._end = 0  # of the whole lines that were read
        self._seam = b""  # the bytes before it

    def new_records(self) -> tuple[bool, list[tuple[int, Record]]]:
        """Whether the file began anew, as when a run is resumed, and the new records, each with its place in it."""
        file = open_plain(self._folder, self._name)
        if file is None:
            began_anew = self._end > 0
            self._inode, self._end, self._seam = 0, 0, b""
            return began_anew, []
        with file:
            state = os.fstat(file.fileno())
            began_anew = not self._goes_on(file, state)
            if began_anew:
                self._inode, self._end, self._seam = state.st_ino, 0, b""
            return began_anew, list(self._read(file))

    def _goes_on(self, file: BinaryIO, state: os.stat_result) -> bool:
        if state.st_ino != self._inode or state.st_size < self._end:
            return False
        file.seek(self._end - len(self._seam))
        return file.read(len(self._seam)) == self._seam

    def _read(self, file: BinaryIO) -> Iterator[tuple[int, Record]]:
        file.seek(self._end)
        for line in file:
            if not line.endswith(b"\n"):
                return  # it is being written
            place, self._end = self._end, self._end + len(line)
            self._seam = (self._seam + line)[-_SEAM:]
            if (record := record_of(line)) is not None:
                yield place, record


def last_records(folder: Path, name: str, size: int) -> list[Record]:
    """The whole records in the last `size` bytes of a file, oldest first."""
    file = open_plain(folder, name)
    if file is None:
        return []
    with file:
        start = max(0, os.fstat(file.fileno()).st_size - size)
        file.seek(start)
        lines = file.read(size).split(b"\n")[1 if start else 0 : -1]
    return [record for line in lines if (record := record_of(line)) is not None]


def record_at(folder: Path, name: str, place: int) -> Record | None:
    """The record that begins at `place` of a file."""
    file = open_plain(folder, name)
    if file is None:
        return None
    with file:
        file.seek(place)
        return record_of(file.readline())
