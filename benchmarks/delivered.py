"""How much of the training loop's speed a plain `unidle train` delivers, with evaluation, checkpoints and TensorBoard.

    python benchmarks/delivered.py [--settings classic cartpole] [--rounds 1]

*delivered* is the command as a user types it. *loop* is the same without evaluation, checkpoints and TensorBoard; it
writes only metrics.jsonl. Each measurement is a separate process, and the sides alternate, A B B A. Steps/s count from
the end of the start-up (interpreter, imports, environments) to the end of the process, so that the last evaluations and
the report are included; the start-up is a column of its own. On a GPU, Stable-Baselines3 runs the same recipe with an
EvalCallback of the same schedule. Use an otherwise idle machine; if other programs take its cores, compare the CPU
seconds of the training process, which its own evaluation processes and workers do not count towards.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from machine import RESULTS, provenance, save

# Preset, environment and steps of each setting: a minute or more on the machine it is meant for.
SETTINGS: dict[str, tuple[str, str, int]] = {
    "classic": ("classic", "HalfCheetah-v5", 300_000),
    "cartpole": ("classic", "CartPole-v1", 500_000),
    "fast": ("fast", "HalfCheetah-v5", 4_000_000),
    "heavy": ("heavy", "HalfCheetah-v5", 6_000_000),
    "beast": ("beast", "HalfCheetah-v5", 10_000_000),
}
ON_TWO_CORES, ON_GPU = ("classic", "cartpole"), ("fast", "heavy", "beast")
LOOP_FLAGS = ["--eval-every", "0", "--checkpoint-every", str(10**12), "--no-tensorboard"]
_EVALUATIONS, _EPISODES = 10, 10  # unidle's defaults
_POLL_SECONDS = 0.02


def run_and_time(command: list[str], first_file: Path) -> dict[str, float]:
    """Run `command` in its own process; its start-up ends when it creates `first_file`."""
    began, clock = time.perf_counter(), time.time()
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=errors)
        cpu = 0.0
        while process.poll() is None:
            cpu = max(cpu, _cpu_seconds(process.pid))
            time.sleep(_POLL_SECONDS)
        if process.returncode:
            errors.seek(0)
            raise SystemExit(f"{' '.join(command)} failed:\n{errors.read()}")
    seconds = time.perf_counter() - began
    return {"seconds": seconds, "start_up": first_file.stat().st_mtime - clock, "trainer_cpu_seconds": cpu}


def _cpu_seconds(pid: int) -> float:
    """CPU time of a process, without its children; 0 if it has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def measure(side: str, name: str, timesteps: int | None, extra: list[str]) -> dict[str, Any]:
    """Run one side of a setting."""
    preset, env, steps = SETTINGS[name]
    steps = timesteps or steps
    with tempfile.TemporaryDirectory() as folder:
        if side == "sb3":
            first_file = Path(folder) / "started"
            command = [sys.executable, __file__, "--one", name, str(steps), str(first_file)]
            result: dict[str, Any] = run_and_time(command, first_file)
        else:
            command = [sys.executable, "-m", "unidle", "train", "--env", env, "--preset", preset]
            command += ["--timesteps", str(steps), "--runs-dir", folder, "--run-name", "run", *extra]
            run = Path(folder) / "run"
            result = {**run_and_time(command + (LOOP_FLAGS if side == "loop" else []), run / "config.yaml")}
            records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
            last = [record for record in records if record["kind"] == "iteration"][-1]
            steps = last["step"]
            result["phases"] = {key: value for key, value in last.items() if key.startswith("time/")}
            result["evaluations"] = sum(record["kind"] == "evaluation" for record in records)
    return {**result, "steps_per_second": steps / (result["seconds"] - result["start_up"])}


def train_with_sb3(name: str, timesteps: int, first_file: Path) -> None:
    """Train with Stable-Baselines3 and an EvalCallback, in this process."""
    from cpu_bound import sb3_model
    from stable_baselines3.common.callbacks import EvalCallback
    from stable_baselines3.common.env_util import make_vec_env

    from unidle.config.presets import load_preset

    preset, env, _ = SETTINGS[name]
    recipe = vars(load_preset(preset).recipe)
    model = sb3_model(recipe)
    every = max(1, timesteps // _EVALUATIONS // recipe["n_envs"])
    callback = EvalCallback(make_vec_env(env), n_eval_episodes=_EPISODES, eval_freq=every, verbose=0)
    first_file.touch()
    model.learn(timesteps, callback=callback)
    model.get_env().close()


def main() -> None:
    """Measure each setting and print its ratios."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--settings", nargs="+", choices=list(SETTINGS), help="default: what suits the machine")
    parser.add_argument("--rounds", type=int, default=1, help="repetitions of A B B A")
    parser.add_argument("--timesteps", type=int, help="of every run, instead of the settings' own")
    parser.add_argument("--extra", nargs=argparse.REMAINDER, default=[], help="further flags of both sides, last")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the JSON")
    parser.add_argument("--one", nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        train_with_sb3(arguments.one[0], int(arguments.one[1]), Path(arguments.one[2]))
        return
    machine = provenance()
    path = arguments.out / "delivered.json"
    result: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    for name in arguments.settings or (ON_GPU if machine["gpu"] else ON_TWO_CORES):
        sides = ["delivered", "loop", "loop", "delivered"] * arguments.rounds
        if name in ON_GPU:
            sides = ["sb3", *sides, "sb3"]
        measured: dict[str, list[dict[str, Any]]] = {side: [] for side in sides}
        for side in sides:
            measured[side].append(measure(side, name, arguments.timesteps, arguments.extra))
            print(f"{name}, {side}: {summary(measured[side][-1:])}", file=sys.stderr, flush=True)
        medians = {
            side: {
                key: float(np.median([one[key] for one in runs]))
                for key in ("steps_per_second", "start_up", "trainer_cpu_seconds")
            }
            for side, runs in measured.items()
        }
        ratio = medians["delivered"]["steps_per_second"] / medians["loop"]["steps_per_second"]
        cpu_ratio = medians["loop"]["trainer_cpu_seconds"] / medians["delivered"]["trainer_cpu_seconds"]
        result[name] = {
            "machine": machine,
            "medians": medians,
            "ratio": ratio,
            "cpu_ratio": cpu_ratio,
            "extra": arguments.extra,
            "runs": measured,
        }
        save("delivered", result, arguments.out)
        for side, runs in measured.items():
            print(f"{name}, {side}: {summary(runs)}")
        print(f"{name}: delivered {ratio:.2f} of the loop; by CPU seconds of the trainer {cpu_ratio:.2f}")


def summary(runs: list[dict[str, Any]]) -> str:
    """Return speed, start-up and CPU time of some runs as text."""
    rates = [run["steps_per_second"] for run in runs]
    spread = f" ({min(rates):,.0f} to {max(rates):,.0f})" if len(rates) > 1 else ""
    start_up, cpu = (np.median([run[key] for run in runs]) for key in ("start_up", "trainer_cpu_seconds"))
    return f"{np.median(rates):,.0f} steps/s{spread}, start-up {start_up:.1f} s, {cpu:.1f} s of CPU time"


if __name__ == "__main__":
    main()
