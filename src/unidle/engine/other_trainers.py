"""Other trainers of this user on the same cores, so that each run starts its share of worker processes.

A trainer holds the lock of a file of its own in a folder of the user. It has ended if its lock is free, however it
ended. Only numbers of processes depend on this, so results do not; and without such a folder, a run is as if alone.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import secrets
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Self

from unidle.config.machine import available_cores
from unidle.locks import release, try_lock

_OTHERS_MAY_WRITE = 0o022


@dataclass(frozen=True)
class CoreShare:
    """The cores for one of several trainers."""

    cores: int
    total: int
    """Available to this process, and shared by all of them."""
    others: int
    """Trainers on these cores, at least one."""


@dataclass(frozen=True)
class _Trainer:
    cores: frozenset[int]
    """It may use these."""
    busy: int | None
    """It keeps so many of them busy; None: it has not decided yet."""


class OtherTrainers:
    """The trainers on this machine, among which one is entered while it trains; a context manager."""

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder or _user_folder()
        self._file: IO[str] | None = None
        self._path: Path | None = None

    def __enter__(self) -> Self:
        """Enter this trainer; without effect if that is not possible."""
        with contextlib.suppress(OSError):
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            found = self._folder.lstat()
            if found.st_uid == os.getuid() and not found.st_mode & _OTHERS_MAY_WRITE:
                self._register()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._path is not None:
            with contextlib.suppress(OSError):
                self._path.unlink()
        if self._file is not None:
            release(self._file)

    def share(self) -> CoreShare | None:
        """The cores for this trainer: those that the others leave, but at least an equal part; None if it is alone."""
        if self._path is None:
            return None
        own, total = os.sched_getaffinity(0), available_cores()
        others = [other for other in self._others() if other.cores & own]
        if not others:
            return None
        equal = total // (len(others) + 1)
        used = sum(min(equal if other.busy is None else other.busy, len(other.cores & own)) for other in others)
        return CoreShare(max(1, equal, total - used), total, len(others))

    def announce(self, busy: int) -> None:
        """Tell the others how many cores this trainer keeps busy."""
        if self._path is not None:
            with contextlib.suppress(OSError):
                self._write(busy)

    def _register(self) -> None:
        name = f"{os.getpid()}-{secrets.token_hex(4)}"
        hidden = self._folder / f".{name}"  # until it is locked: an entry without a lock is removed by others
        self._file = open(hidden, "x", encoding="utf-8")  # noqa: SIM115
        try_lock(self._file)
        self._write(None)
        path = self._folder / f"{name}.json"
        hidden.rename(path)
        self._path = path

    def _write(self, busy: int | None) -> None:
        assert self._file is not None
        self._file.seek(0)
        self._file.write(json.dumps({"cores": sorted(os.sched_getaffinity(0)), "busy": busy}))
        self._file.truncate()
        self._file.flush()

    def _others(self) -> Iterator[_Trainer]:
        for path in self._folder.glob("*.json"):
            if path != self._path:
                with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
                    found = _read(path)
                    if found is not None:
                        yield found


def _read(path: Path) -> _Trainer | None:
    """The trainer of an entry; None, and the entry is removed, if it has ended."""
    with path.open(encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            entry = json.load(file)
            busy = entry["busy"]
            return _Trainer(frozenset(map(int, entry["cores"])), busy if busy is None else int(busy))
    path.unlink()
    return None


def _user_folder() -> Path:
    """Where this user's trainers find each other, wherever they were started."""
    runtime = Path(os.environ.get("XDG_RUNTIME_DIR") or f"/run/user/{os.getuid()}")
    if runtime.is_dir():
        return runtime / "unidle" / "trainers"
    return Path(tempfile.gettempdir()) / f"unidle-trainers-{os.getuid()}"
