"""Lets the tests here import the slow jobs of the benchmarks."""

import sys

from paths import BENCHMARKS

sys.path.append(str(BENCHMARKS))
