"""Colours of phases, shared by the report page and the dashboard."""

from __future__ import annotations

from typing import NamedTuple

COLOURS = 9  # of the palette in `style.py`; a chart with more series repeats them


class Style(NamedTuple):
    """A palette colour and, for phases that share one, a hatch (rising or falling)."""

    colour: str
    hatch: str = ""


UNKNOWN_STYLE = Style("c5", "/")
# Host phases, GPU idle causes, and other rows of the same charts. A phase and its idle cause look alike; no
# other two entries of one chart do.
PHASE_STYLES = {
    "busy": Style("c0"),
    "environment": Style("c1"),
    "host→device": Style("c4", "/"),
    "inference": Style("c3"),
    "device→host": Style("c4", "\\"),
    "storage": Style("c6"),
    "learn": Style("c2"),
    "learn (launch)": Style("c2"),
    "sync": Style("c7"),
    "evaluate": Style("c8"),
    "checkpoint": Style("c4"),
    "logging": Style("c6", "/"),
    "other": Style("c5"),
    "unattributed": Style("c5", "\\"),
}


def phase_style(name: str) -> Style:
    """Return the style of a phase or cause."""
    return PHASE_STYLES.get(name, UNKNOWN_STYLE)


def series_style(index: int) -> Style:
    """Return the style of the series at `index` of a chart."""
    return Style(f"c{index % COLOURS}")
