"""Lets the tests here import the slow jobs of the benchmarks, and use the meter's make-believe NVIDIA driver."""

import sys
from pathlib import Path

from meter.conftest import fake_driver

__all__ = ["fake_driver"]

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
