"""The key figures of a run as text; unknown ones are shown as –, never as 0."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime

from unidle.formatting import duration, percent, score, short_number
from unidle.report.dashboard.segments import Segment
from unidle.report.history import History, Record, evaluation_text, number

UNKNOWN = "–"
_GPU_READINGS = {"utilisation", "watts", "joules", "memory_bytes", "sm"}
_UNITS = ((1e6, "MJ"), (1e3, "kJ"), (1.0, "J"))


def format_or_dash(value: float | None, formatter: Callable[[float], str]) -> str:
    """Format a value with `formatter`; – if it is unknown."""
    return UNKNOWN if value is None else formatter(value)


def energy(joules: float) -> str:
    """1,234,000 → 1.23 MJ."""
    scale, unit = next((unit for unit in _UNITS if joules >= unit[0]), _UNITS[-1])
    return f"{joules / scale:.3g} {unit}"


def memory(size: float) -> str:
    """Bytes → 3.1 GiB."""
    return f"{size / 2**30:.3g} GiB"


def date_and_time(seconds: float) -> str:
    """Seconds since 1970 → 2026-03-01 16:04."""
    return datetime.fromtimestamp(seconds).strftime("%Y-%m-%d %H:%M")


def key_figures(history: History, whole: Segment | None) -> list[list[str]]:
    """Return name, value and detail of each figure."""
    figures = [
        ["Steps", f"{history.steps:,}", history.progress],
        ["Time", duration(history.wall), ""],
        [
            "Steps/s",
            format_or_dash(history.steps_per_second, short_number),
            f"latest {format_or_dash(_latest_rate(history), short_number)}",
        ],
        ["Training return", format_or_dash(history.training_return, score), "last 100 episodes"],
        ["Evaluation", _mean_return(history.final_evaluation), f"best {_best(history.best_evaluation)}"],
    ]
    if history.success is not None:
        figures.append(["Success", percent(history.success), "latest evaluation"])
    return [*figures, *_machine_figures(whole)]


def _latest_rate(history: History) -> float | None:
    """Return the steps per second of the latest iteration."""
    return number(history.iterations[-1], "rollout/steps_per_second") if history.iterations else None


def _machine_figures(whole: Segment | None) -> list[list[str]]:
    gpu = whole.gpu if whole else None
    readings = whole.readings if whole else {}
    details = {"by the driver": readings.get("utilisation"), "SMs active": readings.get("sm")}
    others = ", ".join(f"{who} {percent(share)}" for who, share in details.items() if share is not None)
    power = f"{readings['watts']:.0f} W on average" if "watts" in readings else ""
    total = readings.get("memory_total_bytes")
    cores = [["CPU cores", f"{readings['cores']:.1f}", "in use on average"]] if "cores" in readings else []
    if gpu is None and not readings.keys() & _GPU_READINGS:
        return cores  # without a GPU, or without the meter
    return [
        ["GPU busy", format_or_dash(gpu["busy"] if gpu else None, percent), others],
        ["GPU energy", format_or_dash(whole.joules if whole else None, energy), power],
        ["GPU memory", format_or_dash(readings.get("memory_bytes"), memory), f"of {memory(total)}" if total else ""],
        *cores,
    ]


def _best(record: Record | None) -> str:
    return UNKNOWN if record is None else evaluation_text(record, spread=False)


def _mean_return(record: Record | None) -> str:
    return format_or_dash(number(record, "eval/return_mean") if record else None, score)
