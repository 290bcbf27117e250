"""Progress of a sweep: a table of the running trials on a terminal or in a notebook, else a line per trial."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from unidle.formatting import MISSING, duration, score
from unidle.groups.display import MemberDisplay
from unidle.report.history import number
from unidle.report.terminal.live import live_view, progress_console
from unidle.report.terminal.messages import Messages
from unidle.report.terminal.summary import print_facts
from unidle.sweeps.records import TrialRecord, best_of, settings_text

_TABLE_EVERY = 0.5  # seconds
_MAX_ROWS = 24


@dataclass
class _Row:
    """A running trial."""

    settings: str
    n_runs: int  # also those that start later
    runs: list[MemberDisplay] = field(default_factory=list)

    @property
    def share(self) -> float:
        """How much of it is done."""
        return sum(run.step / run.total for run in self.runs) / self.n_runs


class SweepDisplay:
    """Shows the trials of a sweep; as a context manager it restores the terminal."""

    def __init__(
        self,
        n_trials: int,
        records: Iterable[TrialRecord] = (),
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
        *,
        quiet: bool = False,
    ) -> None:
        """`records`: the trials of earlier processes."""
        self._console = console or progress_console()
        self._n_trials, self._over = n_trials, [record for record in records if record.is_over]
        self._n_before, self._quiet, self._clock = len(self._over), quiet, clock
        self._rows: dict[int, _Row] = {}
        self._live = None if quiet else live_view(self._console)
        self._messages = Messages(lambda text, style: self._console.print(Text(text, style), soft_wrap=True), clock)
        self._said: set[str] = set()
        self._began = self._next_draw = clock()

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._messages.close()
        if self._live is not None:
            self._live.update(self._table(), refresh=True)
            self._live.stop()

    def show_facts(self, facts: dict[str, str]) -> None:
        """Print what the sweep does, before it starts."""
        if not self._quiet:
            print_facts(self._console, facts)

    def trial_started(self, trial: int, settings: dict[str, Any], n_runs: int) -> None:
        """A trial of so many runs starts with these settings."""
        self._rows[trial] = _Row(settings_text(settings), n_runs)

    def of(self, trial: int, name: str) -> MemberDisplay:
        """The display of a run of a trial."""
        self._rows[trial].runs.append(MemberDisplay(self, name))
        return self._rows[trial].runs[-1]

    def trial_ended(self, record: TrialRecord) -> None:
        """A trial is over."""
        self._rows.pop(record.number, None)
        self._over.append(record)
        if record.error is not None:
            self._messages.show(f"Trial {record.number} failed: {record.error}")
        if self._live is not None:
            self._draw()
        elif not self._quiet:
            self._console.print(self._line(record), soft_wrap=True)

    def on_message(self, text: str, name: str | None = None) -> None:
        """Show a message once: runs of one sweep say much the same."""
        if text not in self._said:
            self._said.add(text)
            self._messages.show(text if name is None else f"{name}: {text}")

    def member_started(self, facts: dict[str, Any]) -> None:
        """A run has started."""
        self.draw_if_due()

    def draw_if_due(self) -> None:
        """Draw the table if it is time."""
        if self._live is not None and self._clock() >= self._next_draw:
            self._draw()

    def _draw(self) -> None:
        assert self._live is not None
        self._next_draw = self._clock() + _TABLE_EVERY
        self._live.update(self._table(), refresh=True)

    def _line(self, record: TrialRecord) -> str:
        values = f" {', '.join(record.values_in_words)}" if record.values else ""
        parts = [f"trial {record.number}: {record.state}{values}", *self._totals, settings_text(record.settings)]
        return "  ".join(parts)

    def _table(self) -> Group:
        table = Table(box=None, pad_edge=False, header_style="dim")
        for name, justify in (("trial", "right"), ("", "right"), ("return", "right"), ("evaluation", "right")):
            table.add_column(name, justify=justify)  # type: ignore[arg-type]
        table.add_column("settings", no_wrap=True, overflow="ellipsis")
        for trial, row in list(self._rows.items())[:_MAX_ROWS]:
            returns = _mean(number(run.record, "rollout/return_mean") for run in row.runs)
            best = _mean(None if run.best is None else number(run.best, "eval/return_mean") for run in row.runs)
            table.add_row(str(trial), f"{100 * row.share:.0f} %", returns, best, row.settings)
        return Group(table, Text("  ".join(self._totals), "dim"))

    @property
    def _totals(self) -> list[str]:
        states = Counter(record.state for record in self._over)
        others = [f"{states[state]} {state}" for state in ("pruned", "failed") if states[state]]
        best, left = best_of(self._over), self._seconds_left
        return [
            f"{len(self._over)} of {self._n_trials} trials",
            *others,
            *([f"best {best.values_in_words[0]}, trial {best.number}"] if best else []),
            f"{duration(self._clock() - self._began)} elapsed",
            *([f"{duration(left)} left"] if left else []),
        ]

    @property
    def _seconds_left(self) -> float | None:
        """The time that the remaining trials take, at the speed so far."""
        running = sum(row.share for row in self._rows.values())
        done = len(self._over) - self._n_before + running
        left = self._n_trials - len(self._over) - running
        return left * (self._clock() - self._began) / done if done > 0 and left > 0 else None


def _mean(values: Iterable[float | None]) -> str:
    known = [value for value in values if value is not None]
    return score(sum(known) / len(known)) if known else MISSING
