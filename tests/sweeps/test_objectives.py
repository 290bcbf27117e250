"""How trials are judged."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from unidle.engine.turns import IsReady
from unidle.report.history import History
from unidle.sweeps.objectives import is_plottable, measure, merit, return_per_second, value_in_words
from unidle.sweeps.turn_clock import TurnClock


def run(*evaluations: tuple[float, float]) -> History:
    """A run whose evaluations have these wall times and returns."""
    records: list[dict[str, Any]] = [
        {"step": 10 * (i + 1), "wall": wall, "eval/return_mean": mean} for i, (wall, mean) in enumerate(evaluations)
    ]
    return History(Path("run"), {}, [], records, [])


def test_returns_are_means_over_seeds_of_the_last_evaluations() -> None:
    runs = [run((1.0, 5.0), (2.0, 10.0)), run((1.0, 50.0), (2.0, 30.0))]
    assert measure("return", runs, (), None) == 20.0
    assert measure("return-per-gpu-second", runs, (2.0, 10.0), None) == 4.0
    assert measure("return", [*runs, run()], (), None) is None


def test_more_seconds_are_worse_for_negative_returns_too() -> None:
    assert return_per_second(-100.0, 10.0) > return_per_second(-100.0, 20.0) > return_per_second(-200.0, 20.0)
    assert return_per_second(100.0, 10.0) > return_per_second(100.0, 20.0) > return_per_second(-1.0, 1.0)


def test_time_to_target_ranks_runs_that_miss_it_by_how_close_they_came() -> None:
    fast, slow = run((1.0, 5.0), (2.0, 10.0)), run((1.0, 5.0), (4.0, 11.0), (5.0, 3.0))
    near, far = run((1.0, 9.0), (2.0, 8.0)), run((1.0, 2.0))
    values = [measure("time-to-target", [each], (), 10.0) for each in (fast, slow, near, far)]
    assert values[:2] == [2.0, 4.0]
    merits = [merit("time-to-target", value) for value in values if value is not None]
    assert merits == sorted(merits, reverse=True)
    both = measure("time-to-target", [fast, near], (), 10.0)
    assert both is not None
    assert not is_plottable("time-to-target", both)
    assert value_in_words("time-to-target", both) == "not reached"
    assert measure("time-to-target", [fast, slow], (), 10.0) == 3.0


def test_clock_counts_turns_but_not_what_others_do_between_them() -> None:
    def turns() -> Iterator[IsReady | None]:
        try:
            for _ in range(3):
                time.sleep(0.02)
                seen.append(clock.seconds)
                yield None
        finally:
            closed.append(True)

    clock, seen, closed = TurnClock(None, seconds=5.0), [], []
    timed = clock.timed(turns())  # type: ignore[arg-type]
    for _ in range(2):
        next(timed)
        time.sleep(0.2)
    assert 5.04 <= clock.seconds < 5.2
    assert 5.02 <= seen[0] < 5.04 <= seen[1]
    timed.close()
    assert closed == [True]
    assert 5.04 <= clock.seconds < 5.2


@pytest.mark.gpu
def test_clock_waits_for_the_gpu() -> None:
    import torch

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        a = torch.randn(8192, 8192, device="cuda")
        torch.cuda.synchronize()

        def turns() -> Iterator[IsReady | None]:
            for _ in range(20):
                torch.mm(a, a)
            yield None

        clock = TurnClock(stream)
        began = time.perf_counter()
        next(clock.timed(turns()))  # type: ignore[arg-type]
        queued = time.perf_counter() - began
        torch.cuda.synchronize()
        done = time.perf_counter() - began
    assert queued < clock.seconds <= done
