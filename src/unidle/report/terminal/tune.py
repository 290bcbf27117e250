"""The output of `unidle tune`: a live status line, a row per change, and the conclusion."""

from __future__ import annotations

from types import TracebackType

from rich.console import Console
from rich.status import Status

from unidle.tuning.search.changes import Change
from unidle.tuning.search.interval import Interval
from unidle.tuning.search.outcomes import Outcome, Tuned

_WIDTHS = (44, 10, 28)


class TuningDisplay:
    """Prints a row per change with a live status line below; a context manager."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._status = Status("", console=console)

    def __enter__(self) -> TuningDisplay:
        self._status.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._status.stop()

    def on_stage(self, text: str) -> None:
        """Show the current stage."""
        self._status.update(f"{text} …")
        if not self._console.is_terminal:
            self._console.print(f"{text} …", style="dim", soft_wrap=True)

    def on_start(self, tuned: Tuned) -> None:
        """Show the speed of the unchanged job and the table's header."""
        self._console.print(f"Current settings: {_setup_text(tuned)}, {tuned.first_rate:,.0f} steps/s.", soft_wrap=True)
        self._console.print()
        self._console.print(_row("change", "predicted", "measured, 95 % interval", ""), style="bold", soft_wrap=True)

    def on_interim_result(self, change: Change, measured: Interval, pairs: int) -> None:
        """Show the interim result of a change."""
        self._status.update(f"{change.text}: × {measured.mean:.2f} after {pairs} pairs of segments …")

    def on_outcome(self, outcome: Outcome) -> None:
        """Print the row of a change."""
        self._console.print(outcome_row(outcome), style="" if outcome.kept else "dim", soft_wrap=True)


def outcome_row(outcome: Outcome) -> str:
    """Return the row of a change: what changed, its predicted and measured speed-up, and the verdict."""
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


def _setup_text(tuned: Tuned) -> str:
    setup = tuned.setup
    assert setup is not None
    where = "environments on the device"
    if not setup.on_device:
        where = (
            f"{setup.workers} worker{'s' * (setup.workers > 1)}"
            if setup.workers
            else "environments in the trainer's process"
        )
    cores = f"{setup.cores} core{'s' * (setup.cores > 1)}"
    return f"{where}, {cores}, {setup.gpu if setup.on_gpu else 'networks on the CPU'}"


def conclusion(tuned: Tuned, file: str, command: str) -> list[str]:
    """Return the closing lines: the total speed-up, the engine file, and how to use it."""
    kept = [outcome for outcome in tuned.outcomes if outcome.kept]
    ends = {
        "": "All changes were tried",
        "budget": "The budget is used up",
        "Ctrl-C": "Stopped",
        "failure": "Stopped because the current settings failed and could not be restarted",
    }
    lines = [f"{ends[tuned.ended_by]} after {tuned.seconds:.0f} seconds."]
    if kept and not any(outcome.change.is_recipe for outcome in kept):
        lines.append(
            f"{tuned.times_as_fast:.2f} times as fast as before with the same recipe (the product of all kept "
            "speed-ups)."
        )
    elif kept:
        lines.append("The recipe has changed; check that the job still learns as well as before.")
    elif tuned.has_measured:
        return [*lines, f"No change was measurably faster: train as before. The unchanged settings are in {file}."]
    else:
        reasons = {
            "": "No change was promising, or none could be measured",
            "budget": "No change could be measured in that time; give more --budget",
            "Ctrl-C": "No change had been measured yet",
            "failure": "No change could be measured",
        }
        return [*lines, f"{reasons[tuned.ended_by]}. The settings stay the same, and {file} was not written."]
    return [*lines, f"Wrote the settings to {file}; train with:", f"  {command}"]
