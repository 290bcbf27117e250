"""The processes of a job, and what they use."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import psutil


def descendants(root: int) -> list[psutil.Process]:
    """The processes that `root` started, directly or not."""
    with suppress(psutil.NoSuchProcess):
        return list(psutil.Process(root).children(recursive=True))
    return []


def resources(processes: Iterable[psutil.Process]) -> tuple[float, int]:
    """CPU seconds so far, with those of children that have ended, and bytes of memory.

    Memory that a process shares with others, such as files and rollouts, is left out.
    """
    cpu_seconds, memory = 0.0, 0
    for process in processes:
        with suppress(psutil.Error), process.oneshot():  # it may just have ended
            times, used = process.cpu_times(), process.memory_info()
            cpu_seconds += times.user + times.system + times.children_user + times.children_system
            memory += used.rss - used.shared
    return cpu_seconds, memory


def open_files(process: psutil.Process) -> list[Path]:
    """The regular files that a process has open."""
    with suppress(psutil.Error):  # it has just ended, or belongs to another user
        return [Path(file.path) for file in process.open_files()]
    return []
