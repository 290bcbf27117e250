"""Training speed on CPU-bound environments: unidle against Stable-Baselines3, the same recipe, one run, one machine.

    python benchmarks/cpu_bound.py [--presets fast heavy beast] [--seconds 15]

Each side is a process of its own and trains PPO on HalfCheetah-v5; the first iterations are warm-up. Sides alternate.
SB3 runs one process per environment (SubprocVecEnv), as its users do.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
from machine import provenance, save

from unidle.config import Config
from unidle.config.presets import load_preset

ENV = "HalfCheetah-v5"


class GpuWatch(threading.Thread):
    """Mean utilisation (NVML's: some kernel ran) and power while it runs; None without a GPU."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        import pynvml

        pynvml.nvmlInit()
        self._nvml, self._gpu = pynvml, pynvml.nvmlDeviceGetHandleByIndex(0)
        self._readings: list[tuple[float, float]] = []
        self._over = threading.Event()

    def run(self) -> None:
        """Read ten times a second: the driver renews its figures no faster."""
        while not self._over.wait(0.1):
            utilisation = self._nvml.nvmlDeviceGetUtilizationRates(self._gpu).gpu
            self._readings.append((utilisation, self._nvml.nvmlDeviceGetPowerUsage(self._gpu) / 1000))

    def result(self) -> dict[str, float]:
        """Stop, and say what was seen."""
        self._over.set()
        self.join()
        utilisation, power = np.mean(self._readings, 0)
        return {"gpu_percent": float(utilisation), "watts": float(power)}


class Meter:
    """Steps per second from the third iteration on, for so many seconds and at least two iterations."""

    def __init__(self, seconds: float) -> None:
        self._seconds, self._marks = seconds, list[tuple[float, int]]()
        self._watch: GpuWatch | None = None

    def mark(self, step: int) -> bool:
        """Note the end of an iteration; True when enough was seen."""
        self._marks.append((time.perf_counter(), step))
        if len(self._marks) == 2 and _has_gpu():
            self._watch = GpuWatch()
            self._watch.start()
        return len(self._marks) >= 4 and self._marks[-1][0] - self._marks[1][0] >= self._seconds

    def result(self) -> dict[str, float]:
        """Steps per second, and what the GPU did meanwhile."""
        (began, first), (ended, last) = self._marks[1], self._marks[-1]
        speed = {"steps_per_second": (last - first) / (ended - began), "iterations": len(self._marks) - 2}
        return speed | (self._watch.result() if self._watch else {})


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def measure_unidle(preset: str, seconds: float) -> dict[str, float]:
    """One training run, broken off when enough was seen."""
    import unidle

    meter = Meter(seconds)

    def after_iteration(moment: unidle.Moment) -> None:
        if meter.mark(moment.record["step"]):
            moment.stop()

    with tempfile.TemporaryDirectory() as folder:
        unidle.train(
            ENV,
            preset=preset,
            timesteps=10**9,
            runs_dir=folder,
            eval_every=0,
            checkpoint_every=10**9,
            tensorboard=False,
            subproc=True,
            quiet=True,
            after_iteration=[after_iteration],
        )
    return meter.result()


def measure_sb3(preset: str, seconds: float) -> dict[str, float]:
    """The same recipe through SB3."""
    from stable_baselines3 import PPO
    from stable_baselines3.common.callbacks import BaseCallback
    from stable_baselines3.common.env_util import make_vec_env
    from stable_baselines3.common.vec_env import SubprocVecEnv

    recipe = load_preset(preset).apply(Config()).recipe
    meter = Meter(seconds)

    class Watch(BaseCallback):
        def _on_rollout_start(self) -> None:  # the last iteration's learning is over
            self.enough = self.num_timesteps > 0 and meter.mark(self.num_timesteps)

        def _on_step(self) -> bool:
            return not self.enough

    envs = make_vec_env(ENV, recipe.n_envs, vec_env_cls=SubprocVecEnv, vec_env_kwargs={"start_method": "forkserver"})
    model = PPO(
        "MlpPolicy",
        envs,
        n_steps=recipe.n_steps,
        batch_size=int(recipe.batch_size),
        n_epochs=recipe.n_epochs,
        policy_kwargs={"net_arch": list(recipe.network_arch)},
    )
    model.learn(10**9, callback=Watch())
    envs.close()
    return meter.result()


def main() -> None:
    """Run every preset on both sides and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--presets", nargs="+", default=["fast", "heavy", "beast"])
    parser.add_argument("--seconds", type=float, default=15.0)
    parser.add_argument("--out", type=Path, default=None, help="folder for the JSON (default: benchmarks/results)")
    parser.add_argument("--side", choices=["unidle", "sb3"], help=argparse.SUPPRESS)  # a child's own part
    arguments = parser.parse_args()
    if arguments.side:
        measure = {"unidle": measure_unidle, "sb3": measure_sb3}[arguments.side]
        print(json.dumps(measure(arguments.presets[0], arguments.seconds)))
        return
    result: dict[str, Any] = {"machine": provenance("stable-baselines3"), "env": ENV, "presets": {}}
    for number, preset in enumerate(arguments.presets):
        sides = ["unidle", "sb3"] if number % 2 else ["sb3", "unidle"]
        row: dict[str, Any] = {side: _in_a_process(side, preset, arguments.seconds) for side in sides}
        row["ratio"] = row["unidle"]["steps_per_second"] / row["sb3"]["steps_per_second"]
        result["presets"][preset] = row
        save("cpu_bound", result, arguments.out)
    print(f"{'preset':<10}{'':<8}{'steps/s':>10}{'GPU':>7}{'power':>8}{'ratio':>8}")
    for preset, row in result["presets"].items():
        for side in ("sb3", "unidle"):
            seen = row[side]
            gpu = f"{seen['gpu_percent']:.0f} %" if "gpu_percent" in seen else "–"
            power = f"{seen['watts']:.0f} W" if "watts" in seen else "–"
            ratio = f"{row['ratio']:.1f}" if side == "unidle" else ""
            print(f"{preset:<10}{side:<8}{seen['steps_per_second']:>10,.0f}{gpu:>7}{power:>8}{ratio:>8}")


def _in_a_process(side: str, preset: str, seconds: float) -> dict[str, float]:
    command = [sys.executable, __file__, "--side", side, "--presets", preset, "--seconds", str(seconds)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{side} on {preset} failed:\n{done.stderr}")
    seen: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    print(f"{preset} {side}: {seen}", file=sys.stderr)
    return seen


if __name__ == "__main__":
    main()
