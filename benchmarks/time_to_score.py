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
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
from machine import provenance, save

EVERY, EPISODES, SCORE, LIMIT = 4096, 20, 475.0, 500_000

SB3_SCRIPT = f"""
import sys
import gymnasium
import torch
from stable_baselines3 import PPO
from stable_baselines3.common.callbacks import EvalCallback, StopTrainingOnRewardThreshold
from stable_baselines3.common.monitor import Monitor

if sys.argv[2] != "default":
    torch.set_num_threads(int(sys.argv[2]))
stop = StopTrainingOnRewardThreshold({SCORE})
watch = EvalCallback(
    Monitor(gymnasium.make("CartPole-v1")), callback_on_new_best=stop, eval_freq={EVERY}, n_eval_episodes={EPISODES},
    verbose=0,
)
model = PPO("MlpPolicy", "CartPole-v1", seed=int(sys.argv[1]))
model.learn({LIMIT}, callback=watch)
print(model.num_timesteps, watch.best_mean_reward)
"""


def time_unidle(seed: int) -> tuple[float, int, float]:
    """(seconds, environment steps, score) of one process."""
    with tempfile.TemporaryDirectory() as folder:
        command = [
            str(Path(sys.executable).with_name("unidle")),
            "train",
            "--env",
            "CartPole-v1",
            "--preset",
            "classic",
        ]
        command += ["--seed", str(seed), "--timesteps", str(LIMIT), "--eval-every", str(EVERY)]
        command += ["--eval-episodes", str(EPISODES), "--target-return", str(SCORE), "--runs-dir", folder, "--json"]
        began = perf_counter()
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        seconds = perf_counter() - began
    result = json.loads(done.stdout)
    return seconds, result["step"], result["best_evaluation"]


def time_sb3(seed: int, threads: str) -> tuple[float, int, float]:
    """(seconds, environment steps, score) of one process; `threads` of torch, or "default"."""
    began = perf_counter()
    done = subprocess.run(
        [sys.executable, "-c", SB3_SCRIPT, str(seed), threads], capture_output=True, text=True, check=True
    )
    seconds = perf_counter() - began
    steps, score = done.stdout.split()[-2:]
    return seconds, int(steps), float(score)


def main() -> None:
    """Run both sides and print the ratio."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=None, help="folder for the JSON (default: benchmarks/results)")
    arguments = parser.parse_args()
    sides: dict[str, Any] = {
        "unidle": time_unidle,
        "sb3": lambda seed: time_sb3(seed, "default"),
        "sb3, 1 thread": lambda seed: time_sb3(seed, "1"),
    }
    runs: dict[str, list[tuple[float, int, float]]] = {side: [] for side in sides}
    for seed in range(1, arguments.seeds + 1):
        order = list(sides) if seed % 2 else list(reversed(sides))
        for side in order:
            runs[side].append(sides[side](seed))
            seconds, steps, score = runs[side][-1]
            print(f"seed {seed} {side}: {score:.0f} after {steps:,} steps, {seconds:.1f} s", file=sys.stderr)
    table: dict[str, dict[str, Any]] = {
        side: {
            "seconds": [seconds for seconds, _, _ in done],
            "steps": [steps for _, steps, _ in done],
            "scores": [score for _, _, score in done],
            "median_seconds": float(np.median([seconds for seconds, _, _ in done])),
            "median_steps_per_second": float(np.median([steps / seconds for seconds, steps, _ in done])),
        }
        for side, done in runs.items()
    }
    best_sb3 = min(table["sb3"]["median_seconds"], table["sb3, 1 thread"]["median_seconds"])
    ratio = best_sb3 / table["unidle"]["median_seconds"]
    save("time_to_score", {"machine": provenance("stable-baselines3"), "sides": table, "ratio": ratio}, arguments.out)
    print(f"{'':<16}{'median s':>10}{'steps/s':>10}   seconds per seed")
    for side, row in table.items():
        spread = " ".join(f"{seconds:.1f}" for seconds in row["seconds"])
        print(f"{side:<16}{row['median_seconds']:>10.1f}{row['median_steps_per_second']:>10.0f}   {spread}")
    print(f"unidle reaches {SCORE:.0f} in 1/{ratio:.1f} of the time of the faster SB3 setting")


if __name__ == "__main__":
    main()
