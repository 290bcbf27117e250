"""Does `unidle tune` find the settings that were found by hand?

    python benchmarks/tuning.py [--budget 120] [--out FOLDER]

HalfCheetah-v5 with preset `beast`, starting from one worker, without CUDA graphs and without overlap. The result is
compared with the defaults, the best settings found by hand, in alternating segments, A B B A. Use an otherwise idle
machine with 16 cores and a GPU.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from machine import provenance, save

from unidle.config import Config, Engine
from unidle.config.machine import gpu_name
from unidle.config.resolve import resolve_layers
from unidle.config.validate import validated
from unidle.tuning.search.changes import Change
from unidle.tuning.search.compare import compare
from unidle.tuning.search.interval import Interval
from unidle.tuning.search.outcomes import Outcome, Tuned
from unidle.tuning.search.trial import Trial
from unidle.tuning.search.tune import tune

_SEGMENT, _TIMEOUT = 0.6, 60.0


def job(env: str, preset: str, **engine: Any) -> Config:
    """Return a validated job with these engine settings and the preset's recipe, without overlap."""
    layers = resolve_layers(preset, None, gpu_name() is not None, env)
    return validated(layers.with_flags({"env": env, "overlap": "off", **engine}), layers.preset_batch_size)


class Printed:
    """Shows tuning progress on standard error."""

    def on_stage(self, text: str) -> None:
        print(f"{text} …", file=sys.stderr, flush=True)

    def on_start(self, tuned: Tuned) -> None:
        print(f"current settings: {tuned.first_rate:,.0f} steps/s", file=sys.stderr, flush=True)

    def on_interim_result(self, change: Change, measured: Interval, pairs: int) -> None:
        pass

    def on_outcome(self, outcome: Outcome) -> None:
        print(outcome.plain(), file=sys.stderr, flush=True)


def tuning(env: str, preset: str, budget: float) -> dict[str, Any]:
    """Tune from the slow settings, then compare the result with the defaults."""
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
            "note": "the settings are the same",
        }
    with_best, with_found = Trial(best), Trial(tuned.config)
    try:
        with_best.start(_TIMEOUT)
        with_found.start(_TIMEOUT)
        result = compare(with_best, with_found, _SEGMENT, _TIMEOUT, until=time.monotonic() + 10)
        return {**found, "found_over_best": vars(result.measured)}
    finally:
        with_best.close()
        with_found.close()


def main() -> None:
    """Tune, compare, save and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--env", default="HalfCheetah-v5")
    parser.add_argument("--preset", default="beast")
    parser.add_argument("--budget", type=float, default=120.0, help="seconds for the tuner")
    parser.add_argument("--out", type=Path, default=None, help="folder for the JSON (default: benchmarks/results)")
    arguments = parser.parse_args()
    result = {"machine": provenance(), **tuning(arguments.env, arguments.preset, arguments.budget)}
    save("tuning", result, arguments.out)
    rates, over = result["steps_per_second"], result["found_over_best"]
    print(
        f"from {rates['before']:,.0f} to {rates['after']:,.0f} steps/s in {result['seconds']:.0f} s: {result['engine']}"
    )
    print(f"found by tune against best by hand: {over['mean']:.2f} ({over['low']:.2f} … {over['high']:.2f})")


if __name__ == "__main__":
    main()
