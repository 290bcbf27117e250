"""Safe reading of a runs folder: no symlinks are followed, only regular files are opened, partial lines are skipped."""

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

_LINE_BYTES = 1 << 20  # a longer line is read in parts, which are not records; usual lines have 10 KB
_CHECK_BYTES = 64  # bytes before the last read position; if they change, the file was replaced


class Runs:
    """The runs in a folder, or a single run if the folder is a run itself."""

    def __init__(self, folder: Path) -> None:
        if not folder.is_dir():
            raise UsageError(f"{folder} is not a folder; give the folder of your runs, as in `unidle dashboard runs`.")
        self.folder = folder.resolve()
        self._is_one_run = (self.folder / "config.yaml").is_file()

    def names(self) -> list[str]:
        """Return the names of the current runs, sorted."""
        if self._is_one_run:
            return [self.folder.name]
        with os.scandir(self.folder) as entries:
            names = [entry.name for entry in entries if entry.is_dir(follow_symlinks=False)]
        return sorted(name for name in names if self.find(name) is not None)

    def find(self, name: str) -> Path | None:
        """Return the folder of the run with that name; None if there is none directly in the folder."""
        if not _is_valid_name(name):
            return None
        if self._is_one_run:
            return self.folder if name == self.folder.name else None
        folder = self.folder / name
        config = open_regular(folder, "config.yaml")
        if config is None:
            return None
        config.close()
        return folder


def _is_valid_name(name: str) -> bool:
    """Whether `name` is a valid folder entry that can be part of a URL."""
    if not name or name in (".", "..") or "/" in name or "\0" in name:
        return False
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def open_regular(folder: Path, name: str) -> BinaryIO | None:
    """Open a regular file of `folder` for reading; None if it does not exist, or if it or the folder is a symlink."""
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
    """Whether a process holds the run's lock. The check takes it for microseconds; a trainer waits longer than that."""
    lock = open_regular(folder, ".lock")
    if lock is None:
        return False
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            return True
    return False


def record_of(line: bytes) -> Record | None:
    """Parse a line; None if it is not a JSON object."""
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):  # endless brackets
        return None
    return value if isinstance(value, dict) else None


class Tail:
    """Follows a growing JSON Lines file; each call returns only new records."""

    def __init__(self, folder: Path, name: str) -> None:
        self._folder, self._name = folder, name
        self._inode = 0
        self._end = 0  # of the complete lines read so far
        self._last_bytes = b""  # the bytes before that position

    def new_records(self) -> tuple[bool, list[tuple[int, Record]]]:
        """Return whether the file was restarted, as by a resumed run, and the new records with their offsets."""
        file = open_regular(self._folder, self._name)
        if file is None:
            restarted = self._end > 0
            self._inode, self._end, self._last_bytes = 0, 0, b""
            return restarted, []
        with file:
            state = os.fstat(file.fileno())
            restarted = not self._is_same_file(file, state)
            if restarted:
                self._inode, self._end, self._last_bytes = state.st_ino, 0, b""
            return restarted, list(self._read(file))

    def _is_same_file(self, file: BinaryIO, state: os.stat_result) -> bool:
        if state.st_ino != self._inode or state.st_size < self._end:
            return False
        file.seek(self._end - len(self._last_bytes))
        return file.read(len(self._last_bytes)) == self._last_bytes

    def _read(self, file: BinaryIO) -> Iterator[tuple[int, Record]]:
        file.seek(self._end)
        while line := file.readline(_LINE_BYTES):
            if not line.endswith(b"\n") and len(line) < _LINE_BYTES:
                return  # still being written
            place, self._end = self._end, self._end + len(line)
            self._last_bytes = (self._last_bytes + line)[-_CHECK_BYTES:]
            if (record := record_of(line)) is not None:
                yield place, record


def last_records(folder: Path, name: str, size: int) -> list[Record]:
    """Return the complete records in the last `size` bytes of a file, oldest first."""
    file = open_regular(folder, name)
    if file is None:
        return []
    with file:
        start = max(0, os.fstat(file.fileno()).st_size - size)
        file.seek(start)
        lines = file.read(size).split(b"\n")[1 if start else 0 : -1]
    return [record for line in lines if (record := record_of(line)) is not None]


def record_at(folder: Path, name: str, place: int) -> Record | None:
    """Return the record at offset `place` of a file."""
    file = open_regular(folder, name)
    if file is None:
        return None
    with file:
        file.seek(place)
        return record_of(file.readline(_LINE_BYTES))
