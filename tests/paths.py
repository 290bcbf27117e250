"""Paths of the repository."""

from pathlib import Path

TESTS = Path(__file__).parent
ROOT = TESTS.parent
SOURCE = ROOT / "src"
BENCHMARKS = ROOT / "benchmarks"
DOCS = ROOT / "docs"
