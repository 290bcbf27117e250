"""How long from the command to a CartPole policy that scores 475? unidle's `classic` preset against SB3's defaults.

    python benchmarks/time_to_score.py [--seeds 5]

Both sides are whole processes, so interpreter start, imports and set-up count. Each evaluates every 4,096 steps over 20
episodes with the mode action, and stops at a mean of 475. Sides alternate (A B B A) on an otherwise idle machine.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
from machine import provenance, save

from unidle.metrics.jsonl import read_records
from unidle.report.page.svg import Reference, Series, line_chart, standalone

EVERY, EPISODES, SCORE, LIMIT = 4096, 20, 475.0, 500_000

SB3_SCRIPT = f"""
import json, sys, time
import gymnasium
import torch
from stable_baselines3 import PPO
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.monitor import Monitor

seed, threads, launched = int(sys.argv[1]), sys.argv[2], float(sys.argv[3])
if threads != "default":
    torch.set_num_threads(int(threads))


class Watch(BaseCallback):
    def _on_step(self):
        if self.num_timesteps % {EVERY}:
            return True
        score, _ = evaluate_policy(self.model, env, {EPISODES}, deterministic=True)
        curve.append([time.time() - launched, self.num_timesteps, float(score)])
        return score < {SCORE}


env, curve = Monitor(gymnasium.make("CartPole-v1")), []
PPO("MlpPolicy", "CartPole-v1", seed=seed).learn({LIMIT}, callback=Watch())
print(json.dumps(curve))
"""

Curve = list[list[float]]  # [seconds since the launch, environment steps, score] of each evaluation


def time_unidle(seed: int) -> tuple[float, Curve]:
    """Run unidle; return the seconds of the whole process and its evaluations."""
    with tempfile.TemporaryDirectory() as folder:
        command = [
            str(Path(sys.executable).with_name("unidle")),
            "train",
            "--env",
            "CartPole-v1",
            "--preset",
            "classic",
        ]
        command += ["--seed", str(seed), "--timesteps", str(LIMIT), "--eval-every", str(EVERY), "--run-name", "r"]
        command += ["--eval-episodes", str(EPISODES), "--target-return", str(SCORE), "--runs-dir", folder]
        launched, began = time.time(), perf_counter()
        subprocess.run(command, capture_output=True, check=True)
        seconds = perf_counter() - began
        run = Path(folder) / "r"
        set_up = (run / "config.yaml").stat().st_mtime - launched  # written when training begins
        evaluations = [r for r in read_records(run / "metrics.jsonl") if r["kind"] == "evaluation"]
    return seconds, [[set_up + r["wall"], r["step"], r["eval/return_mean"]] for r in evaluations]


def time_sb3(seed: int, threads: str) -> tuple[float, Curve]:
    """Run SB3 with `threads` torch threads or "default"; return the seconds of the process and its evaluations."""
    command = [sys.executable, "-c", SB3_SCRIPT, str(seed), threads, str(time.time())]
    began = perf_counter()
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return perf_counter() - began, json.loads(done.stdout)


def draw(curves: dict[str, list[Curve]]) -> str:
    """Draw the score of the latest policy over time, mean over seeds."""
    end = max(curve[-1][0] for side in curves.values() for curve in side)
    grid = np.linspace(0, end, 200)
    series = []
    for side, runs in curves.items():
        scores = [[([0.0] + [p[2] for p in curve if p[0] <= second])[-1] for second in grid] for curve in runs]
        series.append(Series(side, grid.tolist(), np.mean(scores, 0).tolist()))
    size = (720, 330)
    title = f"CartPole-v1 on two CPU cores, mean of {len(next(iter(curves.values())))} seeds"
    chart = line_chart(title, series, "seconds since the command", "score of the latest policy", size=size,
                       reference=Reference(SCORE, f"{SCORE:.0f}"), from_zero=True)  # fmt: skip
    return standalone(chart, size)


def main() -> None:
    """Run both sides and print the ratio."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=None, help="folder for the JSON (default: benchmarks/results)")
    parser.add_argument("--picture", type=Path, default=None, help="also draw the curves into this SVG file")
    arguments = parser.parse_args()
    sides: dict[str, Any] = {
        "unidle": time_unidle,
        "sb3": lambda seed: time_sb3(seed, "default"),
        "sb3, 1 thread": lambda seed: time_sb3(seed, "1"),
    }
    runs: dict[str, list[tuple[float, Curve]]] = {side: [] for side in sides}
    for seed in range(1, arguments.seeds + 1):
        order = list(sides) if seed % 2 else list(reversed(sides))
        for side in order:
            seconds, curve = sides[side](seed)
            runs[side].append((seconds, curve))
            _, steps, score = curve[-1]
            print(f"seed {seed} {side}: {score:.0f} after {steps:,} steps, {seconds:.1f} s", file=sys.stderr)
    table: dict[str, dict[str, Any]] = {
        side: {
            "seconds": [seconds for seconds, _ in done],
            "curves": [curve for _, curve in done],
            "median_seconds": float(np.median([seconds for seconds, _ in done])),
            "median_steps_per_second": float(np.median([curve[-1][1] / seconds for seconds, curve in done])),
        }
        for side, done in runs.items()
    }
    best_sb3 = min(table["sb3"]["median_seconds"], table["sb3, 1 thread"]["median_seconds"])
    ratio = best_sb3 / table["unidle"]["median_seconds"]
    save("time_to_score", {"machine": provenance("stable-baselines3"), "sides": table, "ratio": ratio}, arguments.out)
    if arguments.picture:
        faster = min(("sb3", "sb3, 1 thread"), key=lambda side: table[side]["median_seconds"])
        labels = {"unidle, preset classic": "unidle", "Stable-Baselines3, its defaults": faster}
        arguments.picture.write_text(draw({name: table[side]["curves"] for name, side in labels.items()}) + "\n")
    print(f"{'':<16}{'median s':>10}{'steps/s':>10}   seconds per seed")
    for side, row in table.items():
        spread = " ".join(f"{seconds:.1f}" for seconds in row["seconds"])
        print(f"{side:<16}{row['median_seconds']:>10.1f}{row['median_steps_per_second']:>10.0f}   {spread}")
    print(f"unidle reaches {SCORE:.0f} in 1/{ratio:.1f} of the time of the faster SB3 setting")


if __name__ == "__main__":
    main()
