"""The table of readings: its line takes the width that is left, and its end is never cut off."""

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
    """The table's rows, of a GPU that was idle and is busy since the last second of ten."""
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
    "odd", [{}, {"title": "gpu 0  NVIDIA RTX 6000 Ada Generation  not troubled"}, {"joules": 60_480_000.0}]
)
def test_the_line_ends_with_what_is_now(width: int, odd: dict[str, float | str]) -> None:
    header, _, title, use, energy, _, host, cpu, cores = rows(width, **odd)
    assert max(len(row.rstrip()) for row in (header, use, energy, cpu)) <= width
    line = use.split()[-1]
    assert line == "▁" * line.count("▁") + "█" * line.count("█")
    assert len(line) / 10 - 1 < line.count("█") <= len(line) / 10 + 1  # the last second of ten
    assert "…" not in header + use + energy + cpu + title
    assert len(use) > width - 5  # nothing is wasted
    assert use.removeprefix("  utilisation %") == cpu.removeprefix("  cpu %").removeprefix(
        " " * 8
    )  # columns are below each other
    assert (host, cores) == ("host", "  cores")


def test_a_total_has_no_mean_and_what_was_never_read_is_a_dash() -> None:
    energy = rows(80, joules=1234.0)[4]
    assert energy.split() == ["energy", "J", "1,234", "0.1"]
    console = Console(file=io.StringIO(), width=80)
    console.print(readings_table([Part(Text("gpu"), [(Reading("power", "W", 0.1), Window(1.0))])], 80, 1.0, SECOND))
    assert isinstance(console.file, io.StringIO)
    assert console.file.getvalue().splitlines()[-1].split() == ["power", "W", *["–"] * 5]
