"""Which phase has which colour: one table for the charts of the report page and those of the dashboard."""

from __future__ import annotations

from typing import NamedTuple

COLOURS = 9  # of the palette in `style.py`; a chart with more series repeats them


class Look(NamedTuple):
    """A colour of the palette, and a hatch, rising or falling as its sign, for those that share one."""

    colour: str
    hatch: str = ""


UNKNOWN_LOOK = Look("c5", "/")
# Phases of the host, causes of the GPU's idleness, and what else shares a chart with these. A phase and the cause that
# it is look alike; otherwise no two of one chart do.
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
    """How a phase or cause is drawn."""
    return PHASE_LOOKS.get(name, UNKNOWN_LOOK)


def series_look(index: int) -> Look:
    """How the series of that place in a chart is drawn, if it is no phase."""
    return Look(f"c{index % COLOURS}")
