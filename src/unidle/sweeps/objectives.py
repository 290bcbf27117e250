"""What a sweep optimises: the value of a trial under an objective."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean
from typing import Literal

from unidle.formatting import duration, score, short_number
from unidle.report.history import History, number

Objective = Literal["return", "return-per-gpu-second", "time-to-target"]

LABELS: dict[Objective, str] = {
    "return": "return",
    "return-per-gpu-second": "return per GPU second",
    "time-to-target": "time to the target",
}
_NEVER = 1e9  # seconds: a time to the target from here on says that the target was not reached


def is_minimised(objective: Objective) -> bool:
    """Whether a lower value is better."""
    return objective == "time-to-target"


def merit(objective: Objective, value: float) -> float:
    """A value of which higher is better."""
    return -value if is_minimised(objective) else value


def is_plottable(objective: Objective, value: float) -> bool:
    """Whether a value is on the scale of the others: not that of a target that was not reached."""
    return objective != "time-to-target" or value < _NEVER


def value_in_words(objective: Objective, value: float) -> str:
    """A value, for tables and messages."""
    if objective == "time-to-target":
        return duration(value) if value < _NEVER else "not reached"
    return score(value) if objective == "return" else short_number(value, 4)


def return_per_second(mean_return: float, seconds: float) -> float:
    """A return per GPU second; a negative one is multiplied, so that more seconds are worse for it too."""
    seconds = max(seconds, 1e-9)
    return mean_return / seconds if mean_return >= 0 else mean_return * seconds


def measure(
    objective: Objective, runs: Sequence[History], gpu_seconds: Sequence[float], target: float | None
) -> float | None:
    """The value of a trial whose `runs`, one per seed, are complete; None if one of them was not evaluated."""
    finals = [
        None if run.final_evaluation is None else number(run.final_evaluation, "eval/return_mean") for run in runs
    ]
    returns = [value for value in finals if value is not None]
    if len(returns) < len(runs):
        return None
    match objective:
        case "return":
            return fmean(returns)
        case "return-per-gpu-second":
            return fmean(map(return_per_second, returns, gpu_seconds))
        case "time-to-target":
            assert target is not None
            return _mean_time(runs, target)


def _mean_time(runs: Sequence[History], target: float) -> float:
    """The mean time to the target; if some runs do not reach it, a time above all others, by how much they lack."""
    times = [_seconds_to(run, target) for run in runs]
    reached = [seconds for seconds in times if seconds is not None]
    if len(reached) == len(runs):
        return fmean(reached)
    lacking = [max(0.0, target - (run.highest_return or 0.0)) for run in runs]
    return _NEVER + fmean(lacking)


def _seconds_to(run: History, target: float) -> float | None:
    for record in run.evaluations:
        mean_return, wall = number(record, "eval/return_mean"), number(record, "wall")
        if mean_return is not None and wall is not None and mean_return >= target:
            return wall + (number(record, "eval/seconds_behind") or 0.0)
    return None
