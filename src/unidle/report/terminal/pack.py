"""The output of `unidle pack`: a live table on a terminal, plain lines in a pipe or a CI log, and a closing table."""

from __future__ import annotations

import signal
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from types import TracebackType
from typing import Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from unidle.config.files import display_path
from unidle.formatting import MISSING, duration, figure, short_number
from unidle.packing.pack import Pack
from unidle.packing.packed_job import PackedJob

_LINES_EVERY_S = 30.0  # in a pipe
_OTHER_LINES = 6  # of a terminal, beside a line per job
_STYLES = {"waiting": "dim", "running": "", "finished": "green", "failed": "red", "stopped": "yellow"}
_GIB = 2**30


class PackTable:
    """Shows the jobs of a pack while they run; as a context manager it restores the terminal."""

    def __init__(self, console: Console, clock: Callable[[], float] = time.monotonic) -> None:
        self._console, self._clock = console, clock
        # FORCE_COLOR, often set in CI, makes rich assume a terminal, so check the file itself.
        self._live: Live | None = None
        if console.is_interactive and console.file.isatty():
            self._live = Live(console=console, auto_refresh=False, vertical_overflow="crop")
        self._next_lines = clock() + _LINES_EVERY_S

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
            self._console.show_cursor(True)  # even SIGKILL must not leave the terminal without a cursor
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._live is not None:
            self._live.update(Text(), refresh=True)  # the closing table takes its place
            self._live.stop()

    def on_message(self, text: str) -> None:
        """Print a permanent line."""
        self._print(text)

    def on_change(self, packed: PackedJob) -> None:
        """Print a line about a job that has started, failed or, in a pipe, finished."""
        name = packed.job.name
        if packed.state == "running":
            if self._live is None:
                self._print(f"{name} started on {_numbered(packed.cores)}")
        elif packed.state == "failed" or self._live is None:
            self._print(f"{name} {_ending(packed)}")

    def on_poll(self, pack: Pack) -> None:
        """Redraw the table or, in a pipe, print a line per running job when it is due."""
        if self._live is not None:
            self._live.update(self._table(pack), refresh=True)
        elif self._clock() >= self._next_lines:
            self._next_lines = self._clock() + _LINES_EVERY_S
            for packed in pack.jobs:
                if packed.state == "running":
                    self._print(_line(packed))
            if pack.gpu.text:
                self._print(pack.gpu.text)

    def _table(self, pack: Pack) -> RenderableType:
        jobs: Sequence[PackedJob] = pack.jobs
        if len(jobs) + _OTHER_LINES > self._console.height:
            jobs = [packed for packed in jobs if packed.state == "running"]
        table = _new_table("job", "state", "elapsed", "steps/s", "cores used", "memory", "GPU")
        table.add_column("last output", ratio=1, no_wrap=True, overflow="ellipsis")
        for packed in jobs:
            cells = (_duration(packed), _speed(packed), _cores(packed), _memory(packed.memory), _share(packed))
            state = Text(packed.state, _STYLES.get(packed.state, "yellow"))
            table.add_row(packed.job.name, state, *cells, Text(packed.note or packed.progress.last_line, "dim"))
        return Group(table, Text("   ".join(filter(None, [_counts(pack.jobs), pack.gpu.text])), "dim"))

    def _print(self, text: str) -> None:
        # No wrapping: logs are read with grep, and a terminal wraps lines itself.
        self._console.print(Text(text), soft_wrap=True)


def print_closing_table(console: Console, pack: Pack) -> None:
    """Print how each job ended, and where its output is."""
    table = _new_table("job", "state", "elapsed", "steps/s", "most memory")
    table.add_column("output", no_wrap=True, overflow="fold")
    for packed in pack.jobs:
        state = Text(_state(packed), _STYLES.get(packed.state, "yellow"))
        output = display_path(packed.output.absolute()) if packed.started is not None else MISSING
        cells = (_duration(packed), _speed(packed), _memory(packed.most_memory or None), output)
        table.add_row(packed.job.name, state, *cells)
    console.print()
    console.print(table)
    console.print(Text(_counts(pack.jobs)))


def _new_table(first: str, state: str, *figures: str) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim", expand=False)
    for name in (first, state):
        table.add_column(name, no_wrap=True)
    for name in figures:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def _line(packed: PackedJob) -> str:
    """Return its readings: seed-1  4 min 05 s  48.2k steps/s  3.8 of 4 cores  1.2 GiB  GPU 23 %  last output."""
    speed, share = packed.progress.steps_per_second, packed.gpu_share
    parts = [
        packed.job.name,
        _duration(packed),
        None if speed is None else f"{short_number(speed)} steps/s",
        None if packed.cores_used is None else f"{_cores(packed)} core{'s' * (len(packed.cores) > 1)}",
        None if packed.memory is None else _memory(packed.memory),
        None if share is None else f"GPU {_share(packed)}",
        packed.progress.last_line,
    ]
    return "  ".join(part for part in parts if part)


def _ending(packed: PackedJob) -> str:
    """Return how it ended: finished after 4 min 05 s; failed with code 3 after 8.4 s; its output ends with: …"""
    if packed.note:
        return packed.note
    text = f"{_state(packed)} after {_duration(packed)}"
    last = packed.progress.last_line
    return f"{text}; its output ends with: {last}" if packed.state == "failed" and last else text


def _state(packed: PackedJob) -> str:
    code, status = packed.exit_code, packed.process.status if packed.process else None
    if packed.state != "failed" or packed.note:
        return packed.state
    return (
        f"failed by {signal.Signals(-status).name}" if status is not None and status < 0 else f"failed with code {code}"
    )


def _counts(jobs: Iterable[PackedJob]) -> str:
    """Return how many jobs are in which state: 2 running, 1 failed, 5 waiting."""
    counts = Counter(packed.state for packed in jobs)
    return ", ".join(f"{count} {state}" for state, count in counts.items())


def _numbered(cores: Sequence[int]) -> str:
    """Return the cores as text: core 3; cores 0-3,8."""
    spans: list[list[int]] = []
    for core in sorted(cores):
        if spans and core == spans[-1][-1] + 1:
            spans[-1].append(core)
        else:
            spans.append([core])
    names = ",".join(f"{span[0]}-{span[-1]}" if len(span) > 1 else str(span[0]) for span in spans)
    return f"core{'s' * (len(cores) > 1)} {names}"


def _duration(packed: PackedJob) -> str:
    return MISSING if packed.seconds is None else duration(packed.seconds)


def _speed(packed: PackedJob) -> str:
    speed = packed.progress.steps_per_second
    return MISSING if speed is None else short_number(speed)


def _cores(packed: PackedJob) -> str:
    if not packed.cores:
        return MISSING
    return f"{MISSING if packed.cores_used is None else figure(packed.cores_used)} of {len(packed.cores)}"


def _memory(size: int | None) -> str:
    return MISSING if size is None else f"{figure(size / _GIB)} GiB"


def _share(packed: PackedJob) -> str:
    return MISSING if packed.gpu_share is None else f"{packed.gpu_share:.0f} %"
