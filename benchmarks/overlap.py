"""Does overlap cost quality? Training with --overlap strict against off: the same recipe, steps and seeds.

    python benchmarks/overlap.py [--tasks "HalfCheetah-v5 beast" …] [--seeds 10] [--jobs 2]

Runs that benchmarks/results/overlap.json already holds for the same settings are not done again. Runs that go on at the
same time have an equal share of the cores each, and take turns on a GPU: this says nothing about speed.

Judged by the policy at the end of training, mode action, 20 episodes; "no worse" as in learning.py: the lower 95 %
bound of the difference of inter-quartile means lies above −5 % of (off − random policy).

The control is the same question about nothing: training with off and other seeds against off. Where not even that is
"no worse", so many seeds cannot tell.
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

import numpy as np
from learning import compare, random_policy
from machine import RESULTS, provenance, save

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
}
SIDES = {"strict": ("strict", 0), "off": ("off", 0), "control": ("off", 1000)}  # → overlap, and what its seeds begin at


def take_cores(shares: Any) -> None:
    """Keep this process, and what it starts, to the next share of the machine's cores."""
    os.sched_setaffinity(0, shares.get())


def train(task: str, side: str, seed: int) -> dict[str, Any]:
    """Return of the policy at the end, and [step, seconds, return] of the evaluations on the way."""
    import unidle

    settings, (overlap, first_seed) = dict(TASKS[task]), SIDES[side]
    with tempfile.TemporaryDirectory() as folder:
        run = unidle.train(
            **settings,
            overlap=overlap,
            seed=first_seed + seed,
            eval_every=settings["timesteps"] // 2,
            eval_episodes=20,
            tensorboard=False,
            runs_dir=folder,
            quiet=True,
        )
        curve = [[r["step"], r["wall"], r["eval/return_mean"]] for r in run.records if r["kind"] == "evaluation"]
    assert curve[-1][0] == settings["timesteps"]
    return {"return": curve[-1][2], "curve": curve}


def main() -> None:
    """Train both sides, alternating, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", nargs="+", default=list(TASKS), choices=list(TASKS))
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--sides", nargs="+", default=list(SIDES), choices=list(SIDES))
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
            wanted = json.loads(json.dumps(TASKS[task]))
            row = result["tasks"].get(task, {})
            if row.get("settings") != wanted:
                row = {"settings": wanted}
            row = {side: {} for side in SIDES} | row
            result["tasks"][task] = row
            futures = {
                pool.submit(train, task, side, seed): (side, str(seed))
                for seed in range(1, arguments.seeds + 1)
                for side in arguments.sides
                if str(seed) not in row[side]
            }
            for future in as_completed(futures):
                side, seed = futures[future]
                row[side][seed] = future.result()
                row["machine"] = provenance()  # of the latest run; one that is taken from the file keeps its own
                print(f"{task} {side} seed {seed}: {row[side][seed]['return']:.1f}", file=sys.stderr, flush=True)
                save("overlap", result, arguments.out)
            strict, off, control = ([run["return"] for run in row[side].values()] for side in SIDES)
            verdict = compare(strict, off, random_policy(TASKS[task]["env"]))
            row |= {"strict_iqm": verdict.pop("unidle_iqm"), "off_iqm": verdict.pop("sb3_iqm"), **verdict}
            if control:
                row["of_control"] = compare(control, off, row["random"])
            save("overlap", result, arguments.out)
    heads = ("steps", "strict", "off", "random", "allowed", "lower 95 %", "of control")
    print(f"{'task':<30}" + "".join(f"{head:>12}" for head in heads) + "  verdict")
    for task, row in result["tasks"].items():
        figures = [row["strict_iqm"], row["off_iqm"], row["random"], row["margin"], row["lower_95"]]
        figures.append(row["of_control"]["lower_95"] if "of_control" in row else float("nan"))
        judged = "no worse" if row["no_worse"] else "not shown"
        steps = row["settings"]["timesteps"]
        print(f"{task:<30}{steps:>12,}" + "".join(f"{x:>12.1f}" for x in figures) + f"  {judged}")


if __name__ == "__main__":
    main()
