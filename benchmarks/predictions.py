"""Are the predictions of `unidle diagnose` accurate?

    python benchmarks/predictions.py [--jobs "beast, one worker" …] [--seconds 5] [--out FOLDER]

Each job is diagnosed. The first advice with flags and a predicted speed-up (not an upper bound) is applied: the job
with and without those flags alternates, A B B A, and the measured speed-up is compared with the prediction. Earlier
results of jobs that are not named are kept. Use an otherwise idle machine.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from statistics import median
from subprocess import TimeoutExpired
from typing import Any

import torch
from diagnosed_jobs import diagnosed_jobs
from machine import RESULTS, provenance, save
from planted_causes import UNIDLE, run_program

from unidle.cli.job import JobFlags, job_of
from unidle.errors import UsageError
from unidle.tuning.search.compare import compare
from unidle.tuning.search.trial import Trial, TrialError

_SEGMENT, _TIMEOUT, _DURATION = 0.6, 90.0, 4.0  # seconds
_GPU_JOBS = {
    "beast, one worker": "--env HalfCheetah-v5 --preset beast --overlap off --workers 1",
    "beast, graphs off": "--env HalfCheetah-v5 --preset beast --overlap off --no-graphs",
    "heavy, four workers": "--env HalfCheetah-v5 --preset heavy --workers 4",
    "sac, one worker": "--env HalfCheetah-v5 --preset sac --n-envs 16 --workers 1 --utd-ratio 0.25",
    "sac, graphs off": "--env HalfCheetah-v5 --preset sac --n-envs 16 --no-graphs --utd-ratio 0.25",
}
_PLANTED = (
    "sleeping, one worker",
    "burning, one worker",
    "tiny minibatches",
    "tiny, off-policy",
    "graphs off",
    "TF32 off",
    "one environment",
)


def jobs() -> dict[str, str]:
    """Return the training flags of each job."""
    on_gpu = torch.cuda.is_available()
    planted = {name: flags for name, (_, flags) in diagnosed_jobs(on_gpu).items() if name in _PLANTED}
    return {**(_GPU_JOBS if on_gpu else {}), **planted}


def advice_for(flags: str, seconds: float) -> dict[str, Any] | None:
    """Return the advice of `unidle diagnose` and whether it is rough; None if there is no advice with flags."""
    command = [UNIDLE, "diagnose", *flags.split(), "--seconds", str(seconds), "--json"]
    found = json.loads(run_program("diagnose", command))
    every = [*found["engine_changes"], *found["recipe_changes"]]
    first = next((a for a in every if a["flags"] and a["speedup"] is not None and not a["at_most"]), None)
    return first and {**first, "is_rough": found["predictions_are_rough"]}


def measured(
    flags: str, advised: str, segment: float = _SEGMENT, timeout: float = _TIMEOUT, duration: float = _DURATION
) -> dict[str, float]:
    """Return the measured speed-up from the flags `advised`, in alternating segments."""
    configs = [job_of(JobFlags, [*flags.split(), *extra.split()], "train").config for extra in ("", advised)]
    trials = [Trial(config) for config in configs]
    try:
        for trial in trials:
            trial.start(timeout)
        current, changed = trials
        return vars(compare(current, changed, segment, timeout, until=time.monotonic() + duration).measured)
    finally:
        for trial in trials:
            trial.close()


def predicted_and_measured(flags: str, seconds: float) -> dict[str, Any]:
    """Return one row of the table, also for a job that fails or has no such advice."""
    try:
        advice = advice_for(flags, seconds)
        if advice is None:
            return {"left_out": "no advice that flags can follow"}
        row = {"flags": advice["flags"], "predicted": advice["speedup"], "is_rough": advice["is_rough"]}
        row["measured"] = measured(flags, advice["flags"])
        return {**row, "off_by": abs(row["predicted"] / row["measured"]["mean"] - 1)}
    except (TrialError, UsageError, RuntimeError, ValueError, TimeoutExpired) as error:
        return {"left_out": f"failed: {error}"}


def main() -> None:
    """Measure, save after each job, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", nargs="+", default=list(jobs()), choices=list(jobs()))
    parser.add_argument("--seconds", type=float, default=5.0, help="of training in each diagnosis")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the JSON")
    arguments = parser.parse_args()
    name = "predictions" + "_gpu" * torch.cuda.is_available()
    earlier = arguments.out / f"{name}.json"
    rows: dict[str, Any] = json.loads(earlier.read_text())["jobs"] if earlier.exists() else {}
    for job in arguments.jobs:
        flags = jobs()[job]
        found = predicted_and_measured(flags, arguments.seconds)
        rows[job] = row = {"trained": flags, **found, "machine": provenance()}
        off = [one["off_by"] for one in rows.values() if "off_by" in one]
        middle = median(off) if off else None
        save(name, {"median_off_by": middle, "jobs": rows}, arguments.out)
        outcome = row.get("left_out") or f"{row['predicted']:5.2f} predicted, {row['measured']['mean']:5.2f} measured"
        print(f"{job:<24}{row.get('flags', ''):<32}{outcome}", flush=True)
    print(f"{len(off)} predictions, off by {middle:.0%} (median)" if off else "no predictions")


if __name__ == "__main__":
    main()
