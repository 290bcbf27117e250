"""`unidle monitor`: every reading of the last seconds, live on a terminal or once as a table.

It looks at each interval, but a value that was not renewed since is not shown as a new one; the column *new/s* says how
often each reading really changes. What a GPU lacks is a –.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from unidle.meter.csv_log import CsvLog
from unidle.meter.figures import LACKING, figure
from unidle.meter.host import Busiest, Host, Tree
from unidle.meter.nvml import Driver, Gpu
from unidle.meter.reading import Source
from unidle.meter.window import Window, sparkline

WINDOW_S = 10.0
ONCE_S = 1.0  # what `--once` looks at: long enough for the slowest reading to be renewed
_DRAW_EVERY_S = 0.1  # faster than anybody reads
_PRINT_EVERY_S = WINDOW_S  # in a pipe
_PROCESSES = 5
_CHIEF = ("utilisation", "SM active", "memory", "power")
_OTHER_ROWS = 20  # what the panel has besides GPUs


class Monitor:
    """All sources, a window for each of their readings, and how these look."""

    def __init__(self, pid: int | None = None, csv: Path | None = None, window_s: float = WINDOW_S) -> None:
        self._host, self._tree = Host(), Tree(pid) if pid is not None else None
        self._busiest = Busiest(_PROCESSES)
        self._csv = CsvLog(csv) if csv else None  # after what may refuse: a mistake leaves no file behind
        self._driver = Driver()
        self._window_s = window_s
        trees = [self._tree] if self._tree else []
        self._sources: list[Source] = [*self._driver.gpus, self._host, *trees]
        self._windows = {
            (source.name, reading.name): Window(window_s) for source in self._sources for reading in source.readings
        }

    def poll(self) -> bool:
        """Look once at everything; returns whether anything was new."""
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
        """End the talk with the driver, and close the file."""
        self._driver.close()
        if self._csv:
            self._csv.close()

    def panel(self, width: int, height: int | None = None) -> RenderableType:
        """All of it, for a console of `width` columns; of many GPUs only the chief readings, if it is not that high."""
        now_ns = time.perf_counter_ns()
        table = Table.grid(padding=(0, 2))
        for header in ("reading", "now", "min", "mean", "max", "new/s", f"last {self._window_s:.0f} s"):
            is_text = header.startswith(("reading", "last"))
            table.add_column(header, no_wrap=True, justify="left" if is_text else "right")
        table.add_row(*(Text(str(column.header), "dim") for column in table.columns))
        cells = max(8, min(60, width - 72))
        gpus = self._driver.gpus
        needed = _OTHER_ROWS + sum(len(gpu.readings) + 3 + len(gpu.processes or ()) for gpu in gpus)
        is_brief = height is not None and needed > height
        for gpu in gpus:
            table.add_row()
            table.add_row(Text(f"{gpu.name}  {gpu.model}", "bold"))
            skip = tuple(r.name for r in gpu.readings if is_brief and r.name not in _CHIEF)
            self._add_rows(table, gpu, cells, now_ns, skip)
        table.add_row()
        n = len(self._host.cores)
        table.add_row(Text(f"host  {n} {'core' if n == 1 else 'cores'}", "bold"))
        self._add_rows(table, self._host, cells, now_ns, skip=self._host.core_names)
        if self._tree:
            table.add_row()
            table.add_row(Text(f"{self._tree.name}  and what it started", "bold"))
            self._add_rows(table, self._tree, cells, now_ns)
        return Group(table, *self._lines(now_ns, width))

    def result(self) -> dict[str, Any]:
        """The window as one object for --json; what is lacking is null."""
        now_ns = time.perf_counter_ns()
        found: dict[str, Any] = {"gpus": [], "no_gpu": self._driver.why_none, "sources": {}}
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

    def _add_rows(self, table: Table, source: Source, n_cells: int, now_ns: int, skip: tuple[str, ...] = ()) -> None:
        for reading in source.readings:
            if reading.name in skip:
                continue
            name = Text.assemble(f"  {reading.name}", (f" {reading.unit}", "dim"))
            window = self._windows[source.name, reading.name]
            summary = window.summary(now_ns)
            if summary is None:
                table.add_row(name, *[LACKING] * 5)
                continue
            rate = f"{summary.per_second:.1f}" if summary.per_second else LACKING
            if reading.is_total:
                table.add_row(name, figure(summary.latest), "", "", "", rate)
                continue
            values = (summary.latest, summary.least, summary.mean, summary.largest)
            spark = sparkline(window.cells(now_ns, n_cells), reading.full)
            table.add_row(name, *(figure(value) for value in values), rate, Text(spark, "green"))

    def _lines(self, now_ns: int, width: int) -> Iterator[Text]:
        """What is no number over time."""
        yield Text()
        if self._driver.why_none:
            yield Text(self._driver.why_none, "yellow")
        for gpu in self._driver.gpus:
            if gpu.is_lost:
                yield Text(f"{gpu.name} is lost: the driver cannot reach it any more; see dmesg.", "red")
                continue
            yield _throttling(gpu)
            yield from _gpu_processes(gpu)
        latest = [self._windows["host", name].summary(now_ns) for name in self._host.core_names]
        shown = latest[: max(1, width - 12)]
        bars = sparkline([summary.latest if summary else None for summary in shown], 100.0)
        yield Text.assemble(("cores       ", "dim"), (bars, "green"))
        for place, process in enumerate(self._busiest.processes):
            label = "busiest     " if not place else " " * 12
            use = f"{process.cores:5.2f} cores  {process.memory / 2**30:6.2f} GiB"
            yield Text.assemble((label, "dim"), f"{process.pid:>8}  {use}  {process.name}")


def watch(
    monitor: Monitor,
    console: Console,
    interval_s: float,
    *,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Look and draw until Ctrl-C: a live view on a terminal, a table now and then in a pipe."""
    # FORCE_COLOR, often set in CI, makes rich believe in a terminal; so ask the file itself.
    is_live = console.is_interactive and console.file.isatty()
    live = Live(console=console, auto_refresh=False, vertical_overflow="crop") if is_live else None
    next_draw, has_news = clock(), False
    if live:
        live.start()
        console.show_cursor(True)  # so that not even a SIGKILL leaves the terminal without one
    else:
        next_draw += _PRINT_EVERY_S
    try:
        while True:
            began = clock()  # looks are never closer than the interval: one that came late is not made up for
            has_news |= monitor.poll()
            if has_news and clock() >= next_draw:
                if live:
                    live.update(monitor.panel(console.width, console.height), refresh=True)
                else:
                    console.print(monitor.panel(console.width))
                next_draw, has_news = clock() + (_DRAW_EVERY_S if live else _PRINT_EVERY_S), False
            sleep(max(0.0, began + interval_s - clock()))
    except KeyboardInterrupt:
        pass  # how it is meant to end
    finally:
        if live:
            live.stop()


def look_once(monitor: Monitor, interval_s: float) -> None:
    """Look for long enough that every reading has had the time to be renewed."""
    end = time.monotonic() + ONCE_S
    while True:
        monitor.poll()
        left = end - time.monotonic()
        if left <= 0:
            return
        time.sleep(min(interval_s, left))


def _throttling(gpu: Gpu) -> Text:
    label = (f"{gpu.name:<12}", "dim")
    if gpu.throttled_by is None:
        return Text.assemble(label, f"throttled: {LACKING}")
    if gpu.throttled_by:
        return Text.assemble(label, (f"throttled by {', '.join(gpu.throttled_by)}", "red"))
    return Text.assemble(label, "not throttled")


def _gpu_processes(gpu: Gpu) -> Iterator[Text]:
    for process in gpu.processes or ():
        memory = LACKING if process.memory is None else f"{process.memory / 2**30:.2f} GiB"
        share = LACKING if process.utilisation is None else f"{process.utilisation:.0f} %"
        yield Text(f"{' ' * 12}{process.pid:>8}  {share:>11}  {memory:>10}")
