"""Charts: the SVG is parsed and its geometry checked."""

from __future__ import annotations

import math
import re
from xml.etree import ElementTree as ET

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unidle.meter.attribution.idle_time import CAUSES
from unidle.report.page.axis import fit_axis, plottable, running_mean, thinned_indices
from unidle.report.page.phase_colours import COLOURS, PHASE_STYLES, Style, phase_style
from unidle.report.page.style import CSS, HATCHES
from unidle.report.page.svg import Reference, Series, line_chart, stacked_bar, standalone
from unidle.timeline import PHASES

_SVG = "{http://www.w3.org/2000/svg}"
_NUMBER = r"-?\d+(?:\.\d+)?"


def chart(*series: Series, **options: object) -> ET.Element:
    return ET.fromstring(line_chart("Title", list(series), "steps", "return", **options))  # type: ignore[arg-type]


def of_class(root: ET.Element, name: str) -> list[ET.Element]:
    return [e for e in root.iter() if name in e.get("class", "").split()]


def strokes(path: ET.Element) -> list[list[tuple[float, float]]]:
    """The points of each stroke of a path, without the repeated first point."""
    strokes = []
    for stroke in path.get("d", "").split("M")[1:]:
        pairs = re.findall(f"({_NUMBER}),({_NUMBER})", stroke)
        strokes.append([(float(x), float(y)) for x, y in pairs][1:])
    return strokes


def texts(root: ET.Element, name: str) -> list[str]:
    return [e.text or "" for e in of_class(root, name)]


def tooltips(root: ET.Element) -> list[str]:
    return [e.text or "" for e in root.iter(f"{_SVG}title")]


def y_of_tick(root: ET.Element, label: str) -> float:
    """The y coordinate of the tick with that label; labels are placed 4 below their line."""
    ticks = [t for t in of_class(root, "chart-tick") if t.get("text-anchor") == "end"]
    return next(float(t.get("y", "nan")) - 4 for t in ticks if t.text == label)


def test_thin_lines_are_below_all_others_and_named_by_the_pointer() -> None:
    bold = Series("mean", [0, 1], [1.0, 2.0], low=[0.0, 1.0], high=[2.0, 3.0])
    root = chart(bold, Series("one <run>", [0, 1], [0.0, 3.0], thin=True))
    thin, band, line = (e for e in root.iter() if {"line", "band"} & set(e.get("class", "").split()))
    assert (thin.get("class"), band.get("class"), line.get("class")) == ("line thin c1", "band c0", "line c0")
    assert "one <run>" in [e.text for e in thin]
    assert len(of_class(root, "dot")) == 2  # of the bold line


def test_single_point_of_thin_series_is_a_dot() -> None:
    root = chart(Series("one run", [5], [1.0], thin=True))
    assert tooltips(root) == ["one run", "steps: 5\none run: 1"]
    assert len(of_class(root, "dot")) == 1


def test_series_out_of_legend_are_drawn_faintly_and_not_in_tooltips_of_the_plot() -> None:
    x = [float(i) for i in range(100)]
    root = chart(Series("mean", x, x), Series("one run", x, x, thin=True, in_legend=False))
    assert texts(root, "chart-name") == ["mean"]
    assert [e.get("class") for e in of_class(root, "thin")] == ["line thin faint c1"]
    assert tooltips(root)[:2] == ["one run", "steps: 0\nmean: 0"]


def test_line_passes_through_its_points() -> None:
    root = chart(Series("a", [0, 100, 200], [0.0, 10.0, 5.0]))
    [[first, second, third]] = strokes(of_class(root, "line")[0])
    assert second[0] - first[0] == pytest.approx(third[0] - second[0], abs=0.2)
    assert third[1] == pytest.approx((first[1] + second[1]) / 2, abs=0.2)
    assert first[1] == pytest.approx(y_of_tick(root, "0"), abs=0.2)
    assert second[1] == pytest.approx(y_of_tick(root, "10"), abs=0.2)


def test_none_nan_and_infinity_interrupt_line() -> None:
    gaps = [1.0, 2.0, None, 3.0, math.nan, 4.0, 5.0, math.inf, 6.0]
    root = chart(Series("a", list(range(9)), gaps))
    assert [len(stroke) for stroke in strokes(of_class(root, "line")[0])] == [2, 1, 2, 1]


@pytest.mark.parametrize("series", [[], [Series("a", [], [])], [Series("a", [1], [None])]])
def test_chart_without_points_shows_no_data(series: list[Series]) -> None:
    root = chart(*series)
    assert texts(root, "chart-empty") == ["no data yet"]
    assert not of_class(root, "line")


def test_single_point_is_drawn_as_dot() -> None:
    root = chart(Series("loss", [2048], [0.125]))
    [dot] = of_class(root, "dot")
    assert [[(float(dot.get("cx", "")), float(dot.get("cy", "")))]] == strokes(of_class(root, "line")[0])
    assert tooltips(root) == ["steps: 2,048\nloss: 0.125"]


@pytest.mark.parametrize("value", [0.0, 7.5, -3e-9, 4e12])
def test_constant_series_is_horizontal_line_inside_plot(value: float) -> None:
    root = chart(Series("a", [0, 1, 2], [value] * 3), size=(400, 300))
    [stroke] = strokes(of_class(root, "line")[0])
    assert len({y for _, y in stroke}) == 1
    assert 40 < stroke[0][1] < 265


def test_long_series_is_thinned_but_keeps_spike() -> None:
    y = [math.sin(i / 500) for i in range(50_000)]
    y[31_415] = 40.0
    root = chart(Series("a", list(range(50_000)), y))
    [stroke] = strokes(of_class(root, "line")[0])
    assert len(stroke) <= 1000
    assert min(y for _, y in stroke) == pytest.approx(y_of_tick(root, "40"), abs=0.2)


def test_smoothed_series_shows_raw_values_faintly() -> None:
    root = chart(Series("a", list(range(200)), [1.0, -1.0] * 100), smooth=True)
    raw, mean = of_class(root, "line")
    assert "faint" in raw.get("class", "")
    heights = [max(ys) - min(ys) for p in (raw, mean) for ys in [[y for _, y in strokes(p)[0]]]]
    assert heights[1] < heights[0] / 2


def test_legend_is_shown_only_for_several_series() -> None:
    one, two = Series("one", [0, 1], [0.0, 1.0]), Series("two", [0, 1], [1.0, 0.0])
    assert texts(chart(one), "chart-name") == []
    assert texts(chart(one, two), "chart-name") == ["one", "two"]


def test_reference_line_can_lie_beyond_data() -> None:
    root = chart(Series("a", [0, 1], [0.0, 100.0]), reference=Reference(200, "target"))
    [line] = of_class(root, "chart-reference")
    assert float(line.get("y1", "")) == pytest.approx(y_of_tick(root, "200"), abs=0.2)
    assert texts(root, "chart-reference-label") == ["target"]


def test_band_spans_low_to_high() -> None:
    root = chart(Series("a", [0, 1], [5.0, 5.0], low=[0.0, 4.0], high=[10.0, 6.0]))
    [band] = of_class(root, "band")
    ys = [float(y) for _, y in re.findall(f"({_NUMBER}),({_NUMBER})", band.get("d", ""))]
    assert min(ys) == pytest.approx(y_of_tick(root, "10"), abs=0.2)
    assert max(ys) == pytest.approx(y_of_tick(root, "0"), abs=0.2)


def test_stacked_series_add_up_and_tooltips_show_own_values() -> None:
    below = Series("below", [0, 1], [0.25, 0.25])
    above = Series("above", [0, 1], [0.75, 0.75])
    root = chart(below, above, stacked=True, as_percent=True)
    tops = [strokes(line)[0][0][1] for line in of_class(root, "line")]
    assert tops[1] == pytest.approx(y_of_tick(root, "100 %"), abs=0.2)
    assert tops[0] == pytest.approx(y_of_tick(root, "0 %") - (y_of_tick(root, "0 %") - tops[1]) / 4, abs=0.2)
    assert tooltips(root)[0] == "steps: 0\nbelow: 25 %\nabove: 75 %"


def test_tooltips_of_long_series_show_recorded_values() -> None:
    root = chart(Series("a", [i * 10 for i in range(1000)], [i / 8 for i in range(1000)]))
    matches = [re.fullmatch(r"steps: ([\d,]+)\na: ([\d.]+)", tip) for tip in tooltips(root)]
    assert 50 <= len(matches) <= 100
    for match in matches:
        assert match is not None
        step, value = int(match[1].replace(",", "")), float(match[2])
        assert value == pytest.approx(step / 80, rel=1e-4)


def test_markup_in_names_is_escaped() -> None:
    name = "<b>&\"'"
    svg = line_chart(name, [Series(name, [0], [1.0]), Series("b", [0], [2.0])], name, name)
    root = ET.fromstring(svg)
    assert texts(root, "chart-title") == [name]
    assert texts(root, "chart-name")[0] == name
    assert root.get("aria-label") == name
    assert "<b>" not in svg


def test_stacked_bar_is_proportional_and_labelled() -> None:
    shares = {"environment": 0.5, "learn": 0.3, "other": 0.2}
    root = ET.fromstring(stacked_bar("Time", shares, size=(404, 200)))
    bars = [e for e in root.iter(f"{_SVG}rect") if e.get("height") == "26.0"]
    # Each bar is 1.5 narrower to leave a gap to the next.
    assert [float(bar.get("width", "")) + 1.5 for bar in bars] == pytest.approx([200, 120, 80])
    assert [float(bar.get("x", "")) for bar in bars] == pytest.approx([2, 202, 322])
    assert texts(root, "chart-name") == list(shares)
    assert texts(root, "chart-figure") == ["50 %", "30 %", "20 %"]


@pytest.mark.parametrize("names", [(*PHASES, "unattributed"), ("busy", *CAUSES, "unattributed")])
def test_phases_of_one_chart_look_different(names: tuple[str, ...]) -> None:
    assert len({PHASE_STYLES[name] for name in names}) == len(names)


def test_phase_looks_the_same_in_every_chart() -> None:
    root = ET.fromstring(stacked_bar("Time", {"learn": 0.5, "logging": 0.3, "environment": 0.2}))
    swatches = [e.get("class") for e in root.iter(f"{_SVG}rect") if e.get("height") == "10.0"]
    assert swatches == ["fill c2", "fill c6", "hatch-up", "fill c1"]
    lines = [Series(name, [0, 1], [0.5, 0.5], style=phase_style(name)) for name in ("unattributed", "learn")]
    drawn = chart(*lines, stacked=True)
    assert [e.get("class") for e in drawn.iter(f"{_SVG}path")] == [
        *("area c5", "hatch-down", "area c2"),
        *("line c5", "line c2"),
    ]
    assert {f"url(#{name})" for name in re.findall('id="(.*?)"', HATCHES)} == set(re.findall(r"url\(.*?\)", CSS))


def test_standalone_chart_contains_hatch_patterns() -> None:
    size = (380, 270)
    root = ET.fromstring(standalone(stacked_bar("Time", {"logging": 0.6, "unattributed": 0.4}, size=size), size))
    wanted = {f"url(#{pattern.get('id')})" for pattern in root.iter(f"{_SVG}pattern")}
    assert wanted == set(re.findall(r"url\(.*?\)", root.findtext(f"{_SVG}style", ""))) != set()


def test_unknown_phase_has_its_own_look() -> None:
    assert phase_style("<b>") == Style("c5", "/")
    assert phase_style("<b>") not in PHASE_STYLES.values()


def test_stacked_bar_without_shares_shows_no_data() -> None:
    assert texts(ET.fromstring(stacked_bar("Time", {})), "chart-empty") == ["no data yet"]


_VALUES = st.floats(-1e12, 1e12, allow_subnormal=False)


@given(st.lists(_VALUES, min_size=1, max_size=5), st.integers(3, 8), st.booleans())
def test_ticks_are_round_few_and_have_distinct_labels(values: list[float], count: int, from_zero: bool) -> None:
    axis = fit_axis(values, count=count, from_zero=from_zero)
    assert round(axis.step / 10 ** math.floor(math.log10(axis.step) + 1e-9), 6) in (1, 2, 5)
    assert 1 <= len(axis.ticks) <= count + 1
    slack = 1e-5 * axis.step
    assert all(axis.low - slack <= tick <= axis.high + slack for tick in axis.ticks)
    assert len({axis.label(tick) for tick in axis.ticks}) == len(axis.ticks)


@pytest.mark.parametrize(
    ("high", "labels"),
    [
        (1_000_000, ["0", "200k", "400k", "600k", "800k", "1M"]),
        (2_500, ["0", "500", "1k", "1.5k", "2k", "2.5k"]),
        (0.5, ["0", "0.1", "0.2", "0.3", "0.4", "0.5"]),
        (5e-5, ["0", "1e-5", "2e-5", "3e-5", "4e-5", "5e-5"]),
    ],
)
def test_tick_labels_are_short(high: float, labels: list[str]) -> None:
    axis = fit_axis([0, high], count=5)
    assert [axis.label(tick) for tick in axis.ticks] == labels


@given(st.lists(st.none() | st.just(math.nan) | st.floats(-1e9, 1e9), min_size=1, max_size=400))
def test_thinning_keeps_extremes_and_ends_within_limit(values: list[float | None]) -> None:
    kept = thinned_indices(values, 50)
    assert len(kept) <= max(50, min(len(values), 50))
    assert kept == sorted(set(kept))
    assert kept[0] == 0
    assert kept[-1] == len(values) - 1
    drawn = [value for value in values if plottable(value)]
    if drawn:
        kept_values = [value for i in kept if plottable(value := values[i])]
        assert (min(kept_values), max(kept_values)) == (min(drawn), max(drawn))


def test_running_mean_skips_and_keeps_gaps() -> None:
    assert running_mean([1.0, None, 3.0, 5.0, math.nan], 3) == [1.0, None, 4.0, 4.0, None]


@pytest.mark.parametrize("mode", ["light", "dark"])
def test_series_colours_have_enough_contrast(mode: str) -> None:
    light, dark = CSS.split("@media (prefers-color-scheme: dark)")
    sheet = light if mode == "light" else dark
    colours = dict(re.findall(r"--(card|soft|c\d): (#[0-9a-f]{6})", sheet))
    card = _luminance(colours.pop("card"))
    assert len(colours) == COLOURS + 1
    for name, colour in colours.items():
        dim, bright = sorted((card, _luminance(colour)))
        needed = 4.5 if name == "soft" else 3.0  # text; graphics
        assert (bright + 0.05) / (dim + 0.05) >= needed, name


def _luminance(colour: str) -> float:
    """Relative luminance as WCAG defines it."""
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    red, green, blue = (p / 12.92 if p <= 0.03928 else ((p + 0.055) / 1.055) ** 2.4 for p in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue
