"""Safe reading of a runs folder: no symlinks are followed, only regular files are opened, partial lines are skipped."""

from __future__ import annotations

import fcntl
import json
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from unidle.config.files import MAX_CHARACTERS, parse_yaml
from unidle.errors import UsageError
from unidle.report.history import Record

_LINE_BYTES = 1 << 20  # a longer line is read in parts, which are not records; usual lines have 10 KB
_FOLDER = os.O_DIRECTORY | os.O_NOFOLLOW | getattr(os, "O_PATH", os.O_RDONLY)  # O_PATH: also if it is not readable
_CHECK_BYTES = 64  # bytes before the last read position; if they change, the file was replaced


def open_regular(folder: Path, name: str) -> BinaryIO | None:
    """Open a regular file of `folder`, an absolute path, for reading.

    None if it does not exist, or if it, the folder, or a folder above is a symlink.
    """
    try:
        place = _open_folder(folder)
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


def _open_folder(folder: Path) -> int:
    """Open a folder one step at a time, so that no part of its path can be a symlink."""
    place = os.open(folder.anchor, _FOLDER)
    for part in folder.parts[1:]:
        try:
            inner = os.open(part, _FOLDER, dir_fd=place)
        finally:
            os.close(place)
        place = inner
    return place


def has_regular(folder: Path, name: str) -> bool:
    """Whether `open_regular` can open a file."""
    file = open_regular(folder, name)
    if file is not None:
        file.close()
    return file is not None


def read_text(folder: Path, name: str) -> str | None:
    """Return the text of a small regular file; None if it cannot be read or is too long."""
    file = open_regular(folder, name)
    if file is None:
        return None
    with file:
        try:
            text = file.read(4 * MAX_CHARACTERS + 1).decode()
        except (OSError, UnicodeDecodeError):
            return None
    return text if len(text) <= MAX_CHARACTERS else None


def read_mapping(folder: Path, name: str) -> dict[str, Any] | None:
    """Return the mapping in a YAML file; None if it cannot be read."""
    text = read_text(folder, name)
    try:
        return None if text is None else parse_yaml(text, name)
    except UsageError:
        return None


def stamp_of(path: Path) -> tuple[int, int, int] | None:
    """Return what changes whenever a file or folder does; None if it does not exist."""
    try:
        state = os.lstat(path)
    except OSError:
        return None
    return state.st_ino, state.st_mtime_ns, state.st_size


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


def worker_folder(sweep: Path, worker: int) -> Path:
    """The folder with the lock of one of the processes that share a sweep."""
    return sweep / "workers" / str(worker)


def has_workers(sweep: Path) -> bool:
    """Whether processes that share the sweep work on it."""
    return any(is_training(folder) for folder in sweep.glob("workers/*"))


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


def sampled_records(folder: Path, name: str, count: int) -> list[Record]:
    """Return about `count` complete records spread evenly over a file, always with the first and the last."""
    file = open_regular(folder, name)
    if file is None:
        return []
    records: list[Record] = []
    with file:
        size, end = os.fstat(file.fileno()).st_size, 0
        for i in range(count):
            place = max(end, i * size // count)
            if place > end:  # somewhere within a line
                file.seek(place - 1)
                file.readline(_LINE_BYTES)
            else:
                file.seek(place)
            line = file.readline(_LINE_BYTES)
            end = file.tell()
            if line.endswith(b"\n") and (record := record_of(line)) is not None:
                records.append(record)
    return records + last_records(folder, name, _LINE_BYTES // 16)[-1:]


def record_at(folder: Path, name: str, place: int) -> Record | None:
    """Return the record at offset `place` of a file."""
    file = open_regular(folder, name)
    if file is None:
        return None
    with file:
        file.seek(place)
        return record_of(file.readline(_LINE_BYTES))
