"""How often is the planted cause of a slow training job found? python benchmarks/planted_causes.py [--how diagnose]

Runs each Stable-Baselines3 job of `planted_jobs.py` under `unidle watch`, or each unidle job of `diagnosed_jobs.py`
with `unidle diagnose`, and compares the verdict with the planted cause. With `--save`, earlier results of jobs that are
not named are kept.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
from contextlib import nullcontext, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

import psutil
import torch
from beside import gpu_memory_held, running
from diagnosed_jobs import ON_ONE_CORE, ROOM_ON_GPU, diagnosed_jobs
from machine import RESULTS, provenance, save
from slow_envs import serving

HERE = Path(__file__).parent
UNIDLE = str(Path(sys.executable).with_name("unidle"))
PATIENCE_S = 120.0  # with one job


def watched(job: str, seconds: float) -> dict[str, Any]:
    with TemporaryDirectory() as folder:
        command = [sys.executable, str(HERE / "planted_jobs.py"), job, "--seconds", str(seconds)]
        watch = [UNIDLE, "watch", "--out", folder, "--"]
        output("watch", [*watch, *command])
        found: dict[str, Any] = json.loads((Path(folder) / "watch.json").read_text())
    return found


def diagnosed(job: str, seconds: float) -> dict[str, Any]:
    on_gpu = torch.cuda.is_available()
    words = [*diagnosed_jobs(on_gpu)[job][1].split(), "--seconds", str(seconds), "--json"]
    if "slow_envs:Asking" in words:
        words += ["--env-kwargs", json.dumps({"port": serving()})]
    alone = ["taskset", "-c", "0"] if job in ON_ONE_CORE and not on_gpu else []
    with running(gpu_memory_held(ROOM_ON_GPU[job])) if job in ROOM_ON_GPU else nullcontext():
        found: dict[str, Any] = json.loads(output("diagnose", [*alone, UNIDLE, "diagnose", *words]))
    return found


class _FailedError(RuntimeError):
    """A program failed; the message has its last line, `said` its full output."""

    def __init__(self, name: str, status: int, said: str) -> None:
        last = (said.strip() or "no output").splitlines()[-1]
        how = "failed" if status > 0 else f"was ended by {signal.Signals(-status).name}"
        super().__init__(f"{name} {how}: {last}")
        self.said = said


def output(name: str, command: list[str]) -> str:
    """Run a program and return its output; on an early exit, kill it and its children."""
    path = os.pathsep.join([str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": path, "PYTHONFAULTHANDLER": "1"}
    pipe = subprocess.PIPE
    with subprocess.Popen(command, env=environment, stdout=pipe, stderr=pipe, text=True) as program:
        try:
            printed, complaint = program.communicate(timeout=PATIENCE_S)
        except (subprocess.TimeoutExpired, KeyboardInterrupt):
            _kill_all(psutil.Process(program.pid))
            raise
    if program.returncode:
        raise _FailedError(name, program.returncode, complaint)
    return printed


def _kill_all(root: psutil.Process) -> None:
    """Kill by process tree: in its own process group, it would survive if this program's group is killed."""
    for process in [root, *root.children(recursive=True)]:
        with suppress(psutil.NoSuchProcess):
            process.kill()


def tried(how: str, job: str, seconds: float) -> dict[str, Any]:
    """Return the finding of a job; a job that fails counts as not found and does not stop the others."""
    try:
        return watched(job, seconds) if how == "watch" else diagnosed(job, seconds)
    except (RuntimeError, ValueError, subprocess.TimeoutExpired) as error:  # ValueError: its output is not JSON
        return {"cause": "failed", "verdict": str(error), "said": getattr(error, "said", "")}


def causes_of(how: str) -> dict[str, str]:
    """Return the planted cause of each job."""
    if how == "diagnose":
        return {job: cause for job, (cause, _) in diagnosed_jobs(torch.cuda.is_available()).items()}
    from planted_jobs import JOBS  # which needs Stable-Baselines3

    return {job: cause for job, (cause, _) in JOBS.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--how", choices=("watch", "diagnose"), default="watch")
    parser.add_argument("--seconds", type=float, help="of training in each job; default: 8 to watch, 5 to diagnose")
    parser.add_argument("--jobs", nargs="*", help="some of them; default: all")
    parser.add_argument("--save", action="store_true", help="write the results to benchmarks/results after each job")
    parser.add_argument("--out", type=Path, help="write them to this folder, with the full findings of each job")
    given = parser.parse_args()
    causes = causes_of(given.how)
    if unknown := set(given.jobs or ()) - causes.keys():
        parser.error(f"unknown job {', '.join(sorted(unknown))}; the jobs are: {', '.join(causes)}")
    seconds = given.seconds or {"watch": 8.0, "diagnose": 5.0}[given.how]
    name = "planted_causes" if given.how == "watch" else "planted_causes_diagnose"
    name += "_gpu" * torch.cuda.is_available()
    packages = provenance("torch", *(["stable_baselines3"] if given.how == "watch" else []))
    earlier = (given.out or RESULTS) / f"{name}.json"
    rows: list[dict[str, Any]] = []
    if given.jobs and (given.save or given.out) and earlier.exists():
        rows = [row for row in json.loads(earlier.read_text())["jobs"] if row["job"] not in given.jobs]
    kept, details = len(rows), dict[str, Any]()
    for job in given.jobs or causes:
        began, planted = perf_counter(), causes[job]
        details[job] = found = tried(given.how, job, seconds)
        took = perf_counter() - began
        row = {"job": job, "planted": planted, "named": found["cause"], "verdict": found["verdict"]}
        rows.append({**row, "date": packages["date"]})
        mark = "hit " if planted == found["cause"] else "MISS"
        print(f"{mark}  {took:3.0f} s  {job:<20} {planted:<22} {found['verdict']}", flush=True)
        hits = sum(row["planted"] == row["named"] for row in rows)
        if given.save or given.out:
            save(name, {**packages, "seconds": seconds, "hits": hits, "jobs": rows}, given.out)
        if given.out:
            save(f"{name}_details", details, given.out)
    now = rows[kept:]
    print(f"{sum(row['planted'] == row['named'] for row in now)} of {len(now)} planted causes were named")


if __name__ == "__main__":
    main()
