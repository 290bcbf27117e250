"""The trials of a sweep as parallel coordinates: one axis per setting, one line per trial; inline SVG."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from unidle.sweeps.objectives import LABELS, is_plottable
from unidle.sweeps.records import TrialRecord, best_of, settings_text, value_text
from unidle.sweeps.space import Choices, Range, Space

_HEIGHT, _TOP, _BOTTOM, _MARGIN = 340, 62, 310, 70
_AXIS_WIDTH = 125  # between two axes
_BEST_SHARE = 0.1  # of the trials, drawn in colour
_MAX_LABELS = 6  # of an axis with choices


def parallel_coordinates(space: Space, trials: Sequence[TrialRecord]) -> str:
    """Return an `<svg>` of the finished trials; the best ones are in colour."""
    known = [t for t in trials if t.state == "finished" and t.values and is_plottable(t.objectives[0], t.values[0])]
    if not known:
        return ""
    ranked, label = sorted(known, key=lambda trial: trial.merits[0]), LABELS[known[0].objectives[0]]
    best, n_coloured = best_of(ranked), max(1, round(_BEST_SHARE * len(ranked)))
    worst, highest = ranked[0].merits[0], ranked[-1].merits[0]
    width = 2 * _MARGIN + _AXIS_WIDTH * len(space.dimensions)
    body = [f'<text class="chart-title" x="2" y="17">Settings of the finished trials, and {escape(label)}</text>']
    for index, dimension in enumerate(space.dimensions):
        body.append(_axis(index, dimension.name, _labels(dimension)))
    ends = [(share, ranked[at].values_in_words[0]) for share, at in ((0.0, 0), (1.0, -1))]
    body.append(_axis(len(space.dimensions), label, ends))
    for rank, trial in enumerate(ranked):
        at = [d.fraction(trial.parameters[d.parameter]) for d in space.dimensions if d.parameter in trial.parameters]
        if len(at) < len(space.dimensions):
            continue
        heights = [*at, (trial.merits[0] - worst) / (highest - worst) if highest > worst else 0.5]
        points = " ".join(f"{_x(i):.1f},{_y(height):.1f}" for i, height in enumerate(heights))
        is_coloured = rank >= len(ranked) - n_coloured
        kind = "line c1" if trial is best else "line c0" if is_coloured else "line faint c5"
        tooltip = f"trial {trial.number}: {trial.values_in_words[0]}, {settings_text(trial.settings)}"
        body.append(f'<polyline class="{kind}" points="{points}"><title>{escape(tooltip)}</title></polyline>')
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="chart" viewBox="0 0 {width} {_HEIGHT}" role="img" '
        f'aria-label="Settings and results of the trials">{"".join(body)}</svg>'
    )


def _x(index: int) -> float:
    return _MARGIN + index * _AXIS_WIDTH


def _y(fraction: float) -> float:
    return _BOTTOM - fraction * (_BOTTOM - _TOP)


def _labels(dimension: Range | Choices) -> list[tuple[float, str]]:
    """Return places on an axis, from 0 at the bottom to 1, and their labels."""
    if isinstance(dimension, Range):
        return [(0.0, value_text(dimension.low)), (1.0, value_text(dimension.high))]
    last = len(dimension.ends) - 1
    shown = range(len(dimension.ends)) if last < _MAX_LABELS else (0, last)
    return [(i / last if last else 0.5, value_text(dimension.ends[i])) for i in shown]


def _axis(index: int, name: str, labels: list[tuple[float, str]]) -> str:
    x = _x(index)
    parts = [
        f'<text class="chart-name" x="{x:.1f}" y="{_TOP - 20}" text-anchor="middle">{escape(name)}</text>',
        f'<line class="chart-zero" x1="{x:.1f}" y1="{_TOP}" x2="{x:.1f}" y2="{_BOTTOM}"/>',
    ]
    for fraction, label in labels:
        y = _y(fraction) + (14 if fraction == 0 else -5 if fraction == 1 else 4)
        dx, anchor = (0, "middle") if fraction in (0, 1) else (5, "start")
        parts.append(f'<text x="{x + dx:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(label)}</text>')
    return "".join(parts)
