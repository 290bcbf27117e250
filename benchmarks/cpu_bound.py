"""Training speed on CPU-bound environments: unidle against Stable-Baselines3, the same recipe, one run, one machine.

    python benchmarks/cpu_bound.py [--settings fast heavy beast old wide] [--seconds 8]

PPO on HalfCheetah-v5. Each measurement is a separate process. Its first iterations are warm-up, on a GPU also its first
seconds, until the run's meter has calibrated itself with the profiler. Then `--seconds` are measured, and two
iterations are profiled to attribute GPU time to phases. Repeated measurements alternate, A B B A. SB3 uses one process
per environment (SubprocVecEnv), as is usual. The ceiling is bare stepping: the same number of environments, divided
among processes that do nothing else, with the best of several numbers of processes, measured before and after the
training it is compared with, because a machine's speed varies. Settings that are not named keep the figures of an
earlier run.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from machine import RESULTS, WARM_UP_S, provenance, save

ENV = "HalfCheetah-v5"
# The changes of each setting to its preset; `order` is the sequence of measurements.
SETTINGS: dict[str, dict[str, Any]] = {
    "fast": {"preset": "fast", "order": ["sb3", "strict", "off"]},
    "heavy": {"preset": "heavy", "order": ["strict", "sb3", "off"]},
    "beast": {"preset": "beast", "order": ["sb3", "strict", "off", "strict", "sb3"]},
    # 48 × 43 is not a multiple of 512: SB3's last minibatch of each epoch has 16 samples. unidle only accepts divisors,
    # so it uses the next one.
    "old": {
        "preset": "fast",
        "changes": {"n_envs": 48, "n_steps": 43, "n_epochs": 10, "net_arch": (256, 256), "batch_size": 516},
        "sb3_changes": {"batch_size": 512},
        "order": ["sb3", "strict", "off"],
    },
    # Another recipe, not comparable by steps/s alone: the same number of samples per iteration from more environments.
    "wide": {"preset": "beast", "changes": {"n_envs": 1024, "n_steps": 32}, "order": ["strict", "off", "strict"]},
}
CEILINGS = {"beast": 64, "wide": 1024}
_CALIBRATION_TIMEOUT_S = 90.0


class GpuWatch(threading.Thread):
    """Mean GPU utilisation (NVML: some kernel ran) and power while it is active."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        import pynvml

        pynvml.nvmlInit()
        self._nvml, self._gpu = pynvml, pynvml.nvmlDeviceGetHandleByIndex(0)
        self._readings: list[tuple[float, float]] = []
        self._stopped = threading.Event()

    def run(self) -> None:
        """Poll ten times a second, the driver's update rate."""
        while not self._stopped.wait(0.1):
            utilisation = self._nvml.nvmlDeviceGetUtilizationRates(self._gpu).gpu
            self._readings.append((utilisation, self._nvml.nvmlDeviceGetPowerUsage(self._gpu) / 1000))

    def result(self) -> dict[str, float]:
        """Stop and return the means."""
        self._stopped.set()
        self.join()
        utilisation, power = np.mean(self._readings, 0)
        return {"gpu_percent": float(utilisation), "watts": float(power)}


class Meter:
    """Measures steps per second after warm-up, then profiles two iterations."""

    def __init__(self, seconds: float) -> None:
        import torch

        self._seconds, self._has_gpu = seconds, torch.cuda.is_available()
        self._first_s: float | None = None
        self.runs: Path | None = None  # runs_dir of unidle; its meter writes the first line after calibrating itself
        self._marks: list[tuple[float, int]] = []  # time and step at the end of each measured iteration
        self._watch: GpuWatch | None = None
        self._profiler: Any = None
        self._profiled = 0
        self.result: dict[str, float] = {}

    @property
    def has_begun(self) -> bool:
        """Whether the measurement has started."""
        return bool(self._marks)

    def mark(self, step: int) -> bool:
        """Record the end of an iteration; True when the measurement is complete."""
        if self._profiler is not None:
            self._profiled += 1
            if self._profiled == 2:
                self._profiler.stop()
                self.result |= gpu_shares(self._profiler)
            return self._profiled == 2
        now = time.perf_counter()
        if self._first_s is None:
            self._first_s = now
            return False
        if not self.has_begun and self._has_gpu:
            if now - self._first_s < WARM_UP_S or not self._is_calibrated():
                return False
            self._watch = GpuWatch()
            self._watch.start()
        self._marks.append((now, step))
        if len(self._marks) < 3 or now - self._marks[0][0] < self._seconds:
            return False
        return self._finish()

    def _is_calibrated(self) -> bool:
        if self.runs is None or any(file.stat().st_size for file in self.runs.glob("*/meter.jsonl")):
            return True
        if self._first_s is not None and time.perf_counter() - self._first_s > _CALIBRATION_TIMEOUT_S:
            raise RuntimeError(f"The run's meter wrote nothing within {_CALIBRATION_TIMEOUT_S:.0f} seconds.")
        return False

    def _finish(self) -> bool:
        import torch

        (began, first), (ended, last) = self._marks[0], self._marks[-1]
        self.result = {"steps_per_second": (last - first) / (ended - began), "iterations": len(self._marks) - 1}
        if self._watch is None:
            return True
        self.result |= self._watch.result()
        self.result["gpu_memory_mib"] = torch.cuda.max_memory_reserved() / 2**20
        activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
        self._profiler = torch.profiler.profile(activities=activities)
        self._profiler.start()
        return False


def in_phase(name: str, call: Any) -> Any:
    """Wrap `call` so that the profiler records it as a phase."""
    import torch

    def marked(*arguments: Any, **settings: Any) -> Any:
        with torch.profiler.record_function(name):
            return call(*arguments, **settings)

    return marked


def gpu_shares(profiler: Any) -> dict[str, float]:
    """Return the share of the profiled time, and of each phase, in which a kernel or copy was running."""
    events = profiler.profiler.kineto_results.events()
    work, phases = [], {"rollout": [], "learning": []}  # type: ignore[var-annotated]
    for event in events:
        span = (event.start_ns(), event.start_ns() + event.duration_ns())
        on_device = "CUDA" in str(event.device_type())
        if event.name() in phases:
            if not on_device:
                phases[event.name()].append(span)
        elif on_device:
            work.append(span)
    busy = _union(work)
    everything = [(min(s for s, _ in busy), max(e for _, e in busy))] if busy else []
    return {
        f"profiled_gpu_{name}": _overlap(busy, _union(spans)) / max(1, _length(_union(spans)))
        for name, spans in {**phases, "overall": everything}.items()
    }


Spans = list[tuple[int, int]]


def _union(spans: Iterable[tuple[int, int]]) -> Spans:
    merged: list[list[int]] = []
    for start, end in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1][1] = max(merged[-1][1], end)
        else:
            merged.append([start, end])
    return [(start, end) for start, end in merged]


def _length(spans: Spans) -> int:
    return sum(end - start for start, end in spans)


def _overlap(left: Spans, right: Spans) -> int:
    total, i, j = 0, 0, 0
    while i < len(left) and j < len(right):
        total += max(0, min(left[i][1], right[j][1]) - max(left[i][0], right[j][0]))
        if left[i][1] < right[j][1]:
            i += 1
        else:
            j += 1
    return total


def measure_unidle(setting: dict[str, Any], seconds: float, overlap: str) -> dict[str, float]:
    """Run one training, stopped when the measurement is complete."""
    import unidle
    from unidle.engine.collect.host import HostCollector
    from unidle.engine.overlap import Overlap

    for owner, method, phase in (
        (HostCollector, "finish", "rollout"),
        (Overlap, "_learn_while_collecting", "learning"),
    ):
        setattr(owner, method, in_phase(phase, getattr(owner, method)))
    meter = Meter(seconds)

    def after_iteration(context: unidle.CallbackContext) -> None:
        if meter.mark(context.record["step"]):
            context.stop()

    with tempfile.TemporaryDirectory() as folder:
        meter.runs = Path(folder)
        unidle.train(
            ENV,
            preset=setting["preset"],
            **setting.get("changes", {}),
            overlap=overlap,
            timesteps=10**9,
            runs_dir=folder,
            eval_every=0,
            checkpoint_every=10**9,
            tensorboard=False,
            subproc=True,
            quiet=True,
            after_iteration=[after_iteration],
        )
    return meter.result


def sb3_model(recipe: dict[str, Any], seed: int | None = None, device: str = "auto") -> Any:
    """Return SB3's PPO with this recipe, with TF32 matrix products like unidle."""
    import torch
    from stable_baselines3 import PPO
    from stable_baselines3.common.env_util import make_vec_env
    from stable_baselines3.common.vec_env import SubprocVecEnv

    torch.set_float32_matmul_precision("high")
    kwargs = {"start_method": "forkserver"}
    envs = make_vec_env(ENV, recipe["n_envs"], seed, vec_env_cls=SubprocVecEnv, vec_env_kwargs=kwargs)
    return PPO(
        "MlpPolicy",
        envs,
        n_steps=recipe["n_steps"],
        batch_size=recipe["batch_size"],
        n_epochs=recipe["n_epochs"],
        policy_kwargs={"net_arch": list(recipe["net_arch"])},
        seed=seed,
        device=device,
    )


def measure_sb3(setting: dict[str, Any], seconds: float) -> dict[str, float]:
    """Train SB3 with the same recipe."""
    from stable_baselines3.common.callbacks import BaseCallback

    from unidle.config.presets import load_preset

    recipe = {**load_preset(setting["preset"]).values, **setting.get("changes", {}), **setting.get("sb3_changes", {})}
    meter = Meter(seconds)

    class Watch(BaseCallback):
        def _on_rollout_start(self) -> None:  # the last iteration's update is complete
            self.enough = self.num_timesteps > 0 and meter.mark(self.num_timesteps)

        def _on_step(self) -> bool:
            return not self.enough

    model = sb3_model(recipe)
    for method, phase in (("collect_rollouts", "rollout"), ("train", "learning")):
        setattr(model, method, in_phase(phase, getattr(model, method)))
    model.learn(10**9, callback=Watch())
    model.get_env().close()
    return meter.result


def _step_envs(n_envs: int, seconds: float, start: Any, done: Any) -> None:
    import gymnasium

    envs = [gymnasium.make(ENV, disable_env_checker=True) for _ in range(n_envs)]
    for number, env in enumerate(envs):
        env.action_space.seed(number)
        env.reset(seed=number)
    actions = [envs[0].action_space.sample() for _ in range(64)]
    start.wait()
    steps, until = 0, time.perf_counter() + seconds
    while time.perf_counter() < until:
        for env in envs:
            _, _, terminated, truncated, _ = env.step(actions[steps % 64])
            if terminated or truncated:
                env.reset()
            steps += 1
    done.put(steps)


def ceiling(n_envs: int, seconds: float) -> dict[str, float]:
    """Steps per second of bare stepping, by the number of processes."""
    context = multiprocessing.get_context("spawn")
    cores = len(os.sched_getaffinity(0))
    speeds = {}
    for processes in sorted({cores, cores - 1, max(1, cores // 2)}):
        start, done = context.Barrier(processes), context.Queue()
        shares = [len(part) for part in np.array_split(np.arange(n_envs), processes)]
        children = [context.Process(target=_step_envs, args=(share, seconds, start, done)) for share in shares]
        for child in children:
            child.start()
        speeds[str(processes)] = sum(done.get() for _ in children) / seconds
        for child in children:
            child.join()
    return speeds


def main() -> None:
    """Measure everything and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--settings", nargs="+", default=list(SETTINGS), choices=list(SETTINGS))
    parser.add_argument("--seconds", type=float, default=8.0)
    parser.add_argument("--out", type=Path, default=None, help="folder for the JSON (default: benchmarks/results)")
    # Internal: run one measurement in this process.
    parser.add_argument("--side", choices=["strict", "off", "sb3"], help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.side:
        setting = SETTINGS[arguments.settings[0]]
        measure = measure_sb3 if arguments.side == "sb3" else partial(measure_unidle, overlap=arguments.side)
        print(json.dumps(measure(setting, arguments.seconds)))
        return
    earlier = (arguments.out or RESULTS) / "cpu_bound.json"
    new: dict[str, Any] = {"env": ENV, "settings": {}, "ceiling": {}}
    result = json.loads(earlier.read_text()) if earlier.exists() else new
    machine = provenance("stable-baselines3")
    for name in arguments.settings:
        result["ceiling"].pop(name, None)
        _add_ceiling(result, name, arguments.out)
        runs: dict[str, list[dict[str, float]]] = {}
        result.setdefault("machines", {})[name] = machine
        for side in SETTINGS[name]["order"]:
            runs.setdefault(side, []).append(_run_in_subprocess(side, name, arguments.seconds))
            result["settings"][name] = {side: {"runs": measured, **_mean(measured)} for side, measured in runs.items()}
            save("cpu_bound", result, arguments.out)
        _add_ceiling(result, name, arguments.out)
    _print_table(result)


def _add_ceiling(result: dict[str, Any], name: str, out: Path | None) -> None:
    """Measure bare stepping again if a setting is compared with it."""
    if name in CEILINGS:
        rounds = [*result["ceiling"].get(name, {}).get("rounds", []), ceiling(CEILINGS[name], 2.0)]
        result["ceiling"][name] = {"rounds": rounds, **_mean(rounds)}
        save("cpu_bound", result, out)


def _mean(runs: list[dict[str, float]]) -> dict[str, float]:
    return {key: float(np.mean([run[key] for run in runs])) for key in runs[0]}


def _run_in_subprocess(side: str, name: str, seconds: float) -> dict[str, float]:
    command = [sys.executable, __file__, "--side", side, "--settings", name, "--seconds", str(seconds)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{side} on {name} failed:\n{done.stderr}")
    measured: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    print(f"{name} {side}: {measured}", file=sys.stderr, flush=True)
    return measured


def _print_table(result: dict[str, Any]) -> None:
    def share(measured: dict[str, float], key: str) -> str:
        return f"{100 * measured[key]:.0f} %" if key in measured else "–"

    heads = ["setting", "", "steps/s", "× SB3", "GPU", "in rollouts", "in learning", "NVML", "memory", "power"]
    print("".join(f"{head:>12}" for head in heads))
    beast = result["settings"].get("beast", {}).get("sb3", {}).get("steps_per_second")
    for name, sides in result["settings"].items():
        base = sides["sb3"]["steps_per_second"] if "sb3" in sides else beast
        for side, measured in sides.items():
            cells = [name, side, f"{measured['steps_per_second']:,.0f}"]
            cells.append(f"{measured['steps_per_second'] / base:.1f}" if base else "–")
            cells += [share(measured, f"profiled_gpu_{part}") for part in ("overall", "rollout", "learning")]
            cells.append(f"{measured['gpu_percent']:.0f} %" if "gpu_percent" in measured else "–")
            cells.append(f"{measured['gpu_memory_mib']:,.0f} MiB" if "gpu_memory_mib" in measured else "–")
            cells.append(f"{measured['watts']:.0f} W" if "watts" in measured else "–")
            print("".join(f"{cell:>12}" for cell in cells))
    for name, speeds in result["ceiling"].items():
        by_processes = {processes: speed for processes, speed in speeds.items() if processes != "rounds"}
        best = max(by_processes.values())
        reached = result["settings"][name]["strict"]["steps_per_second"] / best
        print(f"{name}: bare stepping {best:,.0f} steps/s at best {by_processes}; strict reaches {reached:.2f} of it")


if __name__ == "__main__":
    main()
