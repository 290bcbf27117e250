"""Makes the slow jobs of the benchmarks importable."""

import sys

from paths import BENCHMARKS

sys.path.append(str(BENCHMARKS))
