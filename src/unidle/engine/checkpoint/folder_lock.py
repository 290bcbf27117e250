"""The lock of a folder in which one process trains."""

from __future__ import annotations

from pathlib import Path
from time import monotonic, sleep
from typing import IO

from unidle.config.files import display_path
from unidle.errors import UsageError
from unidle.locks import release, try_lock
from unidle.writing import open_to_append

_TIMEOUT_S = 0.1  # a dashboard that checks whether the run is training holds the lock for microseconds


def lock_folder(path: Path) -> IO[str]:
    """Keep other processes from training in this folder, until `locks.release`."""
    lock = open_to_append(path / ".lock")
    deadline = monotonic() + _TIMEOUT_S
    while not try_lock(lock):
        if monotonic() > deadline:
            release(lock)
            raise UsageError(f"Another process is training in {display_path(path)}; wait for it, or stop it.")
        sleep(_TIMEOUT_S / 20)
    return lock
