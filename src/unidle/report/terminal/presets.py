"""The table of `unidle presets`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from unidle.formatting import MISSING

_FULL_WIDTH = 115  # columns of the table with all its columns
_MIN_WIDTH = 80
_FIGURES: dict[str, Callable[[dict[str, Any]], str]] = {
    "preset": lambda row: row["preset"],
    "envs × steps": lambda row: f"{row['n_envs']} × {row['n_steps']}",
    "total batch": lambda row: f"{row['total_batch']:,}",
    "batch": lambda row: f"{row['batch_size']:,}",
    "epochs": lambda row: MISSING if row["n_epochs"] is None else str(row["n_epochs"]),
    "network": lambda row: ",".join(map(str, row["network"])) or MISSING,
    "cores": lambda row: str(row["cores"]),
    "memory": lambda row: f"{row['memory_gb']} GB",
    "this machine": lambda row: _fit(row, "too small, use "),
}
_NARROW: dict[str, Callable[[dict[str, Any]], str]] = {
    **{name: _FIGURES[name] for name in ("preset", "envs × steps", "batch", "network", "cores")},
    "here": lambda row: _fit(row, "use "),
}


def print_presets(console: Console, rows: list[dict[str, Any]], cores: int, memory: int) -> None:
    """Print one line per preset: its sizes, requirements, and an alternative if this machine is too small."""
    console.width = max(console.width, _MIN_WIDTH)
    columns = _FIGURES if console.width >= _FULL_WIDTH else _NARROW
    table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 2, 0, 0))
    for name in columns:
        table.add_column(name, no_wrap=True)
    for row in rows:
        table.add_row(*(text(row) for text in columns.values()))
    console.print(table)
    console.print()
    descriptions = Table.grid(padding=(0, 1, 0, 0))
    for row in rows:
        measured = f"; {row['measured']}" if row["measured"] else ""
        descriptions.add_row(Text(row["preset"], no_wrap=True), row["description"] + measured)
    console.print(descriptions)
    console.print()
    machine = f"{cores} {'core' if cores == 1 else 'cores'}, {round(memory / 2**30, 1):g} GB of memory"
    none = "" if any(row["fits"] for row in rows) else " Even `classic` may run out of memory."
    console.print(f"This machine: {machine}.{none} `heavy` is suggested with a GPU.", highlight=False, soft_wrap=True)


def _fit(row: dict[str, Any], instead: str) -> str:
    """Whether a preset fits this machine, and which one to use if it does not."""
    if row["fits"]:
        return "fits"
    return f"{instead}{row['instead']}" if row["instead"] else "too small"
