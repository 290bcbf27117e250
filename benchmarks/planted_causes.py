"""How often `unidle watch` names the planted cause of a slow training job: python benchmarks/planted_causes.py

Runs each job of `planted_jobs.py` under `unidle watch` and compares the verdict with what was planted.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from machine import provenance, save
from planted_jobs import JOBS

HERE = Path(__file__).parent


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=8.0, help="of training in each job")
    parser.add_argument("--jobs", nargs="*", default=list(JOBS), choices=list(JOBS))
    parser.add_argument("--save", action="store_true", help="write the result beside the others")
    given = parser.parse_args()
    rows = []
    for job in given.jobs:
        planted = JOBS[job][0]
        with TemporaryDirectory() as folder:
            command = [sys.executable, str(HERE / "planted_jobs.py"), job, "--seconds", str(given.seconds)]
            watch = [str(Path(sys.executable).with_name("unidle")), "watch", "--out", folder, "--"]
            subprocess.run([*watch, *command], check=True, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
            found = json.loads((Path(folder) / "watch.json").read_text())
        rows.append({"job": job, "planted": planted, "named": found["cause"], "verdict": found["verdict"]})
        print(
            f"{'hit ' if planted == found['cause'] else 'MISS'}  {job:<18} {planted:<22} {found['verdict']}", flush=True
        )
    hits = sum(row["planted"] == row["named"] for row in rows)
    print(f"{hits} of {len(rows)} planted causes were named")
    if given.save:
        packages = provenance("torch", "stable_baselines3")
        save("planted_causes", {**packages, "seconds": given.seconds, "hits": hits, "jobs": rows})


if __name__ == "__main__":
    main()
