"""Charts as inline SVG with the standard library only; `style.py` defines their colours."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from html import escape
from itertools import pairwise

from unidle.formatting import percent, short_number
from unidle.report.page.axis import Axis, fit_axis, plottable, running_mean, thinned_indices
from unidle.report.page.phase_colours import Style, phase_style, series_style
from unidle.report.page.style import CHART_CSS, HATCHES, PALETTE

Values = Sequence[float | None]

_DRAWN_POINTS = 1000  # per line; more cannot be distinguished on a screen
_HOVER_STRIPS = 100  # per chart; each takes a few hundred bytes
SMOOTH_FROM = 100  # points; shorter series need no smoothing
_DOTTED_BELOW = 80  # points; shorter series show dots
_CHARACTER = 6.3  # mean character width of the labels' font; SVG cannot measure text


@dataclass(frozen=True)
class Series:
    """One line: None, NaN and infinity in `y` are gaps. `low` and `high` bound a shaded band.

    Without a `style` it gets a colour by its index in the chart. `thin` series are drawn below the others, without
    dots on their lines; their names are shown when the pointer is on them. Series that are not `in_legend` are not in
    the plot's tooltips either.
    """

    name: str
    x: Sequence[float]
    y: Values
    low: Values | None = None
    high: Values | None = None
    style: Style | None = None
    thin: bool = False
    in_legend: bool = True

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to draw."""
        return not any(plottable(value) for value in self.y)


@dataclass(frozen=True)
class Reference:
    """A horizontal reference line, such as a target."""

    y: float
    label: str


@dataclass(frozen=True)
class _Frame:
    """The plot's position in the picture, and its axes."""

    left: float
    right: float
    top: float
    bottom: float
    x_axis: Axis
    y_axis: Axis

    def x(self, value: float) -> float:
        return self.left + self.x_axis.fraction(value) * (self.right - self.left)

    def y(self, value: float) -> float:
        return self.bottom - self.y_axis.fraction(value) * (self.bottom - self.top)


def line_chart(
    title: str,
    series: list[Series],
    x_label: str,
    y_label: str,
    *,
    size: tuple[int, int] = (500, 300),
    reference: Reference | None = None,
    from_zero: bool = False,
    stacked: bool = False,
    as_percent: bool = False,
    smooth: bool = False,
) -> str:
    """Return an `<svg>` of `series` over x from 0.

    `from_zero` includes y = 0, `stacked` stacks the series as filled areas, and `smooth` draws long ones faintly under
    their running mean over a fiftieth of the points.
    """
    width, height = size
    styles = [line.style or series_style(i) for i, line in enumerate(series)]
    drawn = _stack(series) if stacked else series
    has_data = any(not line.is_empty for line in series)
    named = [(style, line.name) for line, style in zip(series, styles) if line.in_legend and not line.is_empty]
    legend, legend_height = _legend(named, width) if len(series) > 1 else ("", 0)
    head = _text(2, 17, title, "chart-title") + legend
    if not has_data:
        empty = _text(width / 2, height / 2 + 10, "no data yet", "chart-empty", anchor="middle")
        return _svg(title, size, head + empty)

    bounds: list[float | None] = [reference.y] if reference else []
    for line in drawn:
        bounds += [*line.y, *(line.low or ()), *(line.high or ())]
    y_axis = fit_axis(bounds, count=6, from_zero=from_zero or stacked, margin=0.0 if stacked else 0.06)
    labels = [percent(tick) if as_percent else y_axis.label(tick) for tick in y_axis.ticks]
    frame = _Frame(
        left=max(28.0, 10 + _CHARACTER * max(map(len, labels))),
        right=width - 12,
        top=54 + legend_height,
        bottom=height - 40,
        x_axis=fit_axis((x for s in series for x in s.x), count=width // 75, from_zero=True),
        y_axis=y_axis,
    )
    body = [head, _text(2, frame.top - 15, y_label, "chart-label"), _axes(frame, labels, x_label)]
    body += [_thin_line(frame, line, style) for line, style in zip(drawn, styles) if line.thin]
    body += [_band(frame, line, style, "area" if stacked else "band") for line, style in zip(drawn, styles)]
    body += [_line(frame, line, style, smooth) for line, style in zip(drawn, styles) if not line.thin]
    if reference:
        body.append(_reference(frame, reference))
    body.append(_hover(frame, series, drawn, styles, x_label, as_percent))
    return _svg(title, size, "".join(body))


def standalone(chart: str, size: tuple[int, int]) -> str:
    """Return a chart as a standalone file with the report page's style sheet and hatches."""
    width, height = size[0] + 28, size[1] + 20
    font = ".chart { font-family: system-ui, sans-serif; background: var(--card); }"
    start, view_box, rest = chart.partition(f'viewBox="0 0 {size[0]} {size[1]}"')
    if not view_box:
        raise ValueError(f"the chart is not of size {size}")
    frame = f'viewBox="-14 -10 {width} {height}" width="{width}" height="{height}"'
    opening, body = rest.split(">", 1)
    return f"{start}{frame}{opening}><style>{PALETTE}{CHART_CSS}{font}</style>{HATCHES}{body}"


def stacked_bar(title: str, shares: dict[str, float], *, size: tuple[int, int] = (380, 270)) -> str:
    """Return an `<svg>` of one bar divided by `shares` of phases (they sum to 1), with a legend below."""
    width, height = size
    body = [_text(2, 17, title, "chart-title")]
    if not shares:
        body.append(_text(width / 2, height / 2 + 10, "no data yet", "chart-empty", anchor="middle"))
    left, top, bar = 2.0, 36, 26
    row = min(26.0, (height - top - bar - 14) / max(1, len(shares)))
    for i, (name, share) in enumerate(shares.items()):
        part, style = share * (width - 4), phase_style(name)
        hint = f"<title>{escape(name)}: {percent(share)}</title>"
        # A hairline gap separates neighbours for readers who cannot distinguish their colours.
        body.append(_filled(left, top, part - 1.5, bar, style, hint))
        left += part
        y = top + bar + 12 + (i + 0.5) * row
        body.append(_swatch(2, y - 5, style) + _text(20, y + 4, name, "chart-name"))
        body.append(_text(width - 2, y + 4, percent(share), "chart-figure", anchor="end"))
    return _svg(title, size, "".join(body))


def _stack(series: list[Series]) -> list[Series]:
    """Stack the series as bands; all must share their x."""
    floor = [0.0] * len(series[0].x) if series else []
    layers = []
    for line in series:
        top = [below + (y if plottable(y) else 0.0) for below, y in zip(floor, line.y)]
        layers.append(replace(line, y=top, low=floor, high=top))
        floor = top
    return layers


def _legend(named: list[tuple[Style, str]], width: int) -> tuple[str, int]:
    """Return swatches and names in rows, and their height."""
    parts, x, y = [], 2.0, 40
    for style, name in named:
        needed = 18 + _CHARACTER * len(name) + 12
        if x > 2 and x + needed > width:
            x, y = 2.0, y + 18
        parts.append(_swatch(x, y - 9, style) + _text(x + 15, y, name, "chart-name"))
        x += needed
    return "".join(parts), y - 16 if named else 0


def _axes(frame: _Frame, y_labels: list[str], x_label: str) -> str:
    parts = [_rule(frame.left, frame.bottom, frame.right, frame.bottom, "chart-zero")]
    for tick, label in zip(frame.y_axis.ticks, y_labels):
        y = frame.y(tick)
        kind = "chart-zero" if tick == 0 else "chart-grid"
        parts.append(_rule(frame.left, y, frame.right, y, kind))
        parts.append(_text(frame.left - 7, y + 4, label, "chart-tick", anchor="end"))
    for tick in frame.x_axis.ticks:
        x = frame.x(tick)
        parts.append(_rule(x, frame.bottom, x, frame.bottom + 4, "chart-zero"))
        label = frame.x_axis.label(tick)
        # A label at the right end would overflow the picture.
        overhang = x + _CHARACTER * len(label) / 2 - frame.right - 10
        parts.append(_text(x - max(0.0, overhang), frame.bottom + 17, label, "chart-tick", anchor="middle"))
    middle = (frame.left + frame.right) / 2
    parts.append(_text(middle, frame.bottom + 35, x_label, "chart-label", anchor="middle"))
    return "".join(parts)


def _thin_line(frame: _Frame, line: Series, style: Style) -> str:
    kind = "line thin" if line.in_legend else "line thin faint"
    return _path(frame, line.x, line.y, f"{kind} {style.colour}", line.name)


def _line(frame: _Frame, line: Series, style: Style, smooth: bool) -> str:
    if not smooth or len(line.y) < SMOOTH_FROM:
        return _path(frame, line.x, line.y, f"line {style.colour}")
    mean = running_mean(line.y, len(line.y) // 50)
    faint = _path(frame, line.x, line.y, f"line faint {style.colour}")
    return faint + _path(frame, line.x, mean, f"line {style.colour}")


def _path(frame: _Frame, xs: Sequence[float], ys: Values, kind: str, tip: str = "") -> str:
    path, pen = [], "M"
    for i in thinned_indices(ys, _DRAWN_POINTS):
        y = ys[i]
        if not plottable(y):
            pen = "M"
            continue
        at = f"{frame.x(xs[i]):.1f},{frame.y(y):.1f}"
        # A single point between two gaps is a line to itself: round caps make it a dot.
        path.append(f"M{at}L{at}" if pen == "M" else f"L{at}")
        pen = "L"
    inner = f"<title>{escape(tip)}</title>" if tip else ""
    return f'<path class="{kind}" d="{"".join(path)}">{inner}</path>' if path else ""


def _band(frame: _Frame, line: Series, style: Style, kind: str) -> str:
    if line.low is None or line.high is None:
        return ""
    outlines: list[list[tuple[float, float, float]]] = [[]]  # one per segment without gaps: x, low, high
    for i in thinned_indices(line.y, _DRAWN_POINTS):
        low, high = line.low[i], line.high[i]
        if plottable(low) and plottable(high) and plottable(line.y[i]):
            outlines[-1].append((frame.x(line.x[i]), frame.y(low), frame.y(high)))
        elif outlines[-1]:
            outlines.append([])
    path = ""
    for outline in filter(None, outlines):
        around = [(x, high) for x, _, high in outline] + [(x, low) for x, low, _ in reversed(outline)]
        path += "M" + "L".join(f"{x:.1f},{y:.1f}" for x, y in around) + "Z"
    classes = [f"{kind} {style.colour}", *_hatch_class(style)]
    return "".join(f'<path class="{name}" d="{path}"/>' for name in classes) if path else ""


def _reference(frame: _Frame, reference: Reference) -> str:
    y = frame.y(reference.y)
    above = y - 5 if y - 18 > frame.top else y + 14
    return _rule(frame.left, y, frame.right, y, "chart-reference") + _text(
        frame.left + 4, above, reference.label, "chart-reference-label"
    )


def _hover(
    frame: _Frame, series: list[Series], drawn: list[Series], styles: list[Style], x_label: str, as_percent: bool
) -> str:
    """Return hover targets: strips over long series, and dots on the points of short ones."""
    word = percent if as_percent else _value
    is_stacked = drawn is not series
    long = [i for i, s in enumerate(series) if s.x and s.in_legend and (is_stacked or len(s.x) >= _DOTTED_BELOW)]
    parts = []
    for x_value, left, right in _strips(frame, series[long[0]].x) if long else ():
        near = [(i, min(bisect_left(series[i].x, x_value), len(series[i].x) - 1)) for i in long]
        lines = [f"{series[i].name}: {word(y)}" for i, n in near if plottable(y := series[i].y[n])]
        x = frame.x(x_value)
        cue = _rule(x, frame.top, x, frame.bottom, "chart-zero") + "".join(
            _dot(x, frame.y(y), styles[i]) for i, n in near if plottable(y := drawn[i].y[n])
        )
        strip = _box(left, frame.top, right - left, frame.bottom - frame.top, "strip")
        tip = _tooltip(x_value, x_label, lines)
        parts.append(f'<g class="hover">{strip}<g class="cue">{cue}</g>{tip}</g>')
    for i, line in enumerate(series):
        has_dots = i not in long and (not line.thin or len(line.x) == 1)
        points = zip(line.x, line.y) if has_dots else ()
        for x_value, y_value in points:
            if plottable(y_value):
                dot = _dot(frame.x(x_value), frame.y(y_value), styles[i])
                tip = _tooltip(x_value, x_label, [f"{line.name}: {word(y_value)}"])
                parts.append(f'<g class="spot">{dot}{tip}</g>')
    return "".join(parts)


def _strips(frame: _Frame, xs: Sequence[float]) -> list[tuple[float, float, float]]:
    """Return the x values with a tooltip, each with the left and right edge of its strip."""
    shown = xs[:: -(-len(xs) // _HOVER_STRIPS)]
    edges = [frame.left, *((frame.x(a) + frame.x(b)) / 2 for a, b in pairwise(shown)), frame.right]
    return [(x, left, right) for x, (left, right) in zip(shown, pairwise(edges))]


def _tooltip(x: float, x_label: str, lines: list[str]) -> str:
    return f"<title>{escape(chr(10).join([f'{x_label}: {_value(x)}', *lines]))}</title>"


def _value(value: float) -> str:
    return f"{value:,.0f}" if float(value).is_integer() and abs(value) < 1e15 else short_number(value, 5)


def _hatch_class(style: Style) -> list[str]:
    """Return the class of the hatch over a shape, which is drawn twice; empty without a hatch."""
    return [{"/": "hatch-up", "\\": "hatch-down"}[style.hatch]] if style.hatch else []


def _dot(x: float, y: float, style: Style) -> str:
    return f'<circle class="dot {style.colour}" cx="{x:.1f}" cy="{y:.1f}" r="3.2"/>'


def _swatch(x: float, y: float, style: Style) -> str:
    return _filled(x, y, 10, 10, style)


def _filled(x: float, y: float, width: float, height: float, style: Style, inner: str = "") -> str:
    classes = [f"fill {style.colour}", *_hatch_class(style)]
    return "".join(_box(x, y, width, height, name, inner) for name in classes)


def _box(x: float, y: float, width: float, height: float, kind: str, inner: str = "") -> str:
    place = f'x="{x:.1f}" y="{y:.1f}" width="{max(0.0, width):.1f}" height="{height:.1f}"'
    return f'<rect class="{kind}" {place} rx="2">{inner}</rect>'


def _rule(x1: float, y1: float, x2: float, y2: float, kind: str) -> str:
    return f'<line class="{kind}" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>'


def _text(x: float, y: float, text: str, kind: str, anchor: str = "start") -> str:
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _svg(title: str, size: tuple[int, int], body: str) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="chart" viewBox="0 0 {size[0]} {size[1]}" '
        f'role="img" aria-label="{escape(title)}">{body}</svg>'
    )
