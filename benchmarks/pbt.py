"""Does population-based training improve on the same population without it?

    python benchmarks/pbt.py [--env CartPole-v1 --timesteps 24576 --members 8 --seeds 3]

Both sides are `unidle train --seeds 8 --pbt` with the default space: the members start with the same settings, weights
and environments. On one side they are compared ten times, on the other never. A member is judged by its final
evaluation, with the same episodes on both sides.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from machine import provenance, save

import unidle
from unidle.groups.exploits import read_comparisons

SIDES = {"pbt": 10, "without": 1}  # evaluations: members are compared at all but the last


def train(side: str, args: argparse.Namespace, seed: int, folder: Path) -> dict[str, Any]:
    """Train a population; returns the final returns of its members, and how many were replaced."""
    first = 100 * seed
    group = unidle.train_population(
        args.env,
        seeds=range(first, first + args.members),
        timesteps=args.timesteps,
        n_envs=8,
        n_steps=256,
        eval_every=args.timesteps // SIDES[side],
        eval_episodes=20,
        device="cpu",
        runs_dir=str(folder),
        run_name=side,
        tensorboard=False,
        quiet=True,
    )
    returns = [run.summary()["final_evaluation"] for run in group.runs]
    exploits = sum(len(comparison.exploits) for comparison in read_comparisons(group.path))
    return {"returns": returns, "best": max(returns), "mean": float(np.mean(returns)), "exploits": exploits}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--env", default="CartPole-v1")
    parser.add_argument("--timesteps", type=int, default=24_576, help="of each member")
    parser.add_argument("--members", type=int, default=8)
    parser.add_argument("--seeds", type=int, default=3, help="populations per side")
    parser.add_argument("--out", type=Path, help="folder for the JSON; default: benchmarks/results")
    args = parser.parse_args()
    rows: dict[str, list[dict[str, Any]]] = {side: [] for side in SIDES}
    machine, arguments = provenance(), {name: value for name, value in vars(args).items() if name != "out"}
    for seed in range(args.seeds):
        for side in SIDES if seed % 2 == 0 else reversed(SIDES):
            with tempfile.TemporaryDirectory() as folder:
                row = train(side, args, seed, Path(folder))
            rows[side].append(row)
            print(f"{side}, seed {seed}: best {row['best']:.1f}, mean {row['mean']:.1f}", flush=True)
            path = save("pbt", {**machine, "arguments": arguments, **rows}, args.out)
    for side, found in rows.items():
        best, mean = (np.mean([row[name] for row in found]) for name in ("best", "mean"))
        print(f"{side}: best member {best:.1f}, mean of the population {mean:.1f}")
    print(f"Written to {path}")


if __name__ == "__main__":
    main()
