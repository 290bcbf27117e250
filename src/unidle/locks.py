"""Locks on files, which the kernel releases when the process ends, however it ends."""

from __future__ import annotations

import fcntl
import os
from typing import IO

_held: set[IO[str]] = set()  # those that this process may hold


def try_lock(file: IO[str]) -> bool:
    """Lock an open file until `release`; False if it is locked already. Forked children do not keep the lock."""
    _held.add(file)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def release(file: IO[str]) -> None:
    """Close a file, and so release its lock."""
    _held.discard(file)
    file.close()


def _close_all() -> None:
    for file in _held:
        file.close()
    _held.clear()


# A process that an environment forks would inherit the lock, and keep it if it outlives the trainer.
os.register_at_fork(after_in_child=_close_all)
