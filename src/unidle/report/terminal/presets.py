"""The table of `unidle presets`."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table


def print_presets(console: Console, rows: list[dict[str, Any]], cores: int, memory: int) -> None:
    """Print one line per preset: its sizes, requirements, and an alternative if this machine is too small."""
    table = Table(box=None, pad_edge=False, header_style="dim")
    for name in (
        "preset",
        "envs × steps",
        "total batch",
        "batch",
        "epochs",
        "network",
        "cores",
        "memory",
        "this machine",
    ):
        table.add_column(name, no_wrap=name != "this machine")
    for row in rows:
        table.add_row(
            row["preset"],
            f"{row['n_envs']} × {row['n_steps']}",
            f"{row['total_batch']:,}",
            f"{row['batch_size']:,}",
            "–" if row["n_epochs"] is None else str(row["n_epochs"]),
            ",".join(map(str, row["network"])) or "custom",
            str(row["cores"]),
            f"{row['memory_gb']} GB",
            "fits" if row["fits"] else f"too small, use {row['instead']}" if row["instead"] else "too small",
        )
    console.print(table)
    console.print()
    widest = max(len(row["preset"]) for row in rows)
    for row in rows:
        measured = f"; {row['measured']}" if row["measured"] else ""
        console.print(f"{row['preset']:<{widest}} {row['description']}{measured}", highlight=False)
    console.print()
    machine = f"{cores} {'core' if cores == 1 else 'cores'}, {round(memory / 2**30, 1):g} GB of memory"
    none = "" if any(row["fits"] for row in rows) else " Even `classic` may run out of memory."
    console.print(f"This machine: {machine}.{none} `heavy` is suggested with a GPU.", highlight=False)
