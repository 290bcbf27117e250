"""How often the planted cause of a slow training job is named: python benchmarks/planted_causes.py [--how diagnose]

Runs each job of `planted_jobs.py`, which are Stable-Baselines3's, under `unidle watch`; or has `unidle diagnose` look
at unidle's own training on the same environments. Compares the verdict with what was planted.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from machine import provenance, save
from planted_jobs import JOBS, serving

HERE = Path(__file__).parent
UNIDLE = str(Path(sys.executable).with_name("unidle"))

SMALL = "--preset classic --n-envs 4 --n-steps 64 --batch-size 64 --n-epochs 4"
HEALTHY = "--preset classic --n-envs 8 --n-steps 256 --batch-size 512 --n-epochs 10 --network-arch 512,512"
if torch.cuda.is_available():
    HEALTHY = "--preset classic --n-envs 64 --n-steps 256 --batch-size 8192 --n-epochs 30 --network-arch 2048,2048"
# Job → (what is planted, as `unidle diagnose` calls it; what to train).
DIAGNOSED = {
    "sleeping": ("environment waits", f"--env planted_jobs:Sleeping {SMALL}"),
    "sleeping, one worker": ("environment waits", f"--env planted_jobs:Sleeping --workers 1 {SMALL}"),
    "asking a server": ("environment waits", f"--env planted_jobs:Asking {SMALL}"),
    "burning": ("environment computes", f"--env planted_jobs:Burning {SMALL}"),
    "burning, one worker": ("environment computes", f"--env planted_jobs:Burning --workers 1 {SMALL}"),
    "threads": ("too many threads", f"--env planted_jobs:Threaded --workers 4 {SMALL}"),
    "tiny minibatches": ("small pieces", f"--env planted_jobs:Cheap {SMALL} --batch-size 4 --n-epochs 10"),
    "tiny, off-policy": ("small pieces", "--env planted_jobs:Cheap --preset dqn --n-envs 4 --batch-size 4"),
    "one environment": ("too few environments", f"--env planted_jobs:Cheap {SMALL} --n-envs 1 --n-epochs 1"),
    "healthy": ("nothing to gain", f"--env planted_jobs:Cheap {HEALTHY}"),
}


def watched(job: str, seconds: float) -> dict[str, Any]:
    with TemporaryDirectory() as folder:
        command = [sys.executable, str(HERE / "planted_jobs.py"), job, "--seconds", str(seconds)]
        watch = [UNIDLE, "watch", "--out", folder, "--"]
        subprocess.run([*watch, *command], check=True, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
        found: dict[str, Any] = json.loads((Path(folder) / "watch.json").read_text())
    return found


def diagnosed(job: str, seconds: float) -> dict[str, Any]:
    words = [*DIAGNOSED[job][1].split(), "--seconds", str(seconds), "--json"]
    if "planted_jobs:Asking" in words:
        words += ["--env-kwargs", json.dumps({"port": serving()})]
    # Without a GPU, more cores would help what is healthy: on one, nothing does.
    alone = ["taskset", "-c", "0"] if job == "healthy" and not torch.cuda.is_available() else []
    environment = {**os.environ, "PYTHONPATH": str(HERE)}
    command = [*alone, UNIDLE, "diagnose", *words]
    done = subprocess.run(command, check=True, env=environment, capture_output=True, text=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--how", choices=("watch", "diagnose"), default="watch")
    parser.add_argument("--seconds", type=float, default=8.0, help="of training in each job")
    parser.add_argument("--jobs", nargs="*", help="some of them; none: all")
    parser.add_argument("--save", action="store_true", help="write the result beside the others")
    given = parser.parse_args()
    causes = {job: cause for job, (cause, _) in (JOBS if given.how == "watch" else DIAGNOSED).items()}
    look = watched if given.how == "watch" else diagnosed
    rows = []
    for job in given.jobs or causes:
        planted, found = causes[job], look(job, given.seconds)
        rows.append({"job": job, "planted": planted, "named": found["cause"], "verdict": found["verdict"]})
        print(
            f"{'hit ' if planted == found['cause'] else 'MISS'}  {job:<20} {planted:<22} {found['verdict']}", flush=True
        )
    hits = sum(row["planted"] == row["named"] for row in rows)
    print(f"{hits} of {len(rows)} planted causes were named")
    if given.save:
        packages = provenance("torch", "stable_baselines3")
        name = "planted_causes" if given.how == "watch" else "planted_causes_diagnose"
        save(name, {**packages, "seconds": given.seconds, "hits": hits, "jobs": rows})


if __name__ == "__main__":
    main()
