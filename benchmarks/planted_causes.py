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
from contextlib import ExitStack, nullcontext, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

import psutil
import torch
from companion import core_taken, gpu_memory_held, running
from diagnosed_jobs import FREE_GPU_MEMORY, ON_ONE_CORE, diagnosed_jobs
from machine import RESULTS, provenance, save
from slow_envs import serving

HERE = Path(__file__).parent
UNIDLE = str(Path(sys.executable).with_name("unidle"))
TIMEOUT_S = 120.0  # per job


def run_watch(job: str, seconds: float) -> dict[str, Any]:
    with TemporaryDirectory() as folder:
        command = [sys.executable, str(HERE / "planted_jobs.py"), job, "--seconds", str(seconds)]
        watch = [UNIDLE, "watch", "--out", folder, "--"]
        run_program("watch", [*watch, *command])
        finding: dict[str, Any] = json.loads((Path(folder) / "watch.json").read_text())
    return finding


def run_diagnose(job: str, seconds: float) -> dict[str, Any]:
    on_gpu = torch.cuda.is_available()
    flags = [*diagnosed_jobs(on_gpu)[job][1].split(), "--seconds", str(seconds), "--json"]
    if "slow_envs:Asking" in flags:
        flags += ["--env-kwargs", json.dumps({"port": serving()})]
    prefix = ["taskset", "-c", "0"] if job in ON_ONE_CORE and not on_gpu else []
    with running(gpu_memory_held(FREE_GPU_MEMORY[job])) if job in FREE_GPU_MEMORY else nullcontext():
        finding: dict[str, Any] = json.loads(run_program("diagnose", [*prefix, UNIDLE, "diagnose", *flags]))
    return finding


class _FailedError(RuntimeError):
    """A program failed; the message has the last line of its error output, `output` all of it."""

    def __init__(self, name: str, status: int, output: str) -> None:
        last = (output.strip() or "no output").splitlines()[-1]
        how = "failed" if status > 0 else f"was ended by {signal.Signals(-status).name}"
        super().__init__(f"{name} {how}: {last}")
        self.output = output


def run_program(name: str, command: list[str]) -> str:
    """Run a program and return its stdout; on a timeout or Ctrl-C, kill it and its children."""
    path = os.pathsep.join([str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": path, "PYTHONFAULTHANDLER": "1"}
    pipe = subprocess.PIPE
    with subprocess.Popen(command, env=environment, stdout=pipe, stderr=pipe, text=True) as program:
        try:
            printed, error_output = program.communicate(timeout=TIMEOUT_S)
        except (subprocess.TimeoutExpired, KeyboardInterrupt):
            _kill_all(psutil.Process(program.pid))
            raise
    if program.returncode:
        raise _FailedError(name, program.returncode, error_output)
    return printed


def _kill_all(root: psutil.Process) -> None:
    """Kill by process tree: in its own process group, it would survive if this program's group is killed."""
    for process in [root, *root.children(recursive=True)]:
        with suppress(psutil.NoSuchProcess):
            process.kill()


def find_cause(how: str, job: str, seconds: float) -> dict[str, Any]:
    """Return the finding of a job; a job that fails counts as not found and does not stop the others."""
    try:
        return run_watch(job, seconds) if how == "watch" else run_diagnose(job, seconds)
    except (RuntimeError, ValueError, subprocess.TimeoutExpired) as error:  # ValueError: its output is not JSON
        return {"cause": "failed", "verdict": str(error), "output": getattr(error, "output", "")}


def is_hit(row: dict[str, Any]) -> bool:
    """Whether the planted cause was named, first or beside CPU contention."""
    return row["planted"] in (row["named"], *(other["cause"] for other in row.get("also", ())))


def causes_of(how: str) -> dict[str, str]:
    """Return the planted cause of each job."""
    if how == "diagnose":
        return {job: cause for job, (cause, _) in diagnosed_jobs(torch.cuda.is_available()).items()}
    from planted_jobs import JOBS  # needs Stable-Baselines3

    return {job: cause for job, (cause, _) in JOBS.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--how", choices=("watch", "diagnose"), default="watch")
    parser.add_argument("--seconds", type=float, help="of training in each job; default: 8 for watch, 5 for diagnose")
    parser.add_argument("--jobs", nargs="*", help="jobs to run; default: all")
    parser.add_argument("--beside", type=int, default=0, help="cores that other programs take during each job")
    parser.add_argument("--save", action="store_true", help="write the results to benchmarks/results after each job")
    parser.add_argument("--out", type=Path, help="write them to this folder, with the full findings of each job")
    arguments = parser.parse_args()
    causes = causes_of(arguments.how)
    if unknown := set(arguments.jobs or ()) - causes.keys():
        parser.error(f"unknown job {', '.join(sorted(unknown))}; the jobs are: {', '.join(causes)}")
    seconds = arguments.seconds or {"watch": 8.0, "diagnose": 5.0}[arguments.how]
    name = "planted_causes" if arguments.how == "watch" else "planted_causes_diagnose"
    name += "_beside" * bool(arguments.beside) + "_gpu" * torch.cuda.is_available()
    packages = provenance("torch", *(["stable_baselines3"] if arguments.how == "watch" else []))
    earlier = (arguments.out or RESULTS) / f"{name}.json"
    rows: list[dict[str, Any]] = []
    if arguments.jobs and (arguments.save or arguments.out) and earlier.exists():
        rows = [row for row in json.loads(earlier.read_text())["jobs"] if row["job"] not in arguments.jobs]
    kept, details = len(rows), dict[str, Any]()
    for job in arguments.jobs or causes:
        began, planted = perf_counter(), causes[job]
        with ExitStack() as companions:
            for _ in range(arguments.beside):
                companions.enter_context(running(core_taken()))
            details[job] = finding = find_cause(arguments.how, job, seconds)
        duration = perf_counter() - began
        also = finding.get("also", ()) if arguments.how == "watch" else ()
        row = {"job": job, "planted": planted, "named": finding["cause"], "verdict": finding["verdict"]}
        if arguments.beside:
            row["also"] = [{"cause": other["cause"], "verdict": other["verdict"]} for other in also]
            row["others_cores"] = finding.get("others_cores")
        rows.append({**row, "date": packages["date"]})
        texts = " Also: ".join([finding["verdict"], *(other["verdict"] for other in also)])
        print(f"{'hit ' if is_hit(row) else 'MISS'}  {duration:3.0f} s  {job:<20} {planted:<22} {texts}", flush=True)
        hits = sum(map(is_hit, rows))
        if arguments.save or arguments.out:
            save(
                name,
                {**packages, "seconds": seconds, "beside": arguments.beside, "hits": hits, "jobs": rows},
                arguments.out,
            )
        if arguments.out:
            save(f"{name}_details", details, arguments.out)
    new_rows = rows[kept:]
    print(f"{sum(map(is_hit, new_rows))} of {len(new_rows)} planted causes were named")


if __name__ == "__main__":
    main()
