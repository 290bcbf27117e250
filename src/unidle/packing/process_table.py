"""What a command and its processes use, from /proc."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

_PROC = Path("/proc")
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_PAGE = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True)
class Process:
    """One process now."""

    parent: int
    cpu_seconds: float
    """So far, with those of its children that have ended."""
    memory: int
    """Bytes of its own: memory that it shares with others, such as files and rollouts, is left out."""


def process_table() -> dict[int, Process]:
    """Every process by its id; one pass takes a few milliseconds."""
    table = {}
    for name in os.listdir(_PROC):
        if not name.isdecimal():
            continue
        try:
            stat = (_PROC / name / "stat").read_bytes().rpartition(b")")[2].split()
            pages = (_PROC / name / "statm").read_bytes().split()
        except OSError:
            continue  # it has just ended
        ticks = sum(map(int, stat[11:15]))
        table[int(name)] = Process(int(stat[1]), ticks / _TICKS_PER_S, (int(pages[1]) - int(pages[2])) * _PAGE)
    return table


def descendants(table: Mapping[int, Process], root: int) -> set[int]:
    """The processes that `root` started, directly or not."""
    children: dict[int, list[int]] = {}
    for pid, process in table.items():
        children.setdefault(process.parent, []).append(pid)
    found: set[int] = set()
    waiting = [root]
    while waiting:
        started = set(children.get(waiting.pop(), ())) - found
        found |= started
        waiting += started
    return found


def open_files(pid: int) -> list[Path]:
    """The files that a process has open."""
    folder = _PROC / str(pid) / "fd"
    found = []
    with contextlib.suppress(OSError):  # it has just ended, or belongs to another user
        for name in os.listdir(folder):
            with contextlib.suppress(OSError):  # it has just closed this one
                found.append(Path(os.readlink(folder / name)))
    return found
