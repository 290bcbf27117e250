"""`unidle monitor`: all sensor readings of the last seconds, live on a terminal or once as a table.

It polls at each interval but does not count repeated values; the column *new/s* is each reading's actual update rate.
Unavailable readings are shown as –.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from unidle.formatting import MISSING
from unidle.meter.sensors.csv_log import CsvLog
from unidle.meter.sensors.host import Busiest, Host, Tree
from unidle.meter.sensors.nvml import Driver, Gpu, GpuProcess
from unidle.meter.sensors.reading import Reading, Source
from unidle.meter.sensors.window import Window, sparkline
from unidle.output import output_is_lost
from unidle.report.terminal.readings_table import Part, readings_table

WINDOW_S = 10.0
ONCE_S = 1.0  # duration of `--once`: long enough for the slowest reading to update
_DRAW_EVERY_S = 0.1
_PRINT_EVERY_S = WINDOW_S  # in a pipe
_PROCESSES = 5
_MAIN = ("utilisation", "SM active", "memory", "power")
_OTHER_ROWS = 20  # rows of the panel that are not GPUs
_LABEL = 12  # columns before a line that is not a table row


class Monitor:
    """All sources with a window per reading, and how they are displayed."""

    def __init__(self, pid: int | None = None, csv: Path | None = None, window_s: float = WINDOW_S) -> None:
        self._host, self._tree = Host(), Tree(pid) if pid is not None else None
        self._busiest = Busiest(_PROCESSES)
        self._csv = CsvLog(csv) if csv else None  # last, so that a user error leaves no file behind
        self._driver = Driver()
        self._window_s = window_s
        trees = [self._tree] if self._tree else []
        self._sources: list[Source] = [*self._driver.gpus, self._host, *trees]
        self._windows = {
            (source.name, reading.name): Window(window_s) for source in self._sources for reading in source.readings
        }

    def poll(self) -> bool:
        """Poll all sources once; returns whether anything is new."""
        is_new = False
        for source in self._sources:
            found = source.poll()
            for name, samples in found.items():
                self._windows[source.name, name].add(samples)
                is_new |= bool(samples)
            if self._csv:
                self._csv.write(source, found)
        if self._busiest.poll():
            is_new = True
            for gpu in self._driver.gpus:
                gpu.poll_processes()
        return is_new

    def close(self) -> None:
        """Close the driver and the CSV file."""
        self._driver.close()
        if self._csv:
            self._csv.close()

    def panel(self, width: int, height: int | None = None) -> RenderableType:
        """Render everything for a console of `width` columns; only main GPU readings if it does not fit the height."""
        needed = _OTHER_ROWS + sum(len(gpu.readings) + 2 + len(gpu.processes or ()) for gpu in self._driver.gpus)
        is_brief = height is not None and needed > height
        shown = self.table([*self.gpu_parts(is_brief=is_brief), *self._host_parts(width)], width)
        return Group(shown, Text(), Text(self._driver.no_gpu_reason, "yellow")) if self._driver.no_gpu_reason else shown

    def table(self, parts: Sequence[Part], width: int) -> Group:
        """Render the given parts."""
        return readings_table(parts, width, self._window_s, time.perf_counter_ns())

    def gpu_parts(self, *, is_brief: bool = False) -> Iterator[Part]:
        """Return a part per GPU: its readings, throttling, and the processes that use it."""
        for gpu in self._driver.gpus:
            skip = tuple(reading.name for reading in gpu.readings if is_brief and reading.name not in _MAIN)
            notes = _labelled("used by", [_gpu_process(process) for process in gpu.processes or ()])
            yield Part(_title(gpu), self._read(gpu, skip), notes)

    def result(self) -> dict[str, Any]:
        """Return the window as one object for --json; unavailable readings are null."""
        now_ns = time.perf_counter_ns()
        found: dict[str, Any] = {"gpus": [], "no_gpu": self._driver.no_gpu_reason, "sources": {}}
        found["gpus"] = [
            {
                "index": gpu.index,
                "model": gpu.model,
                "lost": gpu.is_lost,
                "throttled_by": gpu.throttled_by,
                "processes": None if gpu.processes is None else [vars(process) for process in gpu.processes],
            }
            for gpu in self._driver.gpus
        ]
        for source in self._sources:
            found["sources"][source.name] = readings = {}
            for reading in source.readings:
                summary = self._windows[source.name, reading.name].summary(now_ns)
                readings[reading.name] = {"unit": reading.unit, **vars(summary)} if summary else None
        return found

    def _host_parts(self, width: int) -> Iterator[Part]:
        """Return the parts of the host and of the watched process."""
        n = len(self._host.cores)
        title = Text(f"host  {n} {'core' if n == 1 else 'cores'}", "bold")
        now_ns = time.perf_counter_ns()
        latest = [self._windows["host", name].summary(now_ns) for name in self._host.core_names]
        shown = latest[: max(1, width - _LABEL)]
        bars = sparkline([summary.latest if summary else None for summary in shown], 100.0)
        busiest = [
            Text(f"pid {process.pid:<8}  {process.cores:5.2f} cores  {process.memory / 2**30:6.2f} GiB  {process.name}")
            for process in self._busiest.processes
        ]
        notes = [*_labelled("cores", [Text(bars, "green")]), *_labelled("busiest", busiest)]
        yield Part(title, self._read(self._host, self._host.core_names), notes)
        if self._tree:
            yield Part(Text(f"{self._tree.name}  and its child processes", "bold"), self._read(self._tree))

    def _read(self, source: Source, skip: tuple[str, ...] = ()) -> list[tuple[Reading, Window]]:
        return [(r, self._windows[source.name, r.name]) for r in source.readings if r.name not in skip]


def watch(
    monitor: Monitor,
    console: Console,
    interval_s: float,
    *,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Poll and draw until Ctrl-C: a live view on a terminal, a table every few seconds in a pipe."""
    # FORCE_COLOR, often set in CI, makes rich assume a terminal, so check the file itself.
    is_live = console.is_interactive and console.file.isatty()
    live = Live(console=console, auto_refresh=False, vertical_overflow="crop") if is_live else None
    next_draw, has_news = clock(), False
    if live:
        live.start()
        console.show_cursor(True)  # even SIGKILL must not leave the terminal without a cursor
    else:
        next_draw += _PRINT_EVERY_S
    try:
        while not output_is_lost():
            began = clock()  # polls are at least one interval apart; a late one is not caught up
            has_news |= monitor.poll()
            if has_news and clock() >= next_draw:
                if live:
                    live.update(monitor.panel(console.width, console.height), refresh=True)
                else:
                    console.print(monitor.panel(console.width))
                next_draw, has_news = clock() + (_DRAW_EVERY_S if live else _PRINT_EVERY_S), False
            sleep(max(0.0, began + interval_s - clock()))
    except KeyboardInterrupt:
        pass  # the normal way to stop
    finally:
        if live:
            live.stop()


def sample_once(monitor: Monitor, interval_s: float) -> None:
    """Poll for long enough that every reading can update."""
    end = time.monotonic() + ONCE_S
    while True:
        monitor.poll()
        left = end - time.monotonic()
        if left <= 0:
            return
        time.sleep(min(interval_s, left))


def _title(gpu: Gpu) -> Text:
    if gpu.is_lost:
        return Text(f"{gpu.name} is lost: the driver can no longer reach it; see dmesg.", "red")
    if gpu.throttled_by is None:
        state = Text(f"throttled: {MISSING}", "dim")
    elif gpu.throttled_by:
        state = Text(f"throttled by {', '.join(gpu.throttled_by)}", "red")
    else:
        state = Text("not throttled", "dim")
    return Text.assemble((f"{gpu.name}  {gpu.model}", "bold"), "  ", state)


def _gpu_process(process: GpuProcess) -> Text:
    memory = MISSING if process.memory is None else f"{process.memory / 2**30:.2f} GiB"
    share = MISSING if process.utilisation is None else f"{process.utilisation:.0f} %"
    return Text(f"pid {process.pid:<8}  {share:>11}  {memory:>10}")


def _labelled(label: str, lines: Sequence[Text]) -> list[Text]:
    """Return the lines with a label on the first."""
    labels = [label, *[""] * len(lines)]
    return [
        Text.assemble((f"  {word:<{_LABEL - 2}}", "dim"), line, no_wrap=True, overflow="ellipsis")
        for word, line in zip(labels, lines)
    ]
