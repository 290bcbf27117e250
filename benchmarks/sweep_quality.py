"""Does `unidle sweep` find settings as good as rl-zoo's own search in the same wall time, and how many trials end?

    pip install --target zoo --no-deps rl_zoo3 sb3_contrib sb3-team-hf-integration huggingface_sb3 shimmy
    pip install --target zoo --no-deps pytablewriter wasabi huggingface_hub httpx2 httpcore2 truststore fsspec filelock
    python benchmarks/sweep_quality.py --zoo zoo [--env CartPole-v1 --timesteps 20000 --minutes 3]

One side is `unidle sweep --at-once 8` with its defaults, the other `rl_zoo3.train --optimize` with its defaults; both
search the same ranges for PPO with Optuna's TPE and median pruner. Each gets the machine for the same wall time, in the
order A B B A, and is then killed: what counts is in its journal. On a machine that is busy with other work, give each
the same CPU time instead (`--cpu-minutes 3`); the results say how much each search used, and how busy the machine was.
The best settings of each search are trained again with new seeds, by the trainer that found them, for as many steps;
the final policies play episodes that no search has seen.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import optuna
import psutil
from machine import provenance, save
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend

import unidle
from unidle.sweeps.folder import SweepFolder
from unidle.sweeps.records import best_of
from unidle.sweeps.study import Study

FIRST_SEED, EPISODES = 1000, 100  # of the judgement
SIDES = ("unidle", "rl-zoo")
N_ENVS = 8

ZOO_SCRIPT = """
import json, sys
from rl_zoo3.hyperparams_opt import HYPERPARAMS_CONVERTER
from stable_baselines3 import PPO
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.evaluation import evaluate_policy

env, timesteps, n_envs, seed, episodes = sys.argv[1], *map(int, sys.argv[2:6])
settings = HYPERPARAMS_CONVERTER["ppo"](json.loads(sys.argv[6]))
model = PPO("MlpPolicy", make_vec_env(env, n_envs, seed=seed), seed=seed, device="cpu", **settings).learn(timesteps)
print(evaluate_policy(model, make_vec_env(env, 10, seed=10_000 + seed), episodes, deterministic=True)[0])
"""


def search(side: str, args: argparse.Namespace, folder: Path, seed: int) -> dict[str, Any]:
    """Search in `folder` for the given time; returns the trials and the best settings."""
    job = ["--algo", "ppo", "--env", args.env, "--seed", str(seed), "--device", "cpu"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    if side == "unidle":
        options = ["--n-envs", str(N_ENVS), "--timesteps", str(args.timesteps), "--trials", "100000", "--at-once", "8"]
        command = ["unidle", "sweep", *job, *options, "--runs-dir", str(folder), "--run-name", "search", "--quiet"]
        journal = folder / "search" / "journal.log"
    else:
        journal = folder / "journal.log"
        options = ["-n", str(args.timesteps), "--optimize", "--n-trials", "100000", "--no-optim-plots"]
        options += ["--storage", str(journal), "--study-name", "search", "--log-folder", str(folder / "logs")]
        options += ["--hyperparams", f"n_envs:{N_ENVS}", "normalize:False", "--verbose", "0"]
        command = ["rl_zoo3.train", *job, *options]
        environment["PYTHONPATH"] = os.pathsep.join([str(args.zoo), os.environ.get("PYTHONPATH", "")])
    with (folder / "output.txt").open("w") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", *command],
            env=environment,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        began, cpu_seconds = time.monotonic(), 0.0
        while cpu_seconds < 60 * args.cpu_minutes if args.cpu_minutes else time.monotonic() < began + 60 * args.minutes:
            time.sleep(0.5)
            if process.poll() is not None:
                text = (folder / "output.txt").read_text()[-2000:]
                raise SystemExit(f"{side} ended with code {process.returncode}: {text}")
            cpu_seconds = cpu_time(process.pid)
        seconds = time.monotonic() - began
        os.killpg(process.pid, signal.SIGKILL)  # the group of the process that this script has started
        process.wait()
    storage = JournalStorage(JournalFileBackend(str(journal)))
    (name,) = [study.study_name for study in storage.get_all_studies()]
    study = optuna.load_study(study_name=name, storage=storage)
    states = Counter(trial.state.name.lower() for trial in study.trials)
    if not states["complete"]:
        raise SystemExit(f"{side} has finished no trial; give it more --minutes, or fewer --timesteps.")
    best = study.best_trial
    if side == "unidle":
        chosen = best_of(Study(SweepFolder.open(journal.parent)).records())
        best = study.trials[chosen.number] if chosen is not None else best
    return {
        "trials": dict(states),
        "seconds": round(seconds, 1),
        "cpu_seconds": round(cpu_seconds, 1),
        "load": round(os.getloadavg()[1], 1),  # over the last five minutes
        "best_value": best.value,
        "best": best.user_attrs.get("settings", best.params),
    }


def cpu_time(pid: int) -> float:
    """CPU seconds of a process, those that it has started, and their children that have ended."""
    root = psutil.Process(pid)
    total = 0.0
    for process in [root, *root.children(recursive=True)]:
        with contextlib.suppress(psutil.Error):
            total += sum(process.cpu_times()[:4])
    return total


def judge(side: str, args: argparse.Namespace, best: dict[str, Any], seed: int, folder: Path) -> float:
    """Train with the best settings and a new seed; returns the mean return of the final policy."""
    if side == "unidle":
        settings: dict[str, Any] = {
            "seed": seed,
            "n_envs": N_ENVS,
            "timesteps": args.timesteps,
            "eval_every": 0,
            **best,
        }
        run = unidle.train(args.env, runs_dir=str(folder), device="cpu", quiet=True, tensorboard=False, **settings)
        return float(np.mean(run.evaluate(EPISODES, seed=10_000 + seed).returns))
    command = [sys.executable, "-c", ZOO_SCRIPT, args.env, *map(str, (args.timesteps, N_ENVS, seed, EPISODES))]
    path = os.pathsep.join([str(args.zoo), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([*command, json.dumps(best)], env=environment, check=True, capture_output=True, text=True)
    return float(done.stdout.split()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--zoo", type=Path, required=True, help="folder in which rl_zoo3 is installed")
    parser.add_argument("--env", default="CartPole-v1")
    parser.add_argument("--timesteps", type=int, default=20_000, help="of a trial, and of the judgement")
    parser.add_argument("--minutes", type=float, default=3.0, help="of each search")
    parser.add_argument("--cpu-minutes", type=float, help="the same in CPU time, in place of --minutes")
    parser.add_argument("--rounds", type=int, default=2, help="searches per side")
    parser.add_argument("--seeds", type=int, default=5, help="with which the best settings are trained again")
    parser.add_argument("--out", type=Path, help="folder for the JSON; default: benchmarks/results")
    args = parser.parse_args()
    args.zoo = args.zoo.resolve()
    rows: list[dict[str, Any]] = []
    machine = provenance("optuna", "stable-baselines3")
    arguments = {name: value for name, value in vars(args).items() if name not in ("zoo", "out")}
    for number in range(args.rounds):
        for side in SIDES if number % 2 == 0 else SIDES[::-1]:
            with tempfile.TemporaryDirectory() as name:
                folder = Path(name)
                found = search(side, args, folder, number)
                seeds = range(FIRST_SEED, FIRST_SEED + args.seeds)
                returns = [judge(side, args, found["best"], seed, folder / "judged") for seed in seeds]
            row = {"side": side, "round": number, **found, "returns": returns, "mean": float(np.mean(returns))}
            rows.append(row)
            print(f"{side}: {row['trials']}, best {row['best_value']:.1f}, trained again {row['mean']:.1f}", flush=True)
            path = save("sweep_quality", {**machine, "arguments": arguments, "searches": rows}, args.out)
    print(f"Written to {path}")


if __name__ == "__main__":
    main()
