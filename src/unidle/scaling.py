"""Critic scaling: trains the same run once per critic width and plots the final results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from unidle.algos.dormancy import DORMANT
from unidle.api import TrainedRun
from unidle.report.history import number, read_history
from unidle.report.page.svg import Series, line_chart, standalone

_SIZE = (640, 380)


@dataclass(frozen=True)
class Point:
    """The final results of the run with one critic width."""

    critic: int
    step: int
    success: float | None  # of the last evaluation
    dormant: float | None  # share of the critic's neurons at the last evaluation
    mean_return: float | None
    run: str


def compare(critics: Sequence[int], train: Callable[[int], TrainedRun]) -> list[Point]:
    """Train with each critic width in turn, in ascending order."""
    return [_point(width, train(width)) for width in sorted(set(critics))]


def is_finished(run: TrainedRun, timesteps: int) -> bool:
    """Whether the run reached `timesteps` and was evaluated after its last step."""
    history = read_history(run.path)
    final = history.final_evaluation
    return history.steps >= timesteps and final is not None and final["step"] == history.steps


def _point(critic: int, run: TrainedRun) -> Point:
    history = read_history(run.path)
    final = history.final_evaluation or {}
    success, dormant, mean = (number(final, name) for name in ("eval/success", DORMANT, "eval/return_mean"))
    return Point(critic, history.steps, success, dormant, mean, str(run.path))


def chart(points: Sequence[Point], title: str) -> str:
    """Return an SVG chart of final success and dormant neurons over critic width."""
    widths = [float(point.critic) for point in points]
    lines = [
        Series("success", widths, [point.success for point in points]),
        Series("dormant critic neurons", widths, [point.dormant for point in points]),
    ]
    drawn = line_chart(title, lines, "critic width", "share", size=_SIZE, from_zero=True, as_percent=True)
    return standalone(drawn, _SIZE)
