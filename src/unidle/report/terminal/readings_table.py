"""A terminal table of readings: latest, min, mean, max, update rate, and a sparkline of the last seconds.

The sparkline gets the remaining width, so that a long name or number never cuts off its end, which is now.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Group
from rich.text import Text

from unidle.formatting import MISSING, figure
from unidle.meter.sensors.reading import Reading
from unidle.meter.sensors.window import Summary, Window, sparkline

_HEADERS = ("reading", "now", "min", "mean", "max", "new/s")
_LEAST_WIDTHS = (21, 6, 6, 6, 6, 5)  # keeps columns in place while values change
_GAP = "  "
_CELLS = 8, 60  # least and most cells of the sparkline


@dataclass(frozen=True)
class Part:
    """One section of the table: a GPU, the host or a process."""

    title: Text
    readings: Sequence[tuple[Reading, Window]]
    notes: Sequence[Text] = ()
    """Further lines below the readings."""


def readings_table(parts: Sequence[Part], width: int, window_s: float, now_ns: int) -> Group:
    """Render all parts with aligned columns for a console of `width` columns."""
    figures = [[_figures(reading, window.summary(now_ns)) for reading, window in part.readings] for part in parts]
    columns = zip(_HEADERS, *(row for rows in figures for row in rows), strict=True)
    widths = [max(least, *map(len, column)) for least, column in zip(_LEAST_WIDTHS, columns)]
    least, most = _CELLS
    n_cells = max(least, min(most, width - sum(widths) - len(_GAP) * len(widths)))

    def padded(row: Sequence[str]) -> str:
        return row[0].ljust(widths[0]) + "".join(f"{_GAP}{text:>{w}}" for text, w in zip(row[1:], widths[1:])) + _GAP

    shown = [Text(f"{padded(_HEADERS)}last {window_s:.0f} s", "dim", no_wrap=True, overflow="crop")]
    for part, rows in zip(parts, figures, strict=True):
        shown += [Text(), part.title]
        for row, (reading, window) in zip(rows, part.readings, strict=True):
            line = Text(padded(row), no_wrap=True, overflow="crop")
            line.stylize("dim", len(row[0]) - len(reading.unit), len(row[0]))
            if not reading.is_total:
                line.append(sparkline(window.cells(now_ns, n_cells), reading.full), "green")
            shown.append(line)
        shown += part.notes
    return Group(*shown)


def _figures(reading: Reading, summary: Summary | None) -> tuple[str, ...]:
    """Return the cells of a reading's row."""
    name = f"  {reading.name} {reading.unit}"
    if summary is None:
        return name, *[MISSING] * 5
    rate = f"{summary.per_second:.1f}" if summary.per_second else MISSING
    if reading.is_total:
        return name, figure(summary.latest), "", "", "", rate
    return name, *(figure(value) for value in (summary.latest, summary.least, summary.mean, summary.largest)), rate
