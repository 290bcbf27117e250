"""Placeholder."""

from collections.abc import Sequence
from pathlib import Path


def write_group_page(path: Path, runs: Sequence[Path]) -> Path:
    return path / "report.html"
