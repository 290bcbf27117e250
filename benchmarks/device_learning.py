"""Do policies learn in device environments? Each task against a baseline, several seeds, with learning curves.

    python benchmarks/device_learning.py [--tasks Pendulum …] [--seeds 3] [--picture docs/images/device.svg]

Judged by 100 episodes in new environments with unseen seeds, with the mode action or, for some tasks, sampled actions.
Runs that are already in benchmarks/results/device_learning.json for the same settings are not repeated.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from machine import RESULTS, provenance, save

EPISODES = 100
# The mean return of every seed must exceed `goal`; `baseline` says what the goal means.
TASKS: dict[str, dict[str, Any]] = {
    "CartPole": {
        "env": "unidle/CartPole-v1",
        "goal": 475.0,
        "baseline": "solved, as Gymnasium has it (random: 22)",
        "recipe": {"n_steps": 32, "learning_rate": 1e-3, "timesteps": 900_000},
    },
    "Pendulum": {
        "env": "unidle/Pendulum-v1",
        "goal": -250.0,
        "baseline": "upright most of the time (random: -1,200)",
        "recipe": {"n_steps": 32, "gamma": 0.9, "n_epochs": 10, "learning_rate": 1e-3, "timesteps": 1_500_000},
    },
    "Acrobot": {
        "env": "unidle/Acrobot-v1",
        "goal": -100.0,
        "baseline": "Gymnasium's threshold (random: -500)",
        "recipe": {"n_steps": 64, "gae_lambda": 0.94, "ent_coef": 0.01, "learning_rate": 1e-3, "timesteps": 1_500_000},
    },
    "Mission, level 1": {
        "env": "unidle/Mission-v0",
        "goal": 11.0,
        "baseline": "nearly every mission fulfilled, sampled orders (random: -0.5, at most about 11.6)",
        "sampled": True,
        "recipe": {"n_steps": 32, "learning_rate": 1e-3, "timesteps": 1_500_000},
    },
    "Trading": {
        "env": "unidle/Trading-v0",
        "goal": 3.4,
        "baseline": "equal parts, bought and held, on the days that it was trained on",
        "recipe": {"n_steps": 64, "gamma": 0.9, "log_std_init": -1.0, "learning_rate": 3e-4, "timesteps": 2_500_000},
    },
}
_ALL = {"n_envs": 256, "batch_size": 2048, "n_epochs": 4, "net_arch": (64, 64), "preset": "classic"}


def train(task: dict[str, Any], seed: int) -> dict[str, Any]:
    """Return the final policy's return, and [step, seconds, return] of all evaluations."""
    import unidle

    settings = {**_ALL, **task["recipe"]}
    with tempfile.TemporaryDirectory() as folder:
        run = unidle.train(
            task["env"],
            seed=seed,
            eval_every=settings["timesteps"] // 10,
            eval_episodes=20,
            tensorboard=False,
            runs_dir=folder,
            quiet=True,
            **settings,
        )
        curve = [[r["step"], r["wall"], r["eval/return_mean"]] for r in run.records if r["kind"] == "evaluation"]
        evaluation = run.evaluate(EPISODES, deterministic=not task.get("sampled", False))
    return {"return": evaluation.mean_return, "seconds": curve[-1][1], "curve": curve}


def draw(result: dict[str, Any]) -> str:
    """Draw one chart: progress from the first evaluation (0) to the goal (1)."""
    from unidle.report.page.svg import Reference, Series, line_chart, standalone

    series = []
    for name, row in result["tasks"].items():
        curves = np.array([[point[2] for point in run["curve"]] for run in row["seeds"].values()]).mean(0)
        steps = [point[0] for point in next(iter(row["seeds"].values()))["curve"]]
        series.append(Series(name, steps, ((curves - curves[0]) / (row["goal"] - curves[0])).tolist()))
    size = (720, 330)
    chart = line_chart(
        "Environments on the device: from the first evaluation (0) to the goal (1), mean over seeds",
        series,
        "environment steps",
        "progress to the goal",
        size=size,
        reference=Reference(1.0, "goal"),
    )
    return standalone(chart, size)


def main() -> None:
    """Train every task with every seed and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", nargs="+", default=list(TASKS), choices=list(TASKS))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the JSON")
    parser.add_argument("--picture", type=Path, default=None, help="draw the curves into this SVG file")
    arguments = parser.parse_args()
    earlier = arguments.out / "device_learning.json"
    result: dict[str, Any] = json.loads(earlier.read_text()) if earlier.exists() else {"tasks": {}}
    for name in arguments.tasks:
        settings = json.loads(json.dumps({**TASKS[name], "all": _ALL}))
        row = result["tasks"].get(name, {})
        if row.get("settings") != settings:
            row = {"settings": settings, "goal": settings["goal"], "seeds": {}}
        result["tasks"][name] = row
        for seed in range(1, arguments.seeds + 1):
            if str(seed) in row["seeds"]:
                continue
            row["seeds"][str(seed)] = train(TASKS[name], seed)
            row["machine"] = provenance()
            print(f"{name} seed {seed}: {row['seeds'][str(seed)]['return']:.1f}", file=sys.stderr, flush=True)
            save("device_learning", result, arguments.out)
    for name, row in result["tasks"].items():
        returns = [run["return"] for run in row["seeds"].values()]
        verdict = "reached by all" if min(returns) > row["goal"] else "NOT reached by all"
        shown = " ".join(f"{value:.1f}" for value in returns)
        print(f"{name:<18}{shown:<28} goal {row['goal']:<8g}{verdict}: {row['settings']['baseline']}")
    if arguments.picture:
        arguments.picture.write_text(draw(result) + "\n")


if __name__ == "__main__":
    main()
