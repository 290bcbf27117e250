"""Shared by all benchmarks: warm-up time, and the machine, versions and date in the results.

    python benchmarks/machine.py

prints `sources`, a hash of the current code: results of the same code have the same hash.
"""

from __future__ import annotations

import json
import os
import platform
from datetime import UTC, datetime
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path
from typing import Any

# On a GPU, after the first iteration: CUDA graphs are captured and the run's meter uses the profiler.
WARM_UP_S = 6.0
RESULTS = Path(__file__).parent / "results"


def provenance(*packages: str) -> dict[str, Any]:
    """Return machine, date, and the versions of unidle, its main dependencies and `packages`."""
    import torch

    from unidle import __version__

    names = {"torch", "gymnasium", "numpy", *packages}
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "cpu": _cpu_name(),
        "cores": len(os.sched_getaffinity(0)),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "python": platform.python_version(),
        "sources": sources(),
        "versions": {"unidle": __version__, **{name: version(name) for name in sorted(names)}},
    }


def sources() -> str:
    """Return a short hash of unidle's code: the version number alone does not identify it."""
    code = Path(__file__).parents[1] / "src" / "unidle"
    digest = sha256()
    for path in sorted(code.rglob("*.py")):
        digest.update(f"{path.relative_to(code).as_posix()}\n".encode() + path.read_bytes())
    return digest.hexdigest()[:12]


def _cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor()


def save(name: str, result: dict[str, Any], folder: Path | None = None) -> Path:
    """Write `result` as JSON under benchmarks/results/ (or `folder`)."""
    folder = folder or RESULTS
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.json"
    path.write_text(json.dumps(result, indent=1) + "\n")
    return path


if __name__ == "__main__":
    print(sources())
