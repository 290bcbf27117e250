"""The table of readings: its sparkline fills the remaining width and its end is never cut off."""

from __future__ import annotations

import io

import pytest
from rich.console import Console
from rich.text import Text

from unidle.meter.sensors.reading import Reading, Sample
from unidle.meter.sensors.window import Window
from unidle.report.terminal.readings_table import Part, readings_table

SECOND = 10**9


def rows(width: int, joules: float = 1.0, title: str = "gpu 0") -> list[str]:
    """The table's rows for a GPU that was idle for nine seconds and busy in the tenth."""
    use, energy = Window(10.0), Window(10.0)
    use.add([Sample(0, 0.0), Sample(9 * SECOND, 100.0)])
    energy.add([Sample(0, 0.0), Sample(9 * SECOND, joules)])
    readings = [(Reading("utilisation", "%", 1.0, 100.0), use), (Reading("energy", "J", 0.1, is_total=True), energy)]
    host = Part(Text("host"), [(Reading("cpu", "%", 0.1, 100.0), use)], [Text("  cores")])
    console = Console(file=io.StringIO(), width=width, highlight=False)
    console.print(readings_table([Part(Text(title), readings), host], width, 10.0, 10 * SECOND))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().splitlines()


@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize(
    "changes", [{}, {"title": "gpu 0  NVIDIA RTX 6000 Ada Generation  not throttled"}, {"joules": 60_480_000.0}]
)
def test_sparkline_ends_with_current_value(width: int, changes: dict[str, float | str]) -> None:
    header, _, title, use, energy, _, host, cpu, cores = rows(width, **changes)
    assert max(len(row.rstrip()) for row in (header, use, energy, cpu)) <= width
    line = use.split()[-1]
    assert line == "▁" * line.count("▁") + "█" * line.count("█")
    assert len(line) / 10 - 1 < line.count("█") <= len(line) / 10 + 1  # the last second of ten
    assert "…" not in header + use + energy + cpu + title
    assert len(use) > width - 5  # the full width is used
    assert use.removeprefix("  utilisation %") == cpu.removeprefix("  cpu %").removeprefix(
        " " * 8
    )  # columns are aligned
    assert (host, cores) == ("host", "  cores")


def test_total_has_no_mean_and_missing_reading_is_a_dash() -> None:
    energy = rows(80, joules=1234.0)[4]
    assert energy.split() == ["energy", "J", "1,234", "0.1"]
    console = Console(file=io.StringIO(), width=80)
    console.print(readings_table([Part(Text("gpu"), [(Reading("power", "W", 0.1), Window(1.0))])], 80, 1.0, SECOND))
    assert isinstance(console.file, io.StringIO)
    assert console.file.getvalue().splitlines()[-1].split() == ["power", "W", *["–"] * 5]
