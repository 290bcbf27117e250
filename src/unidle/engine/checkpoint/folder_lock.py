"""The lock of a folder in which one process trains."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from time import monotonic, sleep
from typing import IO

from unidle.config.files import display_path
from unidle.errors import UsageError
from unidle.writing import open_to_append

_TIMEOUT_S = 0.1  # a dashboard that checks whether the run is training holds the lock for microseconds

_locks: set[IO[str]] = set()  # those that this process may hold


def lock_folder(path: Path) -> IO[str]:
    """Keep other processes from training in this folder; released when this process ends, however it ends."""
    lock = open_to_append(path / ".lock")
    _locks.add(lock)
    deadline = monotonic() + _TIMEOUT_S
    while not _try_lock(lock):
        if monotonic() > deadline:
            unlock_folder(lock)
            raise UsageError(f"Another process is training in {display_path(path)}; wait for it, or stop it.")
        sleep(_TIMEOUT_S / 20)
    return lock


def unlock_folder(lock: IO[str]) -> None:
    """Release the lock."""
    _locks.discard(lock)
    lock.close()


def _try_lock(file: IO[str]) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _close_locks() -> None:
    for lock in _locks:
        lock.close()
    _locks.clear()


# A process that an environment forks would inherit the lock, and keep it if it outlives the trainer.
os.register_at_fork(after_in_child=_close_locks)
