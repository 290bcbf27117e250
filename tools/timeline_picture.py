"""Draws docs/images/timeline.svg from benchmarks/results/timeline.json, which `benchmarks/timeline.py` measures.

python tools/timeline_picture.py [--results FILE] [--picture FILE]
"""

from __future__ import annotations

import argparse
import json
from html import escape
from itertools import groupby
from pathlib import Path
from typing import Any

from figure_values import RESULTS, ROOT, number, percent

from unidle.report.page.svg import Series, line_chart, standalone

NAMES = {"sb3": "Stable-Baselines3", "unidle": "unidle"}
COLOURS = {"unidle": "c0", "sb3": "c1"}  # as in the other pictures
PICTURE = ROOT / "docs" / "images" / "timeline.svg"
WIDTH, LANE, CHART_HEIGHT = 720, 54, 265
_FIRST_LANE, _BETWEEN = 78, 36  # y of the first lane; from one lane to the next, for its name
_LEFT, _RIGHT = 2.0, 708.0


def draw(result: dict[str, Any]) -> str:
    """The GPU of both sides as lanes over the same seconds; below, the returns of the same runs."""
    sides = {side: result["sides"][side] for side in NAMES}
    if any(side["recorded"] is None for side in sides.values()):
        raise SystemExit("The result was measured without a GPU, so there is no timeline to draw.")
    settings, machine = result["settings"], result["machine"]
    title = f"What the GPU does while PPO trains on {settings['env']}"
    overlap = "; unidle collects while it learns" if settings["overlap"] == "strict" else ""
    below = (
        f"Coloured: a kernel runs. Grey: the GPU waits. Same hyper-parameters (preset {settings['preset']}{overlap}), "
    )
    below += f"{machine['gpu']}, {machine['cores']} cores."
    parts = [_text(2, 17, title, "chart-title"), _text(2, 36, below, "chart-label")]
    top = _FIRST_LANE
    for side, measured in sides.items():
        parts.append(_lane(side, measured, top))
        top += LANE + _BETWEEN
    seconds = len(sides["sb3"]["recorded"]["bins"]) * sides["sb3"]["recorded"]["bin_seconds"]
    axis = top - _BETWEEN
    parts.append(_seconds(seconds, axis))
    chart_top = axis + 42
    parts.append(f'<g transform="translate(0,{chart_top})">{_returns(sides, settings)}</g>')
    size = (WIDTH, chart_top + CHART_HEIGHT)
    svg = (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="chart" viewBox="0 0 {size[0]} {size[1]}" '
        f'role="img" aria-label="{escape(title)}">{"".join(parts)}</svg>'
    )
    return standalone(svg, size)


def _lane(side: str, measured: dict[str, Any], top: float) -> str:
    """Name and figures of a side, and below them a band: grey where the GPU is idle, coloured where a kernel runs."""
    recorded, bottom = measured["recorded"], top + LANE
    name = _text(17, top - 8, NAMES[side], "chart-figure")
    swatch = f'<rect class="fill {COLOURS[side]}" x="2" y="{top - 17}" width="10" height="10" rx="2"/>'
    figures = f"GPU busy {percent(recorded['busy'])}, {number(measured['steps_per_second'])} steps/s"
    idle = f'<rect x="{_LEFT}" y="{top}" width="{_RIGHT - _LEFT}" height="{LANE}" fill="var(--edge)"/>'
    busy = f'<path class="fill {COLOURS[side]}" d="{outline(recorded["bins"], bottom)}"/>'
    return swatch + name + _text(_RIGHT, top - 8, figures, "chart-figure", "end") + idle + busy


def outline(bins: list[float], bottom: float) -> str:
    """The path around the busy share of each bin, as steps from left to right; empty bins are not drawn."""
    width, path, at = (_RIGHT - _LEFT) / len(bins), "", 0
    for height, same in groupby(round(LANE * share, 1) for share in bins):
        count = len(list(same))
        if height:
            left, right = _LEFT + at * width, _LEFT + (at + count) * width
            path += f"M{left:.1f},{bottom}V{bottom - height:.1f}H{right:.1f}V{bottom}"
        at += count
    return path


def _seconds(seconds: float, y: float) -> str:
    """The axis of the lanes."""
    parts = []
    for second in range(round(seconds) + 1):
        x = _LEFT + (_RIGHT - _LEFT) * second / seconds
        anchor = "start" if second == 0 else "end" if second == round(seconds) else "middle"
        label = f"{second} s" if second else "0"
        parts.append(f'<line class="chart-zero" x1="{x:.1f}" y1="{y}" x2="{x:.1f}" y2="{y + 4}"/>')
        parts.append(_text(x, y + 17, label, "chart-tick", anchor))
    return "".join(parts)


def _returns(sides: dict[str, Any], settings: dict[str, Any]) -> str:
    """The inside of a chart of the returns."""
    series = [
        Series(NAMES[side], [point[0] for point in curve], [point[2] for point in curve])
        for side in COLOURS  # unidle has the first colour
        for curve in [sides[side]["curve"]]
    ]
    title, label = "Return of the same runs", f"mean return of {settings['episodes']} evaluation episodes"
    chart = line_chart(title, series, "seconds of training", label, size=(WIDTH, CHART_HEIGHT))
    return chart.partition(">")[2].removesuffix("</svg>")


def _text(x: float, y: float, text: str, kind: str, anchor: str = "start") -> str:
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def main() -> None:
    """Draw the picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=RESULTS / "timeline.json")
    parser.add_argument("--picture", type=Path, default=PICTURE)
    arguments = parser.parse_args()
    arguments.picture.write_text(draw(json.loads(arguments.results.read_text())) + "\n")


if __name__ == "__main__":
    main()
