"""The progress of a sweep, on a terminal and in a pipe."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from unidle.sweeps.display import SweepDisplay
from unidle.sweeps.records import TrialRecord


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def over(number: int, value: float | None, state: Any = "finished", error: str | None = None) -> TrialRecord:
    return TrialRecord(
        number, state, () if value is None else (value,), {"gamma": 0.9}, Path(f"trial-{number}"), 1.0, error=error
    )


def shown(*, is_terminal: bool, earlier: tuple[TrialRecord, ...] = (), quiet: bool = False) -> str:
    """What a sweep of 8 trials shows: one ends, one fails, one is pruned, and one of two seeds is half done."""
    output, clock = io.StringIO(), Clock()
    console = Console(file=output, force_terminal=is_terminal, width=200, highlight=False, color_system=None)
    output.isatty = lambda: is_terminal  # type: ignore[method-assign]
    with SweepDisplay(8, earlier, console, clock, quiet=quiet) as display:
        first = len(earlier)
        for number in range(first, first + 4):
            display.trial_started(number, {"learning_rate": 3e-4, "net_arch": (64, 64)}, 2)
        runs = [display.of(first + 3, f"seed-{seed}") for seed in (0, 1)]
        clock.now = 10.0
        display.trial_ended(over(first, 20.0))
        display.trial_ended(over(first + 1, None, "failed", "no licence"))
        display.trial_ended(over(first + 2, 5.0, "pruned"))
        for run, mean_return in zip(runs, (10.0, 30.0), strict=True):
            run.on_start({}, 1000, 0, None)
            run.on_iteration({"step": 500, "rollout/return_mean": mean_return})
            run.on_evaluation({"step": 500, "eval/return_mean": mean_return + 1, "eval/best": True})
        run.on_message("Episodes are long.")
        runs[0].on_message("Episodes are long.")
        clock.now = 35.0
    return output.getvalue()


def test_pipe_gets_a_line_per_trial() -> None:
    lines = shown(is_terminal=False).splitlines()
    assert lines == [
        "trial 0: finished 20.00  1 of 8 trials  best 20.00, trial 0  10.0 s elapsed  1 min 10 s left  gamma 0.9",
        "Trial 1 failed: no licence",
        "trial 1: failed  2 of 8 trials  1 failed  best 20.00, trial 0  10.0 s elapsed  30.0 s left  gamma 0.9",
        "trial 2: pruned 5.00  3 of 8 trials  1 pruned  1 failed  best 20.00, trial 0  10.0 s elapsed  16.7 s left"
        "  gamma 0.9",
        "seed-1: Episodes are long.",
    ]


def test_terminal_shows_running_trials_with_means_over_their_seeds() -> None:
    last = shown(is_terminal=True).splitlines()[-4:]
    assert any(
        line.split() == ["3", "50", "%", "20.00", "21.00", "learning_rate", "0.0003,", "net_arch", "64,64"]
        for line in last
    )
    # 3.5 trials took 35 seconds, and 4.5 are left
    assert any(
        "3 of 8 trials  1 pruned  1 failed  best 20.00, trial 0  35.0 s elapsed  45.0 s left" in line for line in last
    )


def test_trials_of_an_earlier_process_count_as_done_but_not_for_the_speed() -> None:
    lines = shown(is_terminal=False, earlier=(over(0, 90.0), over(1, 1.0)))
    assert "trial 2: finished 20.00  3 of 8 trials  best 90.00, trial 0  10.0 s elapsed  50.0 s left" in lines


@pytest.mark.parametrize("is_terminal", [True, False])
def test_quiet_shows_only_messages(is_terminal: bool) -> None:
    assert shown(is_terminal=is_terminal, quiet=True).splitlines() == [
        "Trial 1 failed: no licence",
        "seed-1: Episodes are long.",
    ]
