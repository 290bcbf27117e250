"""What the sampler inside a watched process wrote, read back."""

from __future__ import annotations

import json
import linecache
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from unidle.meter.watch.source import function_at

FIRST_OF_WORKER = "BaseProcess._bootstrap"  # of multiprocessing
_LINE = re.compile(r'  File "(.*)", line (\d+) in (.*)')
_ESCAPE = re.compile(r"\\(?:x([0-9a-f]{2})|u([0-9a-f]{4})|U([0-9a-f]{8}))")  # how faulthandler writes what is not ASCII


@dataclass(frozen=True)
class Frame:
    """A function of a stack."""

    file: str
    name: str
    steps_env: bool
    """Whether it is a method that steps or resets an environment."""


@dataclass(frozen=True)
class Stack:
    """All samples of one stack of one thread; times in seconds."""

    thread: int
    """0: the main one."""
    line: int
    frames: tuple[Frame, ...]
    """From the innermost."""
    wall: float
    on_core: float
    queued: float
    """For a core that others were on."""
    known: float
    """Of it, time of which it is known how much was computed: on a GPU windows of the profiler or, if `is_followed`,
    what the driver's readings cover and the time before the first use; on a CPU samples that were looked at twice."""
    active: float
    """Of that, while a kernel ran (GPU), or inside one call that lasted (CPU)."""

    @cached_property
    def text(self) -> str:
        """The source line that it stood at; empty where there is none to read."""
        return linecache.getline(self.frames[0].file, self.line).strip() if self.frames else ""


@dataclass(frozen=True)
class Computing:
    """All windows of a process that uses a GPU, together."""

    windows: int
    seconds: float
    active: float
    """Share of the time in which some kernel ran."""
    kernel_us: float | None
    """Mean length of a kernel, or less where they run side by side; None where there were none."""


@dataclass(frozen=True)
class Process:
    """One Python process of the watched command."""

    pid: int
    is_worker: bool
    """Whether another one started it as its helper: a worker of multiprocessing and the like."""
    command: tuple[str, ...]
    begun_ns: int
    last_ns: int
    """Of its first and last sample, by perf_counter_ns."""
    closed_ns: int | None
    """When the program came to its end: what follows is only Python's own taking apart; None if it never said so, as
    one that was killed."""
    cpu_seconds: float
    tasks: int
    """The most threads it had, native ones included."""
    uses_torch: bool
    uses_cuda: bool
    computing: Computing | None
    stacks: tuple[Stack, ...]
    is_followed: bool = False
    """Whether the driver's readings were put down to what its main thread did."""
    failure: str | None = None
    """Why there are no samples after the last one, if the sampler failed."""

    def thread(self, number: int) -> list[Stack]:
        """The stacks of one thread."""
        return [stack for stack in self.stacks if stack.thread == number]


def read_processes(folder: Path) -> list[Process]:
    """All processes that left samples."""
    return list(_read(folder))


def _read(folder: Path) -> Iterator[Process]:
    for path in sorted(folder.glob("*.json")):
        try:
            known = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, json.JSONDecodeError):
            continue
        frames = [_frame(text) for text in known["frames"]]
        stacks = tuple(
            Stack(
                thread,
                frames[places[0]][1] if places else 0,
                _own_part([frames[place][0] for place in places]),
                wall * 1e-9,
                on_core * 1e-9,
                queued * 1e-9,
                known_wall * 1e-9,
                active * 1e-9,
            )
            for thread, places, wall, on_core, queued, known_wall, active in known["stacks"]
        )
        yield Process(
            known["pid"],
            known["is_worker"],
            tuple(known["command"]),
            known["begun_ns"],
            known["last_ns"],
            known["closed_ns"],
            known["cpu_seconds"],
            known["tasks"],
            known["torch"],
            known["cuda"],
            _computing(known["windows"]),
            stacks,
            known["followed"],
            known["failure"],
        )


def _frame(text: str) -> tuple[Frame, int]:
    """A line of faulthandler's as a frame, and the line of source that it is at."""
    found = _LINE.match(text)
    if found is None:
        return Frame("", text.strip(), False), 0  # "..." where the stack is deeper than faulthandler tells
    file, line, name = _unescaped(found[1]), int(found[2]), _unescaped(found[3])
    return Frame(file, *function_at(file, line, name)), line


def _unescaped(text: str) -> str:
    r"""Names as they are in the source; a backslash that stands for itself, as in C:\x41, is left alone."""

    def character(found: re.Match[str]) -> str:
        code = int(found[1] or found[2] or found[3], 16)
        # Printable ASCII is never escaped. Half a surrogate pair is a byte of no known encoding: it cannot be printed.
        is_escape = not (0x20 <= code <= 0x7E or 0xD800 <= code <= 0xDFFF or code > sys.maxunicode)
        return chr(code) if is_escape else found[0]

    return _ESCAPE.sub(character, text)


def _own_part(frames: list[Frame]) -> tuple[Frame, ...]:
    """A stack without what a forked process inherited: below its first function stands where its parent was."""
    first = next((i for i, frame in enumerate(frames) if frame.name == FIRST_OF_WORKER), len(frames))
    return tuple(frames[: first + 1])


def _computing(windows: list[dict[str, int]]) -> Computing | None:
    wall = sum(window["wall_ns"] for window in windows)
    if not wall:
        return None
    active, kernels = (sum(window[key] for window in windows) for key in ("active_ns", "kernels"))
    return Computing(len(windows), wall * 1e-9, active / wall, active / kernels * 1e-3 if kernels else None)
