"""What the tables and sentences of the docs are made of: results of benchmarks, formatted numbers, and sources."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from statistics import mean
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
TABLES: dict[str, Callable[[], str]] = {}


@cache
def results(name: str) -> Any:
    """The content of benchmarks/results/`name`.json."""
    return json.loads((RESULTS / f"{name}.json").read_text())


# -- numbers -----------------------------------------------------------------------------------------------------------


def number(value: float, decimals: int = 0) -> str:
    """49,129 or −82.9: thousands separated, with a real minus."""
    return f"{value:,.{decimals}f}".replace("-", "−")


def percent(share: float, decimals: int = 0) -> str:
    """13 %."""
    return f"{number(100 * share, decimals)} %"


def times(ratio: float) -> str:
    """16.0 times faster."""
    return f"{number(ratio, 1)} times faster"


def rates(runs: list[dict[str, float]]) -> float:
    """The mean steps per second of several measurements."""
    return mean(run["steps_per_second"] for run in runs)


# -- tables and their sources ------------------------------------------------------------------------------------------


def table(written: Callable[[], str]) -> Callable[[], str]:
    """Register a function that writes the block with its name."""
    TABLES[written.__name__.replace("_", "-")] = written
    return written


def sourced(lines: str, *sources: str) -> str:
    """A table, and below it what measured it."""
    return f"{lines}\n\n" + "\n".join(f"{'And by' if i else 'Measured by'} {one}" for i, one in enumerate(sources))


def rows(header: list[str], *body: list[str]) -> str:
    """A Markdown table."""
    lines = ["|" + "|".join(f" {cell} " if cell else " " for cell in line) + "|" for line in (header, *body)]
    return "\n".join([lines[0], "|" + "---|" * len(header), *lines[1:]])


def source(script: str, file: str, measured: Any = None) -> str:
    """Script, results, machines, dates and versions of `measured`, which is all of the file unless it is given."""
    dates: dict[tuple[str, str], set[str]] = {}
    for machine, versions, date in _machines(results(file) if measured is None else measured):
        dates.setdefault((machine, versions), set()).add(date)
    where = "; ".join(
        f"{machine}, {' to '.join(sorted({min(days), max(days)}))}, {versions}"
        for (machine, versions), days in sorted(dates.items())
    )
    return f"[`{script}`](benchmarks/{script}), [results](benchmarks/results/{file}.json): {where}."


def _machines(node: Any) -> Iterator[tuple[str, str, str]]:
    """(machine, versions, date) of each record of `machine.provenance` in a result."""
    if isinstance(node, dict) and {"date", "cpu", "cores", "gpu", "versions"} <= node.keys():
        machine = (
            f"{node['gpu']} with {node['cores']} cores" if node["gpu"] else f"{node['cores']} cores of {node['cpu']}"
        )
        versions = {name.replace("_", "-"): version.partition("+")[0] for name, version in node["versions"].items()}
        named = {"torch": "torch", "stable-baselines3": "Stable-Baselines3"}
        yield (
            machine,
            ", ".join(f"{word} {versions[key]}" for key, word in named.items() if key in versions),
            node["date"],
        )
    elif isinstance(node, dict | list):
        for child in node.values() if isinstance(node, dict) else node:
            yield from _machines(child)
