"""Meta-World on one core: the accelerated environments against the stock package, in steps per CPU second.

    python benchmarks/metaworld_stepping.py [--benchmark MT10] [--episodes 4] [--rounds 2]

Whole episodes of every task with random actions, resets included, each side in a separate process with one thread. The
sides alternate, A B B A; the result is the median. CPU time excludes the load of other programs. Both sides are
`MetaWorldTask` and differ only in `accelerated`; the same seeds give the same episodes, and the sum of all rewards must
be equal to the last bit. The warm-up loads the models and resets once.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from machine import provenance, save

SIDES = {"stock": False, "unidle": True}
_STEPS = 500


def play_episodes(benchmark: str, accelerated: bool, episodes: int) -> dict[str, Any]:
    """Return CPU microseconds per step of each task, milliseconds per reset, the sum of rewards, and peak memory."""
    from unidle.tasks.metaworld.env import MetaWorldTask, task_names

    actions = np.random.default_rng(0).uniform(-1, 1, (_STEPS, 4)).astype(np.float32)
    step_us, reset_ms, rewards = {}, [], 0.0
    for name in task_names(benchmark):
        env = MetaWorldTask(benchmark, name, accelerated=accelerated)
        env.reset(seed=0)
        spent = 0.0
        for episode in range(episodes):
            began = time.process_time()
            # In every second episode the goal is new to the process. In a long run almost no goal is new.
            env.reset(seed=1 + episode // 2)
            reset = time.process_time()
            for action in actions:
                rewards += float(env.step(action)[1])
            spent += time.process_time() - began
            reset_ms.append(1e3 * (reset - began))
        step_us[name] = 1e6 * spent / (episodes * _STEPS)
        env.close()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return {"step_us": step_us, "reset_ms": reset_ms, "rewards": rewards.hex(), "peak_mb": peak}


def main() -> None:
    """Measure both sides and print the ratio."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--benchmark", default="MT10", choices=["MT10", "MT25", "MT50"])
    parser.add_argument("--episodes", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--out", type=Path, default=None, help="folder for the JSON (default: benchmarks/results)")
    # Internal: run one measurement in this process.
    parser.add_argument("--one", choices=list(SIDES), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        print(json.dumps(play_episodes(arguments.benchmark, SIDES[arguments.one], arguments.episodes)))
        return
    runs_by_side: dict[str, list[dict[str, Any]]] = {side: [] for side in SIDES}
    for round_ in range(arguments.rounds):
        for side in list(SIDES)[:: 1 if round_ % 2 == 0 else -1]:
            runs_by_side[side].append(_run_in_subprocess(side, arguments))
            print(f"{side}: {_rate(runs_by_side[side][-1]):,.0f} steps per CPU second", file=sys.stderr, flush=True)
    sums = {run["rewards"] for runs in runs_by_side.values() for run in runs}
    if len(sums) != 1:
        raise SystemExit(f"The sides did not play the same episodes: their rewards sum to {sums}.")
    rates = {side: float(np.median([_rate(run) for run in runs])) for side, runs in runs_by_side.items()}
    result = {
        "machine": provenance("metaworld", "mujoco", "scipy"),
        "benchmark": arguments.benchmark,
        "steps_per_cpu_second": rates,
        "ratio": rates["unidle"] / rates["stock"],
        "tasks": {name: _task_ratio(name, runs_by_side) for name in runs_by_side["stock"][0]["step_us"]},
        "rounds": runs_by_side,
    }
    save("metaworld_stepping", result, arguments.out)
    for name, ratio in result["tasks"].items():
        print(f"{name:<28}{ratio:.2f}")
    print(f"{rates['unidle']:,.0f} against {rates['stock']:,.0f} steps/s per core: {result['ratio']:.2f} times stock")


def _run_in_subprocess(side: str, arguments: argparse.Namespace) -> dict[str, Any]:
    command = [sys.executable, __file__, "--one", side, "--benchmark", arguments.benchmark]
    command += ["--episodes", str(arguments.episodes)]
    threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **threads})
    if done.returncode:
        raise SystemExit(f"{side} failed:\n{done.stderr}")
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def _rate(run: dict[str, Any]) -> float:
    """Return steps per CPU second over all tasks, weighted equally."""
    return float(1e6 / np.mean(list(run["step_us"].values())))


def _task_ratio(name: str, runs_by_side: dict[str, list[dict[str, Any]]]) -> float:
    stock, fast = (np.median([run["step_us"][name] for run in runs_by_side[side]]) for side in SIDES)
    return float(stock / fast)


if __name__ == "__main__":
    main()
