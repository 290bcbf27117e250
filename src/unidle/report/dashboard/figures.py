"""The key figures of a run in words; an unknown one is a –, never 0."""

from __future__ import annotations

from collections.abc import Callable

from unidle.report.dashboard.stretches import Stretch
from unidle.report.history import History, Record, number
from unidle.report.wording import duration, percent, score, short_number

UNKNOWN = "–"
_UNITS = ((1e6, "MJ"), (1e3, "kJ"), (1.0, "J"))


def worded(value: float | None, word: Callable[[float], str]) -> str:
    """A value as `word` writes it."""
    return UNKNOWN if value is None else word(value)


def energy(joules: float) -> str:
    """1,234,000 → 1.23 MJ."""
    scale, unit = next((unit for unit in _UNITS if joules >= unit[0]), _UNITS[-1])
    return f"{joules / scale:.3g} {unit}"


def key_figures(history: History, whole: Stretch | None) -> list[list[str]]:
    """Name, value and detail of each."""
    figures = [
        ["Steps", f"{history.steps:,}", _progress(history)],
        ["Time", duration(history.wall), ""],
        [
            "Steps/s",
            worded(history.steps_per_second, short_number),
            f"latest {worded(latest_rate(history), short_number)}",
        ],
        ["Training return", worded(history.training_return, score), "last 100 episodes"],
        ["Evaluation", _mean_return(history.final_evaluation), f"best {_mean_return(history.best_evaluation)}"],
    ]
    if history.success is not None:
        figures.append(["Success", percent(history.success), "latest evaluation"])
    return [*figures, *_gpu_figures(whole)]


def latest_rate(history: History) -> float | None:
    """Steps per second of the latest iteration."""
    return number(history.iterations[-1], "rollout/steps_per_second") if history.iterations else None


def _gpu_figures(whole: Stretch | None) -> list[list[str]]:
    gpu = whole.gpu if whole else None
    readings = whole.readings if whole else {}
    driver = f"driver reads {percent(readings['utilisation'])}" if "utilisation" in readings else ""
    power = f"{readings['watts']:.0f} W on average" if "watts" in readings else ""
    return [
        ["GPU busy", worded(gpu["busy"] if gpu else None, percent), driver],
        ["GPU energy", worded(whole.joules if whole else None, energy), power],
    ]


def _progress(history: History) -> str:
    total = history.setting("run", "timesteps")
    return f"{percent(history.steps / total)} of {short_number(total)}" if isinstance(total, int) and total else ""


def _mean_return(record: Record | None) -> str:
    return worded(number(record, "eval/return_mean") if record else None, score)
