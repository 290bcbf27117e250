"""Colours of phases, shared by the report page and the dashboard."""

from __future__ import annotations

from typing import NamedTuple

COLOURS = 9  # of the palette in `style.py`; a chart with more series repeats them


class Look(NamedTuple):
    """A palette colour and, for phases that share one, a hatch (rising or falling)."""

    colour: str
    hatch: str = ""


UNKNOWN_LOOK = Look("c5", "/")
# Host phases, GPU idle causes, and other rows of the same charts. A phase and its cause look alike; otherwise no two
# entries of one chart do.
PHASE_LOOKS = {
    "busy": Look("c0"),
    "environment": Look("c1"),
    "host→device": Look("c4", "/"),
    "inference": Look("c3"),
    "device→host": Look("c4", "\\"),
    "storage": Look("c6"),
    "learn": Look("c2"),
    "learn (launch)": Look("c2"),
    "sync": Look("c7"),
    "evaluate": Look("c8"),
    "checkpoint": Look("c4"),
    "logging": Look("c6", "/"),
    "other": Look("c5"),
    "unattributed": Look("c5", "\\"),
}


def phase_look(name: str) -> Look:
    """Return the look of a phase or cause."""
    return PHASE_LOOKS.get(name, UNKNOWN_LOOK)


def series_look(index: int) -> Look:
    """Return the look of the series at `index` of a chart."""
    return Look(f"c{index % COLOURS}")
