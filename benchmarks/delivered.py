"""How much of the training loop's speed a plain `unidle train` delivers, with evaluation, checkpoints and TensorBoard.

    python benchmarks/delivered.py [--settings classic cartpole] [--rounds 1] [--minutes 9]

*delivered* is the command as a user types it. *loop* is the same without evaluation, checkpoints and TensorBoard; it
writes only metrics.jsonl, and on a GPU it is shorter. *off* is delivered with `--overlap off`, for a preset that
collects while it learns, because then every hyper-parameter is that of Stable-Baselines3. Each measurement is a
separate process, and the sides alternate, A B B A. A side's start-up is the time from its command to the end of its
first iteration (interpreter, imports, environments, CUDA graphs); steps/s count from there to the end of the process,
so that the last evaluations and the report are included. Use an otherwise idle machine: beside other trainers unidle
takes its share of the cores, and with one core it evaluates in the training process. If other programs take cores,
compare the CPU seconds per step of the training process, which its own evaluation processes and workers do not count
towards.

On a GPU, Stable-Baselines3 trains with the same recipe, once on the GPU and once on the CPU with torch's default number
of threads; the faster one is what unidle is compared with. Both libraries evaluate after the same number of training
steps, unidle's default of a tenth of the run, with 10 episodes. SB3 needs many times as long for as many steps, so it
is stopped at the first end of an iteration after `--sb3-seconds` past its start-up. Its EvalCallback then evaluates
once, and is timed; steps/s are those of a run that evaluates after every tenth of unidle's steps: n / (seconds for n
steps + seconds of an evaluation). Nothing of SB3's end counts, and it writes no checkpoints and no TensorBoard.

The result is saved after each measurement. The same command, on the same machine and code, goes on with what is
missing; with `--minutes`, no measurement starts that may not end in time.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from machine import RESULTS, provenance, save
from many_runs import GpuUse

# Preset, environment and steps of each setting: a minute or more on the machine it is meant for.
SETTINGS: dict[str, tuple[str, str, int]] = {
    "classic": ("classic", "HalfCheetah-v5", 300_000),
    "cartpole": ("classic", "CartPole-v1", 500_000),
    "fast": ("fast", "HalfCheetah-v5", 3_400_000),
    "heavy": ("heavy", "HalfCheetah-v5", 5_400_000),
    "beast": ("beast", "HalfCheetah-v5", 7_700_000),
}
ON_TWO_CORES, ON_GPU = ("classic", "cartpole"), ("fast", "heavy", "beast")
LOOP_FLAGS = ["--eval-every", "0", "--checkpoint-every", str(10**12), "--no-tensorboard"]
OVERLAPPED = ("beast",)  # by default, on a GPU
SHARES = {"delivered": 1.0, "off": 0.8, "loop": 0.4}  # of the steps, on a GPU
_EVALUATIONS, _EPISODES = 10, 10  # unidle's defaults
_POLL_SECONDS = 0.02
_USUAL_SECONDS = 110.0  # of a measurement whose side was not measured before; only `--minutes` uses it

Measured = dict[str, Any]


def measure_unidle(name: str, timesteps: int, flags: list[str]) -> Measured:
    """Run `unidle train` as its own process."""
    preset, env, _ = SETTINGS[name]
    with tempfile.TemporaryDirectory() as folder:
        metrics = Path(folder) / "run" / "metrics.jsonl"
        command = [sys.executable, "-m", "unidle", "train", "--env", env, "--preset", preset]
        command += ["--timesteps", str(timesteps), "--runs-dir", folder, "--run-name", "run", *flags]
        gpu, cpu = GpuUse() if _has_gpu() else None, {"started": 0.0, "now": 0.0}
        started: float | None = None

        def poll(pid: int) -> None:
            nonlocal started
            cpu["now"] = max(cpu["now"], _cpu_seconds(pid))
            if started is None and metrics.exists() and metrics.stat().st_size:
                started, cpu["started"] = time.time(), cpu["now"]

        began, ended = _run(command, poll, gpu)
        records = [json.loads(line) for line in metrics.read_text().splitlines()]
    first, *_, last = [record for record in records if record["kind"] == "iteration"]
    steps = last["step"] - first["step"]
    assert started is not None
    return {
        "steps_per_second": steps / (ended - started),
        "start_up": started - began,
        "seconds": ended - began,
        "steps": steps,
        "cpu_seconds_per_million_steps": (cpu["now"] - cpu["started"]) / steps * 1e6,
        "evaluations": sum(record["kind"] == "evaluation" for record in records),
        "phases": {key: value for key, value in last.items() if key.startswith("time/")},
        **({"gpu_percent": gpu.mean(started, ended)} if gpu else {}),
    }


def measure_sb3(name: str, device: str, seconds: float, eval_every: int) -> Measured:
    """Run Stable-Baselines3 in its own process."""
    with tempfile.TemporaryDirectory() as folder:
        path, gpu = Path(folder) / "result.json", GpuUse() if _has_gpu() else None
        began, ended = _run([sys.executable, __file__, "--sb3", name, device, str(seconds), str(path)], None, gpu)
        result = json.loads(path.read_text())
    training = result["steps"] / (result["trained"] - result["started"])
    return {
        "steps_per_second": eval_every / (eval_every / training + result["evaluation_seconds"]),
        "training_steps_per_second": training,
        "evaluation_seconds": result["evaluation_seconds"],
        "start_up": result["started"] - began,
        "seconds": ended - began,
        "steps": result["steps"],
        "threads": result["threads"],
        **({"gpu_percent": gpu.mean(result["started"], result["trained"])} if gpu else {}),
    }


def train_with_sb3(name: str, device: str, seconds: float, path: Path) -> None:
    """Train with Stable-Baselines3 in this process: one iteration, then `seconds`, then one evaluation."""
    import torch
    from cpu_bound import sb3_model
    from stable_baselines3.common.callbacks import EvalCallback
    from stable_baselines3.common.env_util import make_vec_env

    from unidle.config.presets import load_preset

    preset, env, _ = SETTINGS[name]
    marks: list[tuple[float, int]] = []  # time and step at the end of each iteration

    class EvaluateAtEnd(EvalCallback):
        evaluation_seconds = 0.0

        def _on_rollout_start(self) -> None:  # the last iteration's update is complete
            if self.num_timesteps:
                if device == "cuda":
                    torch.cuda.synchronize()
                marks.append((time.time(), self.num_timesteps))

        def _on_step(self) -> bool:
            if not marks or marks[-1][0] - marks[0][0] < seconds:
                return True
            began = time.perf_counter()
            super()._on_step()  # eval_freq is 1: evaluates
            self.evaluation_seconds = time.perf_counter() - began
            return False

    model = sb3_model(load_preset(preset).values, device=device)
    callback = EvaluateAtEnd(make_vec_env(env), n_eval_episodes=_EPISODES, eval_freq=1, verbose=0)
    model.learn(10**9, callback=callback)
    model.get_env().close()
    (started, first), (trained, last) = marks[0], marks[-1]
    result = {"started": started, "trained": trained, "steps": last - first, "threads": torch.get_num_threads()}
    path.write_text(json.dumps({**result, "evaluation_seconds": callback.evaluation_seconds}))


def _run(command: list[str], poll: Callable[[int], None] | None, gpu: GpuUse | None) -> tuple[float, float]:
    """When the command began and ended; what it printed is shown only if it fails. `poll` gets its PID now and then."""
    if gpu is not None:
        gpu.start()
    with tempfile.TemporaryFile("w+") as output:
        began = time.time()
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
        try:
            while process.poll() is None:
                if poll is not None:
                    poll(process.pid)
                time.sleep(_POLL_SECONDS)
        finally:
            process.kill()
        ended = time.time()
        if process.returncode:
            output.seek(0)
            raise SystemExit(f"{' '.join(command)} failed:\n{output.read()[-5000:]}")
    return began, ended


def _cpu_seconds(pid: int) -> float:
    """CPU time of a process, without its children; 0 if it has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def order(name: str, rounds: int) -> list[str]:
    """The sides of a setting in the order in which they are measured."""
    ours = ["delivered", "loop", "loop", "delivered"]
    if name in ON_GPU:
        ours[2:2] = ["off"] if name in OVERLAPPED else []
        ours = [*(["sb3 cuda"] if _has_gpu() else []), *ours, "sb3 cpu"]
    return ours * rounds


def summarised(row: Measured) -> Measured:
    """The row with medians and ratios of what is measured so far."""
    runs = row["runs"]
    keys = ("steps_per_second", "start_up", "cpu_seconds_per_million_steps", "gpu_percent")
    medians = {
        side: {key: float(np.median([run[key] for run in measured])) for key in keys if key in measured[0]}
        for side, measured in runs.items()
    }
    row = row | {"medians": medians}
    if {"delivered", "loop"} <= medians.keys():
        ours, loop = medians["delivered"], medians["loop"]
        row["ratio"] = ours["steps_per_second"] / loop["steps_per_second"]
        row["cpu_ratio"] = loop["cpu_seconds_per_million_steps"] / ours["cpu_seconds_per_million_steps"]
    theirs = [side for side in medians if side.startswith("sb3")]
    if theirs and "delivered" in medians:
        row["sb3"] = max(theirs, key=lambda side: medians[side]["steps_per_second"])
        best = medians[row["sb3"]]["steps_per_second"]
        row["times_sb3"] = {
            side: medians[side]["steps_per_second"] / best for side in ("delivered", "off") if side in medians
        }
    return row


def summary(runs: list[Measured]) -> str:
    """Speed, start-up, CPU time and GPU utilisation of some runs as text."""
    rates = [run["steps_per_second"] for run in runs]
    parts = [f"{np.median(rates):,.0f} steps/s"]
    if len(rates) > 1:
        parts[0] += f" ({min(rates):,.0f} to {max(rates):,.0f})"
    units = {
        "training_steps_per_second": "{:,.0f} without evaluation",
        "start_up": "start-up {:.1f} s",
        "seconds": "{:.0f} s in all",
        "cpu_seconds_per_million_steps": "{:.0f} s of CPU time per million steps",
        "gpu_percent": "GPU {:.0f} %",
    }
    parts += [text.format(np.median([run[key] for run in runs])) for key, text in units.items() if key in runs[0]]
    return ", ".join(parts)


def main() -> None:
    """Measure each setting and print its ratios."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--settings", nargs="+", choices=list(SETTINGS), help="default: what suits the machine")
    parser.add_argument("--rounds", type=int, default=1, help="repetitions of A B B A")
    parser.add_argument("--timesteps", type=int, help="of every run, instead of the settings' own")
    parser.add_argument("--sb3-seconds", type=float, default=25.0, help="of SB3's training, past its start-up")
    parser.add_argument("--minutes", type=float, help="time limit: the same command goes on later")
    parser.add_argument("--extra", nargs=argparse.REMAINDER, default=[], help="further flags of unidle's sides")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the JSON")
    parser.add_argument("--sb3", nargs=4, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.sb3:
        name, device, seconds, file = arguments.sb3
        train_with_sb3(name, device, float(seconds), Path(file))
        return
    machine = provenance("stable-baselines3")
    del machine["date"]  # a measurement may go on after midnight
    path = arguments.out / "delivered.json"
    result: Measured = json.loads(path.read_text()) if path.exists() else {}
    chosen = arguments.settings or (ON_GPU if machine["gpu"] else ON_TWO_CORES)
    deadline = time.monotonic() + 60 * arguments.minutes if arguments.minutes else float("inf")
    for name in chosen:
        settings = {
            "timesteps": arguments.timesteps or SETTINGS[name][2],
            "sb3_seconds": arguments.sb3_seconds if name in ON_GPU else None,
            "extra": arguments.extra,
        }
        row = result.get(name, {})
        earlier = {key: value for key, value in row.get("machine", {}).items() if key != "date"}
        if earlier != machine or row["settings"] != settings:  # otherwise measured by an earlier call: kept
            row = {"machine": provenance("stable-baselines3"), "settings": settings, "runs": {}}
        done = {side: len(runs) for side, runs in row["runs"].items()}
        for side in order(name, arguments.rounds):
            if done.get(side, 0) > 0:
                done[side] -= 1
                continue
            usual = max((run["seconds"] for run in row["runs"].get(side, [])), default=_USUAL_SECONDS)
            if time.monotonic() + usual > deadline:
                sys.exit(f"No time is left for {name}, {side}: repeat the command to go on.")
            measured = measure(side, name, settings)
            row["runs"].setdefault(side, []).append(measured)
            result[name] = row = summarised(row)
            save("delivered", result, arguments.out)
            print(f"{name}, {side}: {summary([measured])}", file=sys.stderr, flush=True)
        for side, runs in row["runs"].items():
            print(f"{name}, {side}: {summary(runs)}")
        print(f"{name}: delivered {row['ratio']:.2f} of the loop, by CPU seconds of the trainer {row['cpu_ratio']:.2f}")
        for side, ratio in row.get("times_sb3", {}).items():
            print(f"{name}: {side} {ratio:.1f} times as fast as {row['sb3']}")


def measure(side: str, name: str, settings: Measured) -> Measured:
    """Run one side of a setting."""
    steps = settings["timesteps"]
    if side.startswith("sb3"):
        return measure_sb3(name, side.removeprefix("sb3 "), settings["sb3_seconds"], max(1, steps // _EVALUATIONS))
    off = ["--overlap", "off", "--eval-every", str(steps // _EVALUATIONS)]
    flags = {"delivered": [], "off": off, "loop": LOOP_FLAGS}[side]
    return measure_unidle(name, int(steps * SHARES[side]) if name in ON_GPU else steps, [*settings["extra"], *flags])


if __name__ == "__main__":
    main()
