"""Progress of a group of runs: a table on a terminal or in a notebook, one line for all of them in a pipe or a log."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

from rich.console import Console
from rich.table import Table
from rich.text import Text

from unidle.engine.callbacks import SilentDisplay
from unidle.formatting import duration, score, short_number
from unidle.report.history import Record, evaluation_text, number
from unidle.report.terminal.live import live_view, progress_console
from unidle.report.terminal.messages import Messages
from unidle.report.terminal.summary import print_facts

_TABLE_EVERY, _LINE_EVERY = 0.5, 10.0  # seconds
_RATE_WINDOW = 30.0  # seconds over which speed is averaged
_MAX_ROWS = 24  # of the table: the others are in the total
_MAX_NAMES = 8  # of runs, in the first line


class Board(Protocol):
    """Shows several runs together."""

    def on_message(self, text: str, name: str | None = None) -> None:
        """Show a message, of all or of the run `name`."""

    def member_started(self, facts: dict[str, Any]) -> None:
        """A run has started."""

    def draw_if_due(self) -> None:
        """Draw if it is time."""


class MemberDisplay(SilentDisplay):
    """What one run shows, as a row of the table."""

    def __init__(self, group: Board, name: str) -> None:
        self.name = name
        self.step, self.total = 0, 1
        self.record: Record = {}
        self.best: Record | None = None
        self.state: str | None = None  # None while it trains
        self._group = group

    def on_start(self, facts: dict[str, str], total_steps: int, step: int, best: Record | None) -> None:
        """The run starts, or resumes at `step`."""
        self.step, self.total, self.best, self.state = step, max(1, total_steps), best, None
        self._group.member_started(facts)

    def on_iteration(self, record: Record) -> None:
        """An iteration is done."""
        self.record, self.step = record, record["step"]
        self._group.draw_if_due()

    def on_evaluation(self, record: Record) -> None:
        """An evaluation is done."""
        if record.get("eval/best") and number(record, "eval/return_mean") is not None:
            self.best = record

    def on_message(self, text: str) -> None:
        """Show a message, once if several runs have the same one."""
        self._group.on_message(text, self.name)

    def on_end(self) -> None:
        """The run is over."""
        self.state = "done"

    def on_failure(self, reason: str) -> None:
        """The run has failed."""
        self.state = "failed"
        self.on_message(f"Failed, and the other runs continue: {reason}")


class GroupDisplay:
    """Shows the progress of all runs of a group; as a context manager it restores the terminal."""

    def __init__(
        self,
        names: Sequence[str],
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
        *,
        quiet: bool = False,
    ) -> None:
        self._console = console or progress_console()
        self._members = {name: MemberDisplay(self, name) for name in names}
        self._quiet, self._clock = quiet, clock
        self._live = live_view(self._console)
        self._messages = Messages(lambda text, style: self._console.print(Text(text, style), soft_wrap=True), clock)
        self._said: set[str] = set()
        self._began = self._next_draw = clock()
        self._samples: deque[tuple[float, int]] = deque()  # (time, steps of all runs)
        self._n_started = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._messages.close()
        if self._n_started and not self._quiet:
            self._draw(self._clock())
        if self._live is not None and self._live.is_started:
            self._live.stop()

    def of(self, name: str) -> MemberDisplay:
        """The display of one run."""
        return self._members[name]

    def on_message(self, text: str, name: str | None = None) -> None:
        """Show a message, of the group or of the run `name`."""
        if text not in self._said:  # runs of one recipe say much the same
            self._said.add(text)
            self._messages.show(text if name is None else f"{name}: {text}")

    def member_started(self, facts: dict[str, Any]) -> None:
        """Print the facts that all runs share, when the first of them starts."""
        self._n_started += 1
        if self._n_started > 1 or self._quiet:
            return
        names = list(self._members)
        few = ", ".join(names if len(names) <= _MAX_NAMES else [*names[: _MAX_NAMES - 1], "…"])
        folder = Path(facts["run"]).parent
        print_facts(self._console, {**facts, "run": f"{len(names)} in {folder}: {few}"})
        self._began = self._clock()
        self._next_draw = self._began + (_LINE_EVERY if self._live is None else _TABLE_EVERY)
        if self._live is not None:
            self._live.start()

    def draw_if_due(self) -> None:
        """Draw if it is time."""
        now = self._clock()
        if now >= self._next_draw and not self._quiet:
            self._draw(now)

    def _draw(self, now: float) -> None:
        self._next_draw = now + (_LINE_EVERY if self._live is None else _TABLE_EVERY)
        self._samples.append((now, sum(member.step for member in self._members.values())))
        while len(self._samples) > 2 and self._samples[1][0] <= now - _RATE_WINDOW:
            self._samples.popleft()
        if self._live is None:
            self._console.print(self._line(now), soft_wrap=True)
        else:
            self._live.update(self._table(now), refresh=True)

    @property
    def _rate(self) -> float | None:
        """Steps per second of all runs together."""
        (start, first), (end, last) = self._samples[0], self._samples[-1]
        return (last - first) / (end - start) if last > first else None

    def _totals(self, now: float) -> list[str]:
        members = self._members.values()
        steps, rate = sum(m.step for m in members), self._rate
        total = max(1, sum(m.step if m.state == "failed" else m.total for m in members))  # a failed run goes no further
        left = f"{duration((total - steps) / rate)} left" if rate and steps < total else None
        parts = [
            f"{min(100, 100 * steps // total)} %",
            f"step {short_number(steps, 4)} of {short_number(total)}",
            f"{short_number(rate)} steps/s" if rate else None,
            f"{duration(now - self._began)} elapsed",
            left,
        ]
        return [part for part in parts if part]

    def _line(self, now: float) -> str:
        returns = [r for m in self._members.values() if (r := number(m.record, "rollout/return_mean")) is not None]
        spread = f"return {score(min(returns))} to {score(max(returns))}" if returns else None
        states = Counter(member.state for member in self._members.values())
        over = [f"{states[state]} {state}" for state in ("done", "failed") if states[state]]
        runs = ", ".join([f"{len(self._members)} runs", *over])
        return "  ".join(part for part in (f"{runs:>7}", *self._totals(now), spread) if part)

    def _table(self, now: float) -> Table:
        table = Table(box=None, pad_edge=False, header_style="dim")
        for name, justify in (
            ("run", "left"),
            ("steps", "right"),
            ("", "right"),
            ("return", "right"),
            ("best", "left"),
        ):
            table.add_column(name, justify=justify)  # type: ignore[arg-type]
        for member in list(self._members.values())[:_MAX_ROWS]:
            mean = number(member.record, "rollout/return_mean")
            table.add_row(
                member.name,
                short_number(member.step, 4),
                member.state or f"{100 * member.step // member.total} %",
                "–" if mean is None else score(mean),
                "–"
                if member.best is None
                else f"{evaluation_text(member.best)} at {short_number(member.best['step'])}",
            )
        hidden = len(self._members) - _MAX_ROWS
        if hidden > 0:
            table.add_row(f"and {hidden} more")
        table.caption, table.caption_justify = "  ".join(self._totals(now)), "left"
        return table


def group_facts(summary: dict[str, Any]) -> dict[str, str]:
    """The statistics over the runs (groups/statistics.py), as text."""
    facts = {"runs": f"{summary['finished']} of {summary['n_runs']} finished"}
    if summary["wall_seconds"]:
        facts["steps"] = f"{summary['steps']:,} in all, in {duration(summary['wall_seconds'])}"
    for name in ("best_evaluation", "final_evaluation"):
        values = summary[name]
        if values["iqm"] is not None:
            interval = "" if values["low"] is None else f" (95 %: {score(values['low'])} to {score(values['high'])})"
            spread = f"worst {score(values['worst'])}, best {score(values['best'])}"
            facts[name.replace("_", " ")] = f"interquartile mean {score(values['iqm'])}{interval}, {spread}"
    return facts
