"""Does `unidle tune` find what a person found, and are its predictions honest?

    python benchmarks/tuning.py [--only tuning|predictions] [--budget 80] [--out FOLDER]

Tuning: HalfCheetah-v5 with preset `beast`, from one worker, without CUDA graphs and without overlap. What it ends with
is compared with the defaults, which are the best that was found by hand: the two take turns, A B B A.

Predictions: two jobs, four changes each. The speed-up that the pipeline model predicts from probes of the job as it is,
and what is measured when the job as it is and the job with the change take turns.

Both parts together take about four minutes on 16 cores with a GPU. The machine should have nothing else to do.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from machine import provenance, save

from unidle.config import Config, Engine
from unidle.config.layers import lay
from unidle.config.machine import gpu_name
from unidle.config.validate import validated
from unidle.tuning.model import predicted_speedup
from unidle.tuning.profile import Profile
from unidle.tuning.trials import Trial, TrialError
from unidle.tuning.trials_compare import compare
from unidle.tuning.tune import tune
from unidle.tuning.tune_changes import Change
from unidle.tuning.tune_interval import Interval
from unidle.tuning.tune_outcomes import Outcome, Tuned

_STRETCH, _PATIENCE = 0.6, 60.0
# What a job starts from, and the changes that are predicted and measured from there.
JOBS: dict[str, tuple[str, dict[str, Any], list[dict[str, Any]]]] = {
    "beast, 1 worker": (
        "beast",
        {"workers": 1},
        [{"workers": 4}, {"workers": 8}, {"workers": None}, {"slices": 1}],
    ),
    "fast, 2 workers": (
        "fast",
        {"workers": 2},
        [{"workers": 4}, {"workers": 8}, {"workers": None, "subproc": False}, {"slices": 1}],
    ),
}


def job(env: str, preset: str, **engine: Any) -> Config:
    """A validated job with these engine settings and the preset's recipe, overlap off."""
    layers = lay(preset, None, gpu_name() is not None, env)
    return validated(layers.settled_with({"env": env, "overlap": "off", **engine}), layers.preset_batch_size)


class Printed:
    """Shows on standard error how tuning goes."""

    def on_stage(self, text: str) -> None:
        print(f"{text} …", file=sys.stderr, flush=True)

    def on_start(self, tuned: Tuned) -> None:
        print(f"as it is: {tuned.first_rate:,.0f} steps/s", file=sys.stderr, flush=True)

    def on_look(self, change: Change, measured: Interval, pairs: int) -> None:
        pass

    def on_outcome(self, outcome: Outcome) -> None:
        print(outcome.plain(), file=sys.stderr, flush=True)


def tuning(env: str, preset: str, budget: float) -> dict[str, Any]:
    """Tune from the slow start, then measure what was found against the defaults."""
    start = job(env, preset, workers=1, graphs=False)
    tuned = tune(start, budget, Printed())
    best = replace(start, engine=Engine())
    found: dict[str, Any] = {
        "env": env,
        "preset": preset,
        "start": {"workers": 1, "graphs": False},
        "budget": budget,
        "seconds": tuned.seconds,
        "ended_by": tuned.ended_by,
        "steps_per_second": {"before": tuned.first_rate, "after": tuned.rate},
        "engine": tuned.engine,
        "changes": [outcome.plain() for outcome in tuned.outcomes],
    }
    if tuned.config.engine == best.engine:
        return {
            **found,
            "found_over_best": {"mean": 1.0, "low": 1.0, "high": 1.0},
            "note": "they are the same settings",
        }
    with_best, with_found = Trial(best), Trial(tuned.config)
    try:
        with_best.start(_PATIENCE)
        with_found.start(_PATIENCE)
        result = compare(with_best, with_found, _STRETCH, _PATIENCE, until=time.monotonic() + 10)
        return {**found, "found_over_best": vars(result.measured)}
    finally:
        with_best.close()
        with_found.close()


def predictions(env: str, name: str) -> list[dict[str, Any]]:
    """Predicted and measured speed-up of each change of one job."""
    preset, engine, changes = JOBS[name]
    now = job(env, preset, **engine)
    probe = Trial(now)
    try:
        profile: Profile = probe.profile(6.0, _PATIENCE)
    finally:
        probe.close()
    present = Trial(now)
    rows = []
    try:
        present.start(_PATIENCE)
        for values in changes:
            then = replace(now, engine=replace(now.engine, **values))
            row: dict[str, Any] = {"job": name, "change": values}
            row["predicted"] = predicted_speedup(profile, now.engine, then.engine)
            rival = Trial(then)
            try:
                rival.start(_PATIENCE)
                result = compare(present, rival, _STRETCH, _PATIENCE, until=time.monotonic() + 3)
                row["measured"] = vars(result.measured)
                if row["predicted"] is not None:
                    row["off_by"] = abs(row["predicted"] / result.measured.mean - 1)
            except TrialError as error:
                row["failed"] = f"{error.kind}: {error}"
            finally:
                rival.close()
            print(row, file=sys.stderr, flush=True)
            rows.append(row)
    finally:
        present.close()
    return rows


def main() -> None:
    """Measure, save and print both tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--env", default="HalfCheetah-v5")
    parser.add_argument("--preset", default="beast", help="of the job that is tuned")
    parser.add_argument("--budget", type=float, default=80.0, help="seconds for the tuner")
    parser.add_argument("--only", choices=["tuning", "predictions"])
    parser.add_argument("--jobs", nargs="*", choices=list(JOBS), default=list(JOBS))
    parser.add_argument("--out", type=Path, default=None, help="folder for the JSON (default: benchmarks/results)")
    arguments = parser.parse_args()
    began = time.monotonic()
    if arguments.only != "predictions":
        result = {"machine": provenance(), **tuning(arguments.env, arguments.preset, arguments.budget)}
        save("tuning", result, arguments.out)
        over = result["found_over_best"]
        print(f"found against best by hand: {over['mean']:.2f} ({over['low']:.2f} … {over['high']:.2f})")
    if arguments.only != "tuning":
        rows = [row for name in arguments.jobs for row in predictions(arguments.env, name)]
        off = [row["off_by"] for row in rows if "off_by" in row]
        middle = median(off) if off else None
        save(
            "predictions",
            {"machine": provenance(), "env": arguments.env, "median_off_by": middle, "rows": rows},
            arguments.out,
        )
        for row in rows:
            predicted = "–" if row["predicted"] is None else f"{row['predicted']:.2f}"
            measured = f"{row['measured']['mean']:.2f}" if "measured" in row else row["failed"]
            print(f"{row['job']:<20} {row['change']!s:<40} predicted {predicted:>6}  measured {measured}")
        print("median of |predicted / measured − 1|: " + ("–" if middle is None else f"{middle:.0%}"))
    print(f"{time.monotonic() - began:.0f} seconds in all", file=sys.stderr)


if __name__ == "__main__":
    main()
