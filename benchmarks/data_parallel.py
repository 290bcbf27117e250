"""Do two and three ranks learn as one process does, with the same recipe, steps and seeds?

    python benchmarks/data_parallel.py [--tasks CartPole-v1 Pendulum-v1] [--ranks 1 2 3] [--seeds 10] [--steps-share 1]

Ranks are processes on a CPU that reduce gradients by gloo. Each run's final policy is evaluated as in learning.py, and
its curve is the mean of `rollout/return_mean` over ten equal parts of training. Both are compared with those of one
process by the rule of side_by_side.py: no worse if the lower end of the 95 % interval of the difference is above −2 %
of what one process gains over random actions.

Each run is saved when it ends, and the next command continues with those that are missing.
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

import gymnasium
import numpy as np
from machine import RESULTS, provenance, save
from side_by_side import PARTS, compare, evaluate, random_policy

import unidle

TASKS: dict[str, dict[str, Any]] = {
    "CartPole-v1": {
        "algo": "ppo",
        "timesteps": 100_000,
        "n_envs": 12,
        "n_steps": 64,
        "batch_size": 192,
        "n_epochs": 10,
        "learning_rate": 1e-3,
        "lr_schedule": "linear",
    },
    "Pendulum-v1": {
        "algo": "sac",
        "timesteps": 15_000,
        "n_envs": 6,
        "n_steps": 4,
        "batch_size": 252,
        "learning_rate": 1e-3,
        "learning_starts": 1000,
        "buffer_size": 100_000,
    },
}


def train(task: str, ranks: int, seed: int, share: float) -> dict[str, Any]:
    """The outcome of one run: the return of its final policy, its curve, and the seconds that it took."""
    settings = dict(TASKS[task], seed=seed, eval_every=0, run_name="run")
    settings["timesteps"] = int(share * settings["timesteps"])
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in settings.items()]
    with tempfile.TemporaryDirectory() as folder:
        began = perf_counter()
        started = [] if ranks == 1 else ["--ranks", str(ranks)]
        command = [sys.executable, "-m", "unidle", "train", task, "--quiet", "--no-subproc", *flags, *started]
        subprocess.run(command, cwd=folder, check=True)
        seconds = perf_counter() - began
        run = unidle.load(Path(folder, "runs", "run"))
        final = evaluate(gymnasium.make(task), lambda obs: run.predict(obs)[0])
        lines = Path(folder, "runs", "run", "metrics.jsonl").read_text().splitlines()
    return {"return": final, "curve": _curve([json.loads(line) for line in lines]), "seconds": seconds}


def _curve(records: list[dict[str, Any]]) -> list[float | None]:
    """The mean of `rollout/return_mean` in each tenth of training; None before the first episode has ended."""
    found = [(r["step"], r["rollout/return_mean"]) for r in records if "rollout/return_mean" in r]
    last = max(record["step"] for record in records)
    parts: list[list[float]] = [[] for _ in range(PARTS)]
    for step, value in found:
        parts[min(PARTS * (step - 1) // last, PARTS - 1)].append(value)
    return [float(np.mean(part)) if part else None for part in parts]


def over_training(curve: list[float | None]) -> float:
    """The mean of a curve."""
    return float(np.mean([value for value in curve if value is not None]))


def judge(row: dict[str, Any], ranks: list[int], seeds: int) -> None:
    """Compare each number of ranks with one process, if all of their runs are done."""
    names = [str(seed) for seed in range(1, seeds + 1)]
    done = [each for each in ranks if all(name in row["runs"].get(str(each), {}) for name in names)]
    if 1 not in done:
        return
    values = {
        kind: {each: [of(row["runs"][str(each)][name]) for name in names] for each in done}
        for kind, of in (("final", lambda run: run["return"]), ("curve", lambda run: over_training(run["curve"])))
    }
    row["against_one"] = {
        str(each): {kind: _named(compare(found[each], found[1], row["random"])) for kind, found in values.items()}
        for each in done
        if each > 1
    }


def _named(verdict: dict[str, Any]) -> dict[str, Any]:
    """A verdict of `compare` in the words of this benchmark."""
    names = {"unidle_iqm": "ranks_iqm", "sb3_iqm": "one_iqm"}
    return {names.get(name, name): value for name, value in verdict.items()}


def print_table(result: dict[str, Any]) -> None:
    """Print a line for each task and number of ranks."""
    for task, row in result["tasks"].items():
        for ranks, kinds in row.get("against_one", {}).items():
            for kind, verdict in kinds.items():
                interval = f"[{verdict['lower_95']:.1f}, {verdict['upper_95']:.1f}]"
                word = "no worse" if verdict["no_worse"] else "inconclusive or worse"
                print(
                    f"{task:<14} {ranks} ranks, {kind:<5}: {verdict['ranks_iqm']:8.1f} against "
                    f"{verdict['one_iqm']:8.1f}, difference {interval}, margin {verdict['margin']:.1f}: {word}"
                )


def main() -> None:
    """Do the missing runs, and print the comparison."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", nargs="+", default=list(TASKS), choices=list(TASKS))
    parser.add_argument("--ranks", nargs="+", type=int, default=[1, 2, 3])
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--steps-share", type=float, default=1.0, help="of the steps; below 1 to try the script")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the JSON")
    arguments = parser.parse_args()
    path = arguments.out / "data_parallel.json"
    result: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {"tasks": {}}
    for task in arguments.tasks:
        settings = {**TASKS[task], "share": arguments.steps_share}
        row = result["tasks"].get(task, {})
        if row.get("settings") != settings:
            row = {"settings": settings, "random": random_policy(gymnasium.make(task)), "runs": {}}
        result["tasks"][task] = row
        for seed in range(1, arguments.seeds + 1):
            for ranks in arguments.ranks:
                runs = row["runs"].setdefault(str(ranks), {})
                if str(seed) not in runs:
                    runs[str(seed)] = train(task, ranks, seed, arguments.steps_share)
                    print(f"{task} {ranks} ranks seed {seed}: {runs[str(seed)]['return']:.1f}", file=sys.stderr)
                    save("data_parallel", {**result, **provenance()}, arguments.out)
        judge(row, arguments.ranks, arguments.seeds)
    save("data_parallel", {**result, **provenance()}, arguments.out)
    print_table(result)


if __name__ == "__main__":
    main()
