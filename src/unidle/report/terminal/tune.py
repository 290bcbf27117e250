"""What `unidle tune` shows: a line that moves while it measures, a row for each change, and what came out."""

from __future__ import annotations

from types import TracebackType

from rich.console import Console
from rich.status import Status

from unidle.tuning.search.changes import Change
from unidle.tuning.search.interval import Interval
from unidle.tuning.search.outcomes import Outcome, Tuned

_WIDTHS = (44, 10, 28)


class TuningDisplay:
    """Rows as they come, and below them what is going on; a context."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._status = Status("", console=console)

    def __enter__(self) -> TuningDisplay:
        self._status.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._status.stop()

    def on_stage(self, text: str) -> None:
        """Something that takes a while begins."""
        self._status.update(f"{text} …")
        if not self._console.is_terminal:
            self._console.print(f"{text} …", style="dim", soft_wrap=True)

    def on_start(self, tuned: Tuned) -> None:
        """The job was measured as it is."""
        self._console.print(f"As it is: {_situation(tuned)}, {tuned.first_rate:,.0f} steps/s.", soft_wrap=True)
        self._console.print()
        self._console.print(_row("change", "predicted", "measured, 95 % interval", ""), style="bold", soft_wrap=True)

    def on_look(self, change: Change, measured: Interval, pairs: int) -> None:
        """So much is known of a change by now."""
        self._status.update(f"{change.text}: {measured.mean:.2f} times as fast after {pairs} pairs of stretches …")

    def on_outcome(self, outcome: Outcome) -> None:
        """A change is settled."""
        self._console.print(outcome_row(outcome), style="" if outcome.kept else "dim", soft_wrap=True)


def outcome_row(outcome: Outcome) -> str:
    """What was changed, what was expected, what came of it."""
    predicted = "–" if outcome.predicted is None else f"× {outcome.predicted:.2f}"
    verdict = outcome.note or ("kept" if outcome.kept else "not kept")
    return _row(outcome.change.text, predicted, _measured(outcome), verdict)


def _measured(outcome: Outcome) -> str:
    found = outcome.measured
    if found is None:
        return "–"
    if outcome.change.is_recipe:
        return f"{found.mean:+.3g} return/s ({found.low:.3g} … {found.high:.3g})"
    if found.high > 1000:  # too few pairs to say
        return f"× {found.mean:.2f} (unclear)"
    return f"× {found.mean:.2f} ({found.low:.2f} … {found.high:.2f})"


def _row(*cells: str) -> str:
    return "  ".join([*(f"{cell:<{width}}" for cell, width in zip(cells, _WIDTHS)), cells[-1]]).rstrip()


def _situation(tuned: Tuned) -> str:
    seen = tuned.situation
    assert seen is not None
    where = "environments on the device"
    if not seen.on_device:
        where = (
            f"{seen.workers} worker{'s' * (seen.workers > 1)}"
            if seen.workers
            else "environments in the trainer's process"
        )
    cores = f"{seen.cores} core{'s' * (seen.cores > 1)}"
    return f"{where}, {cores}, {seen.gpu if seen.on_gpu else 'networks on the CPU'}"


def conclusion(tuned: Tuned, file: str, command: str) -> list[str]:
    """The last lines: what it was worth, where it is kept, and how to use it."""
    kept = [outcome for outcome in tuned.outcomes if outcome.kept]
    ends = {
        "": "Nothing is left to try",
        "budget": "The budget is used",
        "Ctrl-C": "Stopped",
        "failure": "Stopped, because the present settings failed and did not start again",
    }
    lines = [f"{ends[tuned.ended_by]}, after {tuned.seconds:.0f} seconds."]
    if kept and not any(outcome.change.is_recipe for outcome in kept):
        lines.append(
            f"{tuned.times_as_fast:.2f} times as fast as before, by the same recipe: that is the product of the ratios "
            "of what was kept."
        )
    elif kept:
        lines.append("The recipe is another one now: what it learns in the end is for you to check.")
    elif tuned.has_measured:
        lines.append("No change was measured to be faster: the settings stay as they were.")
    else:
        whys = {
            "": "No change was worth measuring, or none could be",
            "budget": "No change could be measured in that time; give more --budget",
            "Ctrl-C": "No change had been measured by then",
            "failure": "No change could be measured",
        }
        return [*lines, f"{whys[tuned.ended_by]}. The settings stay as they were, and {file} was not written."]
    return [*lines, f"{file} holds them; train with:", f"  {command}"]
