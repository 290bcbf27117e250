"""Does overlap cost quality? Training with --overlap strict against off: the same recipe, steps and seeds.

    python benchmarks/overlap.py [--tasks "HalfCheetah-v5 beast" …] [--seeds 10] [--jobs 2]

Runs that are already in benchmarks/results/overlap.json for the same settings are not repeated. Concurrent runs get
equal shares of the cores and share a GPU, so this is not a speed benchmark.

The policy at the end of training is evaluated with the mode action over 20 episodes. "No worse" as in learning.py: the
lower 95 % bound of the difference of inter-quartile means lies above −2 % of (off − random policy).

The statistical power is reported too: the chance of "no worse" if both sides were drawn from off's returns. If it is
small, "inconclusive" says nothing about overlap.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
from machine import RESULTS, provenance, save
from side_by_side import compare, iqm, random_policy

_SMALL = {"preset": "classic", "n_envs": 8}
TASKS: dict[str, dict[str, Any]] = {
    "HalfCheetah-v5 beast": {"env": "HalfCheetah-v5", "preset": "beast", "timesteps": 32 * 32_768},
    "HalfCheetah-v5 beast 1024x32": {
        "env": "HalfCheetah-v5",
        "preset": "beast",
        "n_envs": 1024,
        "n_steps": 32,
        "timesteps": 32 * 32_768,
    },
    "HalfCheetah-v5 beast, lambda 0.8": {
        "env": "HalfCheetah-v5",
        "preset": "beast",
        "gae_lambda": 0.8,
        "timesteps": 32 * 32_768,
    },
    "Hopper-v5": {"env": "Hopper-v5", **_SMALL, "n_steps": 256, "batch_size": 256, "timesteps": 204_800},
    "CartPole-v1": {
        "env": "CartPole-v1",
        **_SMALL,
        "n_steps": 32,
        "batch_size": 256,
        "n_epochs": 20,
        "gamma": 0.98,
        "gae_lambda": 0.8,
        "learning_rate": 1e-3,
        "lr_schedule": "linear",
        "clip_schedule": "linear",
        "timesteps": 102_400,
    },
    "Acrobot-v1": {
        "env": "Acrobot-v1",
        "preset": "classic",
        "n_envs": 16,
        "n_steps": 256,
        "batch_size": 128,
        "n_epochs": 4,
        "gae_lambda": 0.94,
        "timesteps": 204_800,
    },
    "Pendulum-v1": {
        "env": "Pendulum-v1",
        "preset": "classic",
        "n_envs": 4,
        "n_steps": 1024,
        "gamma": 0.9,
        "learning_rate": 1e-3,
        "timesteps": 151_552,
    },
}
SIDES = ("strict", "off")
_SIMULATIONS, _RESAMPLES = 400, 1000


def take_cores(shares: Any) -> None:
    """Restrict this process and its children to the next share of the cores."""
    os.sched_setaffinity(0, shares.get())


def train(task: str, side: str, seed: int) -> dict[str, Any]:
    """Return the final policy's return, and [step, seconds, return] of all evaluations."""
    import unidle

    settings = TASKS[task]
    with tempfile.TemporaryDirectory() as folder:
        run = unidle.train(
            **settings,
            overlap=side,
            seed=seed,
            eval_every=settings["timesteps"] // 2,
            eval_episodes=20,
            tensorboard=False,
            runs_dir=folder,
            quiet=True,
        )
        curve = [[r["step"], r["wall"], r["eval/return_mean"]] for r in run.records if r["kind"] == "evaluation"]
    assert curve[-1][0] == settings["timesteps"]
    return {"return": curve[-1][2], "curve": curve}


def chance_of_no_worse(returns: list[float], margin: float) -> float:
    """Return how often one side is "no worse" than the other by this margin if both are drawn from these returns."""
    rng = np.random.default_rng(0)
    n, hits = len(returns), 0
    for _ in range(_SIMULATIONS):
        one, other = rng.choice(returns, (2, n))
        indices = rng.integers(0, n, (2, _RESAMPLES, n))
        hits += bool(np.percentile(iqm(one[indices[0]]) - iqm(other[indices[1]]), 2.5) > margin)
    return hits / _SIMULATIONS


def main() -> None:
    """Train both sides, alternating, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", nargs="+", default=list(TASKS), choices=list(TASKS))
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the JSON")
    arguments = parser.parse_args()
    earlier = arguments.out / "overlap.json"
    result: dict[str, Any] = json.loads(earlier.read_text()) if earlier.exists() else {"tasks": {}}
    context = get_context("spawn")
    shares = context.Queue()
    for cores in np.array_split(sorted(os.sched_getaffinity(0)), arguments.jobs):
        shares.put(cores.tolist())
    with ProcessPoolExecutor(arguments.jobs, context, take_cores, (shares,)) as pool:
        for task in arguments.tasks:
            settings = json.loads(json.dumps(TASKS[task]))
            row = result["tasks"].get(task, {})
            if row.get("settings") != settings:
                row = {"settings": settings}
            row = {side: {} for side in SIDES} | row
            result["tasks"][task] = row
            futures = {
                pool.submit(train, task, side, seed): (side, str(seed))
                for seed in range(1, arguments.seeds + 1)
                for side in SIDES
                if str(seed) not in row[side]
            }
            for future in as_completed(futures):
                side, seed = futures[future]
                row[side][seed] = future.result()
                row["machine"] = provenance()  # of the latest run; a task without new runs keeps its own
                print(f"{task} {side} seed {seed}: {row[side][seed]['return']:.1f}", file=sys.stderr, flush=True)
                save("overlap", result, arguments.out)
            strict, off = ([run["return"] for run in row[side].values()] for side in SIDES)
            verdict = compare(strict, off, random_policy(gymnasium.make(TASKS[task]["env"])))
            row |= {"strict_iqm": verdict.pop("unidle_iqm"), "off_iqm": verdict.pop("sb3_iqm"), **verdict}
            row["chance"] = chance_of_no_worse(off, row["margin"])
            save("overlap", result, arguments.out)
    heads = ("steps", "strict", "off", "random", "margin", "lower 95 %")
    print(f"{'task':<30}" + "".join(f"{head:>12}" for head in heads) + "  verdict")
    for task, row in result["tasks"].items():
        figures = [row["strict_iqm"], row["off_iqm"], row["random"], row["margin"], row["lower_95"]]
        outcome = "no worse" if row["no_worse"] else "inconclusive"
        steps = row["settings"]["timesteps"]
        verdict_text = f"  {outcome} (chance if equal: {row['chance']:.0%})"
        print(f"{task:<30}{steps:>12,}" + "".join(f"{x:>12.1f}" for x in figures) + verdict_text)


if __name__ == "__main__":
    main()
