"""Is this version as fast as an earlier one? The same benchmarks from two checkouts, in one run, on one machine.

    git worktree add ../before v0.1.0
    python benchmarks/before_after.py ../before [--jobs cpu_bound gpu_resident off_policy two_cores] [--rounds 1]

Each measurement is a separate process that runs a benchmark of the checkout it measures. The sides alternate, A B B A.
The output is the ratio of the medians; above 1, this version is faster.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
from machine import RESULTS, provenance, save

HERE = Path(__file__).parents[1]
# Job → measurement → a benchmark script with the flags that measure only unidle, in that process.
JOBS: dict[str, dict[str, list[str]]] = {
    "cpu_bound": {
        f"{setting}, strict": ["cpu_bound.py", "--side", "strict", "--settings", setting, "--seconds", "2.5"]
        for setting in ("beast", "wide")
    },
    "gpu_resident": {
        f"{n_envs:,} environments": ["gpu_resident.py", "--one", "unidle", str(n_envs), "--seconds", "2"]
        for n_envs in (4096, 32768)
    },
    "off_policy": {"batch 512": ["off_policy.py", "--side", "unidle", "--batch-sizes", "512"]},
    "two_cores": {
        "stepping 8": ["two_cores.py", "--one", "unidle", "8"],
        "stepping 32": ["two_cores.py", "--one", "unidle", "32"],
        "training": ["two_cores.py", "--one", "unidle", "train"],
    },
}


def measure(checkout: Path, command: list[str]) -> float:
    """Return unidle's steps or updates per second, measured by a benchmark of `checkout`."""
    environ = {**os.environ, "PYTHONPATH": f"{checkout / 'src'}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    script, *flags = command
    done = subprocess.run(
        [sys.executable, str(checkout / "benchmarks" / script), *flags], env=environ, capture_output=True, text=True
    )
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed in {checkout}:\n{done.stderr}")
    result: Any = json.loads(done.stdout.splitlines()[-1])
    return float(result["steps_per_second"] if isinstance(result, dict) else result)


def main() -> None:
    """Measure both sides of each job and print the ratios."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", type=Path, help="a checkout of the earlier version")
    parser.add_argument("--jobs", nargs="+", choices=list(JOBS), default=["cpu_bound", "gpu_resident", "off_policy"])
    parser.add_argument("--rounds", type=int, default=1, help="repetitions of A B B A")
    parser.add_argument("--only", default="", help="measure only settings with this in their name")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the JSON")
    arguments = parser.parse_args()
    sides = {"before": arguments.before.resolve(), "after": HERE}
    path = arguments.out / "before_after.json"
    result: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    for job in arguments.jobs:
        rows = result.setdefault(job, {"rates": {}})["rates"]
        for name, command in JOBS[job].items():
            if arguments.only not in name:
                continue
            rates: dict[str, list[float]] = {"before": [], "after": []}
            for side in ["before", "after", "after", "before"] * arguments.rounds:
                rates[side].append(measure(sides[side], command))
                print(f"{job}, {name}, {side}: {rates[side][-1]:,.0f}", file=sys.stderr, flush=True)
            ratio = float(np.median(rates["after"]) / np.median(rates["before"]))
            rows[name] = {**rates, "ratio": ratio, "machine": provenance()}
            save("before_after", result, arguments.out)
    for job, measured in result.items():
        for name, row in measured["rates"].items():
            print(
                f"{job:<14}{name:<24}{np.median(row['before']):>14,.0f}{np.median(row['after']):>14,.0f}{row['ratio']:8.3f}"
            )


if __name__ == "__main__":
    main()
