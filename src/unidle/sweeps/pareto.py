"""The trials of a sweep by two objectives, and those that no other is better than; inline SVG."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from unidle.report.page.axis import Axis, fit_axis
from unidle.sweeps.objectives import LABELS, is_plottable
from unidle.sweeps.records import TrialRecord, front_of, settings_text

_WIDTH, _HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM = 500, 300, 70, 488, 44, 252


def pareto_chart(trials: Sequence[TrialRecord]) -> str:
    """Return an `<svg>` of finished trials: the first objective over the second; the front is in colour."""
    shown = [trial for trial in trials if all(map(is_plottable, trial.objectives, trial.values))]
    if not shown:
        return ""
    vertical, horizontal = (LABELS[objective] for objective in shown[0].objectives[:2])
    x_axis = fit_axis((trial.values[1] for trial in shown), count=6, margin=0.06)
    y_axis = fit_axis((trial.values[0] for trial in shown), count=6, margin=0.06)
    front = front_of(shown)
    title = f"{vertical} over {horizontal}"
    body = [
        f'<text class="chart-title" x="2" y="17">{escape(title)}</text>',
        f'<text class="chart-label" x="2" y="{_TOP - 10}">{escape(vertical)}</text>',
        f'<text class="chart-label" x="{_RIGHT}" y="{_HEIGHT - 8}" text-anchor="end">{escape(horizontal)}</text>',
        *(_tick_x(x_axis, tick) for tick in x_axis.ticks),
        *(_tick_y(y_axis, tick) for tick in y_axis.ticks),
    ]
    if len(front) > 1:
        at = sorted(front, key=lambda trial: trial.values[1])
        points = " ".join(f"{_x(x_axis, trial):.1f},{_y(y_axis, trial):.1f}" for trial in at)
        body.append(f'<polyline class="line faint c0" points="{points}"/>')
    for trial in shown:
        is_best = any(trial is each for each in front)
        tooltip = f"trial {trial.number}: {', '.join(trial.values_in_words)}; {settings_text(trial.settings)}"
        body.append(
            f'<circle class="fill {"c0" if is_best else "c5"}" cx="{_x(x_axis, trial):.1f}" '
            f'cy="{_y(y_axis, trial):.1f}" r="{5 if is_best else 3.5}"><title>{escape(tooltip)}</title></circle>'
        )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="chart" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" '
        f'aria-label="{escape(title)}">{"".join(body)}</svg>'
    )


def _x(axis: Axis, trial: TrialRecord) -> float:
    return _LEFT + axis.fraction(trial.values[1]) * (_RIGHT - _LEFT)


def _y(axis: Axis, trial: TrialRecord) -> float:
    return _BOTTOM - axis.fraction(trial.values[0]) * (_BOTTOM - _TOP)


def _tick_x(axis: Axis, tick: float) -> str:
    x = _LEFT + axis.fraction(tick) * (_RIGHT - _LEFT)
    return f'<text x="{x:.1f}" y="{_BOTTOM + 18}" text-anchor="middle">{escape(axis.label(tick))}</text>'


def _tick_y(axis: Axis, tick: float) -> str:
    y = _BOTTOM - axis.fraction(tick) * (_BOTTOM - _TOP)
    return (
        f'<line class="chart-grid" x1="{_LEFT}" y1="{y:.1f}" x2="{_RIGHT}" y2="{y:.1f}"/>'
        f'<text x="{_LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{escape(axis.label(tick))}</text>'
    )
