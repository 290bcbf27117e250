"""Reads the files that the samplers in watched processes write."""

from __future__ import annotations

import json
import linecache
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from unidle.meter.watch.source import function_at

FIRST_OF_WORKER = "BaseProcess._bootstrap"  # outermost function of a multiprocessing worker
_LINE = re.compile(r'  File "(.*)", line (\d+|\?\?\?) in (.*)')  # ???: between two lines
_LABEL = re.compile(r"environments=(\d+)-\d+")  # of a worker process of unidle
FIRST_EVALUATION_ENV = 1 << 20  # as in unidle.engine, whose import would take seconds
_ESCAPE = re.compile(r"\\(?:x([0-9a-f]{2})|u([0-9a-f]{4})|U([0-9a-f]{8}))")  # faulthandler's non-ASCII escapes


@dataclass(frozen=True)
class Frame:
    """A function on a stack."""

    file: str
    name: str
    steps_env: bool
    """Whether it is an environment's step or reset method."""
    line: int = 0
    """0 if unknown."""


@dataclass(frozen=True)
class Stack:
    """All samples of one stack of one thread; times in seconds."""

    thread: int
    """0: the main thread."""
    frames: tuple[Frame, ...]
    """Innermost first."""
    wall: float
    on_core: float
    queued: float
    """Time spent waiting for a core."""
    known: float
    """Wall time for which compute activity is known. On a GPU: profiler windows or, with `has_driver_readings`, time
    covered by driver readings and the time before the first use; on a CPU: samples taken in pairs."""
    active: float
    """Part of `known` in which a kernel ran (GPU) or the thread stayed inside one long call (CPU)."""
    phase: str | None = None
    """The phase of the unidle run that this thread was in."""

    @cached_property
    def text(self) -> str:
        """The source line of the innermost frame; empty if the source is not available."""
        return linecache.getline(self.frames[0].file, self.frames[0].line).strip() if self.frames else ""


@dataclass(frozen=True)
class KernelActivity:
    """All profiler windows of a process, combined."""

    windows: int
    seconds: float
    active: float
    """Share of the time in which some kernel ran."""
    kernel_us: float | None
    """Mean kernel duration, shorter if kernels overlap; None if there were none."""


@dataclass(frozen=True)
class Process:
    """One Python process of the watched command."""

    pid: int
    is_worker: bool
    """Whether another process started it as a worker, for example through multiprocessing."""
    command: tuple[str, ...]
    begun_ns: int
    last_ns: int
    """Times of its first and last sample, by perf_counter_ns."""
    closed_ns: int | None
    """When the program finished and interpreter shutdown began; None if it was killed before."""
    cpu_seconds: float
    tasks: int
    """Largest number of threads, native ones included."""
    uses_torch: bool
    uses_cuda: bool
    kernel_activity: KernelActivity | None
    stacks: tuple[Stack, ...]
    has_driver_readings: bool = False
    """Whether the driver's readings were assigned to the main thread's stacks."""
    failure: str | None = None
    """The sampler's error, if it failed; there are no samples after that."""
    torch_threads: int | None = None
    """Number of threads that torch computes with, at the last sample; None if unknown."""
    phase_seconds: Mapping[str, float] = field(default_factory=dict)
    """Time of the main thread by phase of the unidle runs in it, as measured by them."""

    @property
    def is_unidle_worker(self) -> bool:
        """Whether it steps environments for unidle."""
        return "unidle.envs.pool.worker" in self.command

    @property
    def is_evaluator(self) -> bool:
        """Whether it evaluates for unidle."""
        labels = (_LABEL.fullmatch(word) for word in self.command)
        return any(int(found[1]) >= FIRST_EVALUATION_ENV for found in labels if found)

    def thread(self, number: int) -> list[Stack]:
        """Return the stacks of one thread."""
        return [stack for stack in self.stacks if stack.thread == number]


def read_processes(folder: Path) -> list[Process]:
    """Return all processes that wrote samples."""
    return list(_read(folder))


def _read(folder: Path) -> Iterator[Process]:
    for path in sorted(folder.glob("*.json")):
        try:
            known = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, json.JSONDecodeError):
            continue
        frames, phases = [_frame(text) for text in known["frames"]], known["phases"]
        stacks = tuple(
            Stack(
                thread,
                _own_part([frames[place] for place in places]),
                wall * 1e-9,
                on_core * 1e-9,
                queued * 1e-9,
                known_wall * 1e-9,
                active * 1e-9,
                None if phase < 0 else phases[phase],
            )
            for thread, phase, places, wall, on_core, queued, known_wall, active in known["stacks"]
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
            _kernel_activity(known["windows"]),
            stacks,
            known["followed"],
            known["failure"],
            known["torch_threads"],
            {name: total * 1e-9 for name, total in zip(phases, known["phase_ns"]) if total},
        )


def _frame(text: str) -> Frame:
    """Parse a line of faulthandler's output."""
    found = _LINE.match(text)
    if found is None:
        return Frame("", text.strip(), False)  # "..." where faulthandler truncates a deep stack
    file, name = _unescaped(found[1]), _unescaped(found[3])
    line = int(found[2]) if found[2].isdigit() else 0
    return Frame(file, *function_at(file, line, name), line)


def _unescaped(text: str) -> str:
    r"""Undo faulthandler's escapes; a literal backslash, as in C:\x41, is kept."""

    def character(found: re.Match[str]) -> str:
        code = int(found[1] or found[2] or found[3], 16)
        # Printable ASCII is never escaped. A lone surrogate is an undecodable byte and cannot be printed.
        is_escape = not (0x20 <= code <= 0x7E or 0xD800 <= code <= 0xDFFF or code > sys.maxunicode)
        return chr(code) if is_escape else found[0]

    return _ESCAPE.sub(character, text)


def _own_part(frames: list[Frame]) -> tuple[Frame, ...]:
    """Drop the frames that a forked process inherited from its parent."""
    first = next((i for i, frame in enumerate(frames) if frame.name == FIRST_OF_WORKER), len(frames))
    return tuple(frames[: first + 1])


def _kernel_activity(windows: list[dict[str, int]]) -> KernelActivity | None:
    wall = sum(window["wall_ns"] for window in windows)
    if not wall:
        return None
    active, kernels = (sum(window[key] for window in windows) for key in ("active_ns", "kernels"))
    return KernelActivity(len(windows), wall * 1e-9, active / wall, active / kernels * 1e-3 if kernels else None)
