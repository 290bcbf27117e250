"""Training progress: a live panel on a terminal or in a notebook, plain lines in a pipe or a CI log.

Everything goes to stderr; stdout is reserved for `--json`.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable
from types import TracebackType
from typing import Self

from rich.columns import Columns
from rich.console import Console, Group
from rich.padding import Padding
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from unidle.formatting import apportion, duration, faults, percent, score, short_number
from unidle.report.gpu_use import GpuUse
from unidle.report.history import Record, evaluation_text, fault_counts, main_time_shares, number, task_success
from unidle.report.terminal.live import LiveView, live_view, progress_console
from unidle.report.terminal.messages import Messages
from unidle.report.terminal.summary import print_facts

_PANEL_EVERY = 0.25  # seconds between redraws of the panel, which take about a millisecond each
_LINE_EVERY = 10.0  # seconds between plain lines …
_LINE_PROGRESS = 0.05  # … or this share of the run, whichever comes first
_RATE_WINDOW = (
    30.0  # seconds over which speed is averaged: long enough to be steady, short enough to forget the warm-up
)
_BAR_CELLS = 60
_COLOURS = {
    "environment": "blue",
    "inference": "magenta",
    "learn": "green",
    "evaluate": "cyan",
    "other": "bright_black",
}


class Display:
    """Shows the progress of one run; as a context manager it restores the terminal.

    It uses no thread: it draws after an iteration, at most a few times a second.
    """

    def __init__(self, console: Console | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._console = console or progress_console()
        self._view = live_view(self._console)
        self._clock = clock
        self._messages = Messages(lambda text, style: self._print(Text(text, style)), clock)
        self._live: LiveView | None = None  # `_view` while the run trains
        self._is_over = False
        self._next_draw = 0.0
        self._total = 1
        self._drawn_step = 0
        self._samples: deque[tuple[float, int]] = deque()  # recent (time, step), oldest first
        self._record: Record = {}
        self._evaluation: Record | None = None
        self._best: Record | None = None
        self._gpu = GpuUse()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.on_end()

    def on_start(self, facts: dict[str, str], total_steps: int, step: int, best: Record | None = None) -> None:
        """Print `facts` and begin at `step`; a resumed run passes the `best` evaluation so far."""
        print_facts(self._console, facts)
        self._total, self._best = max(1, total_steps), best
        self._record, self._drawn_step = {"step": step}, step
        now = self._clock()
        self._samples.append((now, step))
        self._next_draw = now + self._interval
        if self._view is not None:
            self._live = self._view
            self._live.start()
            self._console.show_cursor(True)  # even SIGKILL must not leave the terminal without a cursor
            self._draw(now)

    def on_iteration(self, record: Record) -> None:
        """Record an iteration and redraw if it is due."""
        self._record = record
        now = self._clock()
        soon = self._view is None and record["step"] - self._drawn_step >= _LINE_PROGRESS * self._total
        if now >= self._next_draw or soon:
            self._draw(now)

    def on_evaluation(self, record: Record) -> None:
        """Show an evaluation."""
        mean = number(record, "eval/return_mean")
        if mean is None:
            return
        self._evaluation = record
        is_best = bool(record.get("eval/best"))
        if is_best:
            self._best = record
        if self._view is not None:
            self._draw(self._clock())
        else:
            episodes = f" over {record['eval/episodes']} episodes" if "eval/episodes" in record else ""
            mark = ", the best so far" if is_best else ""
            tasks = f" ({text})" if (text := _tasks(record)) else ""
            self._print(Text(f"evaluation {_at(record)}{episodes}{mark}{tasks}"))

    def on_meter(self, line: Record) -> None:
        """Show a line of `meter.jsonl` with the next iteration."""
        self._gpu.add(line)

    def on_message(self, text: str) -> None:
        """Print a permanent line above the panel; `Messages` suppresses repeats."""
        self._messages.show(text)

    def on_end(self) -> None:
        """Show the last state and restore the terminal; a second call does nothing."""
        self._is_over = True
        self._messages.close()
        if self._live is not None:
            try:
                self._draw(self._clock())
            finally:
                self._live.stop()
                self._live = None
        elif self._samples and self._record["step"] > self._drawn_step:
            self._draw(self._clock())
        self._samples.clear()

    @property
    def _interval(self) -> float:
        return _PANEL_EVERY if self._view is not None else _LINE_EVERY

    def _draw(self, now: float) -> None:
        self._next_draw = now + self._interval
        self._drawn_step = self._record["step"]
        self._samples.append((now, self._drawn_step))
        # The latest sample before the window stays: speed is measured from there.
        while len(self._samples) > 2 and self._samples[1][0] <= now - _RATE_WINDOW:
            self._samples.popleft()
        if self._live is not None:
            self._live.update(self._panel(), refresh=True)
        else:
            self._print(self._line())

    @property
    def _rate(self) -> float | None:
        """Recent steps per second, without steps done before this process started."""
        (start, first), (end, last) = self._samples[0], self._samples[-1]
        return (last - first) / (end - start) if end > start and last > first else None

    @property
    def _progress(self) -> str:
        """Progress in whole percent, rounded down: 100 % means done."""
        return f"{min(100, 100 * self._record['step'] // self._total)} %"

    @property
    def _elapsed(self) -> str | None:
        """Seconds of training, including those before a resume."""
        wall = number(self._record, "wall")
        return None if wall is None else duration(wall)

    @property
    def _left(self) -> str | None:
        rate, step = self._rate, self._record["step"]
        if rate is None or step >= self._total or self._is_over:
            return None
        seconds = (self._total - step) / rate
        # An estimate is not precise enough for tenths of a second.
        return f"{math.ceil(seconds)} s left" if seconds < 59 else f"{duration(seconds)} left"

    def _line(self) -> Text:
        step, rate = self._record["step"], self._rate
        parts = [
            f"{self._progress:>5}",
            f"step {short_number(step, 4)} of {short_number(self._total)}",
            f"return {score(value)}" if (value := number(self._record, "rollout/return_mean")) is not None else None,
            f"best evaluation {evaluation_text(self._best, spread=False)}" if self._best else None,
            f"{short_number(rate)} steps/s" if rate else None,
            f"faults {count}" if (count := sum(fault_counts(self._record).values())) else None,
            self._time_text(" ") or None,
            f"GPU {gpu}" if (gpu := self._gpu.text) else None,
            f"{elapsed} elapsed" if (elapsed := self._elapsed) else None,
            self._left,
        ]
        return Text("  ".join(part for part in parts if part))

    def _time_text(self, between: str) -> str:
        """Return environment 60 % inference 10 % …, which sum to 100 %."""
        shares = apportion(main_time_shares(self._record))
        return between.join(f"{part} {share} %" for part, share in shares.items() if share)

    def _panel(self) -> Padding:
        step, rate = self._record["step"], self._rate
        table = Table.grid(padding=(0, 2))
        table.add_column(style="dim", no_wrap=True, min_width=len("evaluation"))
        table.add_column(overflow="ellipsis")
        bar = Table.grid(padding=(0, 2))
        bar.add_row(
            ProgressBar(self._total, min(step, self._total), width=min(_BAR_CELLS, self._console.width - 14)),
            Text(self._progress, "bold"),
        )
        steps = f"{short_number(step, 4)} of {short_number(self._total)}"
        table.add_row(
            "steps", Text("   ".join(filter(None, [steps, f"{short_number(rate)} steps/s" if rate else None])))
        )
        table.add_row("elapsed", Text("   ".join(filter(None, [self._elapsed, self._left])) or "–"))
        mean = number(self._record, "rollout/return_mean")
        episodes = ("   last 100 episodes", "dim")
        table.add_row("return", Text.assemble((score(mean), "bold"), episodes) if mean is not None else "–")
        table.add_row("evaluation", self._evaluations())
        if self._evaluation and (tasks := _tasks(self._evaluation)):
            table.add_row("tasks", Text(tasks, no_wrap=True))
        table.add_row("time", self._time())
        if gpu := self._gpu.text:
            table.add_row("GPU", Text(gpu))
        if counts := fault_counts(self._record):
            table.add_row("faults", Text(faults(counts), "yellow"))
        return Padding(Group(bar, table), (1, 0, 0, 0))

    def _evaluations(self) -> Text:
        parts = []
        if self._evaluation:
            parts.append(Text(_at(self._evaluation)))
        if self._best:
            parts.append(Text.assemble(("best ", "dim"), (_at(self._best), "bold")))
        return Text("   ").join(parts) if parts else Text("–")

    def _time(self) -> Group | Text:
        """Render a bar of coloured cells, and its legend below."""
        shares = main_time_shares(self._record)
        bar, legend = Text(), []
        for part, cells in apportion(shares, min(_BAR_CELLS, self._console.width - 14)).items():
            bar.append("█" * cells, _COLOURS[part])
        for part, share in apportion(shares).items():
            if share:
                legend.append(Text(f"{part} {share} %", _COLOURS[part]))
        return Group(bar, Columns(legend, padding=(0, 2))) if shares else Text("–")

    def _print(self, text: Text) -> None:
        # No wrapping: logs are read with grep, and a terminal wraps lines itself.
        self._console.print(text, soft_wrap=True)


def _at(record: Record) -> str:
    """Return an evaluation as text: 234.09 ± 27.65, success 71 % at 800k."""
    return f"{evaluation_text(record)} at {short_number(record['step'])}"


def _tasks(record: Record) -> str:
    """Return the success rates of an evaluation's tasks: reach-v3 100 %, push-v3 40 %."""
    return ", ".join(f"{task} {percent(share)}" for task, share in task_success(record).items())
