"""Schedules: settings that change over a run."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from unidle.config import Recipe

Schedule = Callable[[float], float]  # the part of the run that remains, 1 to 0 → value

_SCHEDULES = {"learning_rate": "lr_schedule", "clip_range": "clip_schedule"}  # setting → the setting of its schedule


def schedules_of(recipe: Recipe) -> dict[str, Schedule]:
    """The schedule of each setting of `recipe` that has one."""
    given = vars(recipe)
    return {
        name: partial(_linear if given[schedule] == "linear" else _constant, given[name])
        for name, schedule in _SCHEDULES.items()
        if schedule in given
    }


def _constant(value: float, remaining: float) -> float:
    return value


def _linear(initial: float, remaining: float) -> float:
    return initial * remaining
