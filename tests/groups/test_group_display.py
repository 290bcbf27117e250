"""What a group of runs shows while it trains."""

from __future__ import annotations

import io
import re
from typing import Any

import pytest
from rich.console import Console

from unidle.groups.display import GroupDisplay, group_facts

FACTS = {"run": "runs/a/seed-1", "environment": "CartPole-v1, in this process"}


class Clock:
    """A clock that tests set."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def shown() -> tuple[GroupDisplay, Clock, io.StringIO]:
    out, clock = io.StringIO(), Clock()
    display = GroupDisplay(["seed-1", "seed-2"], Console(file=out, width=200), clock)
    return display, clock, out


def iteration(step: int, mean: float) -> dict[str, Any]:
    return {"step": step, "rollout/return_mean": mean}


def test_facts_are_printed_once_and_lines_sum_over_runs(shown: tuple[GroupDisplay, Clock, io.StringIO]) -> None:
    display, clock, out = shown
    with display:
        for name in ("seed-1", "seed-2"):
            display.of(name).on_start({**FACTS, "run": f"runs/a/{name}"}, 1000, 0, None)
        clock.now = 5.0
        display.of("seed-1").on_iteration(iteration(200, 10.0))
        clock.now = 10.0
        display.of("seed-2").on_iteration(iteration(300, 30.0))
        clock.now = 20.0
        display.of("seed-1").on_iteration(iteration(1000, 12.0))
        display.of("seed-1").on_end()
    text = out.getvalue()
    assert text.count("CartPole-v1") == 1
    assert "2 in runs/a: seed-1, seed-2" in text
    assert "2 runs  25 %  step 500 of 2k  10.0 s elapsed  return 10.00 to 30.00" in text
    assert "step 1.3k of 2k  80 steps/s  20.0 s elapsed  8.8 s left  return 12.00 to 30.00" in text
    assert "2 runs, 1 done" in text.splitlines()[-1]


def test_failed_run_is_not_called_done(shown: tuple[GroupDisplay, Clock, io.StringIO]) -> None:
    display, _, out = shown
    terminal = io.StringIO()
    console = Console(file=terminal, width=200, force_terminal=True, force_interactive=True)
    terminal.isatty = lambda: True  # type: ignore[method-assign]
    for each in (display, GroupDisplay(["seed-1", "seed-2"], console, Clock())):
        with each:
            for name in ("seed-1", "seed-2"):
                each.of(name).on_start(FACTS, 1000, 0, None)
                each.of(name).on_end()
            each.of("seed-2").on_failure("This simulator needs a licence.")
    assert "2 runs, 1 done, 1 failed" in out.getvalue().splitlines()[-1]
    assert "seed-2: Failed, and the other runs continue: This simulator needs a licence." in out.getvalue()
    shown_states = [line.split()[2] for line in terminal.getvalue().splitlines() if re.match(r".*seed-[12] +0 ", line)]
    assert shown_states[-2:] == ["done", "failed"]


def test_message_of_several_runs_is_shown_once(shown: tuple[GroupDisplay, Clock, io.StringIO]) -> None:
    display, _, out = shown
    with display:
        display.of("seed-1").on_message("only 4 iterations")
        display.of("seed-2").on_message("only 4 iterations")
        display.of("seed-2").on_message("worker killed")
    assert out.getvalue().splitlines() == ["seed-1: only 4 iterations", "seed-2: worker killed"]


def test_quiet_group_shows_messages_only() -> None:
    out, clock = io.StringIO(), Clock()
    with GroupDisplay(["seed-1"], Console(file=out, width=200), clock, quiet=True) as display:
        display.of("seed-1").on_start(FACTS, 100, 0, None)
        clock.now = 60.0
        display.of("seed-1").on_iteration(iteration(50, 1.0))
        display.of("seed-1").on_message("a note")
    assert out.getvalue() == "seed-1: a note\n"


def test_facts_at_the_end_name_interval_and_extremes() -> None:
    spread = {"iqm": 450.0, "low": 400.0, "high": 500.0, "worst": 120.0, "best": 500.0}
    unknown = dict.fromkeys(spread)
    summary = {"n_runs": 4, "finished": 3, "steps": 4000, "wall_seconds": 12.0}
    facts = group_facts({**summary, "final_evaluation": spread, "best_evaluation": unknown})
    assert facts == {
        "runs": "3 of 4 finished",
        "steps": "4,000 in all, in 12.0 s",
        "final evaluation": "interquartile mean 450.00 (95 %: 400.00 to 500.00), worst 120.00, best 500.00",
    }
