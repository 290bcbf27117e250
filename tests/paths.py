"""Where things are, for tests that start other programs or read other files."""

from pathlib import Path

TESTS = Path(__file__).parent
ROOT = TESTS.parent
SOURCE = ROOT / "src"
BENCHMARKS = ROOT / "benchmarks"
DOCS = ROOT / "docs"
