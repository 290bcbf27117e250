"""Several runs on one GPU: a group in one process (`--seeds K`) against K processes, in one run, on one machine.

    python benchmarks/many_runs.py [--settings heavy fast] [--runs 4 8] [--seconds 12]
    python benchmarks/many_runs.py --settings cartpole --sides one group wide jax --runs 4 16 64
    python benchmarks/many_runs.py --settings sac --sides one group --runs 4 8

PPO on HalfCheetah-v5 (*fast*, *heavy*, *beast*), on 2,048 CartPoles on the GPU (*cartpole*) and on a CPU (*classic*),
and SAC on HalfCheetah-v5 with one update per step (*sac*). *one* is a single run, *processes* are K ordinary runs
started together, *divided* the same with the cores divided among them (`--workers`), *mps* the same under NVIDIA MPS,
*group* is one process with K seeds. *bare* only steps the environments of K runs, with random actions. *wide* is one
run with the environments and the minibatches of K, and *jax* is `jax_ppo.py` with `vmap` over K seeds, once with each
of JAX's generators; the faster one counts. Steps/s are those of all runs together, while all of them train: from
`WARM_UP_S` after the last run's first iteration. Evaluation, checkpoints and TensorBoard are off. GPU is NVML's
utilisation in that time.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import gpu_resident
from machine import RESULTS, WARM_UP_S, provenance, save

# Environment, preset, and what differs from the preset.
SETTINGS: dict[str, tuple[str, dict[str, Any]]] = {
    "fast": ("HalfCheetah-v5", {"preset": "fast"}),
    "heavy": ("HalfCheetah-v5", {"preset": "heavy"}),
    "beast": ("HalfCheetah-v5", {"preset": "beast"}),
    "cartpole": ("unidle/CartPole-v1", gpu_resident.settings(2048)),
    "classic": ("CartPole-v1", {"preset": "classic"}),
    "sac": ("HalfCheetah-v5", {"preset": "sac"}),
}
PROCESSES = ("processes", "divided", "mps")
SIDES = ("one", "group", *PROCESSES, "bare", "wide", "jax")
_TIMEOUT_S = 240.0  # until all runs train
_JAX_UPDATES = 50  # of one call


class Marks:
    """A callback that records each iteration: when, how many steps, seconds by phase; until the file `stop` appears."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._until = folder, folder / "stop"
        self._marks: dict[str, list[tuple[float, int, dict[str, float]]]] = {}

    def __call__(self, context: Any) -> None:
        """Record an iteration."""
        marks = self._marks.setdefault(str(context.folder), [])
        seconds = {name: value for name, value in context.record.items() if name.startswith("time/")}
        marks.append((time.time(), context.record["step"], seconds))
        if len(marks) == 1:
            (self._folder / f"started-{os.getpid()}-{len(self._marks)}").touch()
        if self._until.exists():
            context.stop()

    def save(self) -> None:
        """Write all marks."""
        (self._folder / f"marks-{os.getpid()}.json").write_text(json.dumps(list(self._marks.values())))


def train(name: str, folder: Path, seeds: str, changes: dict[str, Any]) -> None:
    """Train in this process until the file `stop` appears in `folder`."""
    import unidle

    marks, chosen = Marks(folder), [int(seed) for seed in seeds.split(",")]
    env, settings = SETTINGS[name]
    settings = {**settings, "timesteps": 10**12, "eval_every": 0, "checkpoint_every": 10**12, "tensorboard": False}
    settings |= {"runs_dir": str(folder / "runs"), "quiet": True, "after_iteration": [marks], **changes}
    if len(chosen) == 1:
        unidle.train(env, seed=chosen[0], **settings)
    else:
        unidle.train(env, seeds=chosen, **settings)
    marks.save()


class GpuUse(threading.Thread):
    """Records the GPU's utilisation ten times a second."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        import pynvml

        pynvml.nvmlInit()
        self._nvml, self._gpu = pynvml, pynvml.nvmlDeviceGetHandleByIndex(0)
        self.readings: list[tuple[float, float]] = []
        self._stopped = threading.Event()

    def run(self) -> None:
        """Poll."""
        while not self._stopped.wait(0.1):
            self.readings.append((time.time(), self._nvml.nvmlDeviceGetUtilizationRates(self._gpu).gpu))

    def mean(self, start: float, end: float) -> float:
        """Mean utilisation between two times."""
        self._stopped.set()
        self.join()
        used = [percent for at, percent in self.readings if start <= at <= end]
        return sum(used) / len(used)


def measure(side: str, name: str, runs: int, seconds: float) -> dict[str, float]:
    """Steps per second of all runs together, and the GPU's utilisation."""
    import torch

    cores, changes = len(os.sched_getaffinity(0)), dict[str, Any]()
    if side in ("divided", "mps"):
        changes["workers"] = max(1, -(-(cores - 1) // runs))
    if side == "wide":
        changes = {key: SETTINGS[name][1][key] * runs for key in ("n_envs", "batch_size")}
    runs = runs if side in ("group", *PROCESSES) else 1
    seeds = [",".join(map(str, range(runs)))] if side == "group" else [str(seed) for seed in range(runs)]
    with tempfile.TemporaryDirectory() as temporary:
        folder, environ = Path(temporary), dict(os.environ)
        if side == "mps":
            environ |= start_mps(folder)
        commands = [
            [sys.executable, __file__, "--one", name, temporary, chosen, json.dumps(changes)] for chosen in seeds
        ]
        use = GpuUse() if torch.cuda.is_available() else None
        processes = [
            subprocess.Popen(command, env=environ, stdout=subprocess.DEVNULL, stderr=(folder / "errors").open("ab"))
            for command in commands
        ]
        try:
            began = time.time()
            while len(list(folder.glob("started-*"))) < runs:
                if any(process.poll() for process in processes) or time.time() > began + _TIMEOUT_S:
                    raise SystemExit(f"{name}, {side}: {(folder / 'errors').read_text()[-3000:]}")
                time.sleep(0.05)
            ready = time.time()
            if use is not None:
                use.start()
            time.sleep(WARM_UP_S + seconds)
            (folder / "stop").touch()
            for process in processes:
                process.wait(_TIMEOUT_S)
        finally:
            for process in processes:
                process.kill()
            if side == "mps":
                subprocess.run(["nvidia-cuda-mps-control"], input=b"quit\n", env=environ, check=False)
        marks = [run for file in folder.glob("marks-*.json") for run in json.loads(file.read_text())]
    start, end = ready + WARM_UP_S, min(run[-1][0] for run in marks)
    result = {"steps_per_second": sum(_steps(run, end) - _steps(run, start) for run in marks) / (end - start)}
    result["seconds_to_start"] = ready - began
    result |= {name: share for name, share in _shares(marks, start, end).items() if share > 0.005}
    if use is not None:
        result["gpu_percent"] = use.mean(start, end)
    return result


Mark = tuple[float, int, dict[str, float]]  # time, steps, seconds by phase


def _steps(marks: list[Mark], at: float) -> float:
    """Steps of a run at a time, interpolated between iterations."""
    import numpy as np

    times, steps, _ = zip(*marks, strict=True)
    return float(np.interp(at, times, steps))


def _shares(runs: list[list[Mark]], start: float, end: float) -> dict[str, float]:
    """What the runs spent their time on, as shares of it; a run that waits for its turn is still in its phase."""
    within = [[mark for mark in marks if start <= mark[0] <= end] for marks in runs]
    spent = [(marks[0], marks[-1]) for marks in within if len(marks) > 1]
    seconds = sum(last[0] - first[0] for first, last in spent)
    names = spent[0][0][2] if spent else {}
    return {name: sum(last[2][name] - first[2][name] for first, last in spent) / seconds for name in names}


def step_bare(name: str, runs: int, seconds: float) -> dict[str, float]:
    """Steps per second of all environments without a policy: no worker ever waits for actions."""
    import numpy as np

    from unidle.config.presets import load_preset
    from unidle.envs.make import env_maker
    from unidle.envs.pool.process_pool import ProcessPool
    from unidle.envs.probe import probe

    env, settings = SETTINGS[name]
    maker = env_maker(env)
    env_spec, n_envs = probe(maker), runs * int(load_preset(settings["preset"]).values["n_envs"])
    workers = max(1, len(os.sched_getaffinity(0)) - 1)
    pool = ProcessPool(maker, env_spec, n_envs, 0, min(workers, n_envs), slices=2)
    try:
        pool.start(np.zeros(n_envs, np.int64))
        pool.block.actions[:] = np.random.default_rng(0).uniform(-1, 1, pool.block.actions.shape)
        pool.send(list(range(len(pool.bounds))))
        sizes, steps, began = np.diff(pool.bounds)[:, 0], 0, time.perf_counter() + WARM_UP_S
        while time.perf_counter() < began + seconds:
            stepped = pool.recv(1)
            pool.send(stepped)
            if time.perf_counter() > began:
                steps += int(sizes[stepped].sum())
        return {"steps_per_second": steps / (time.perf_counter() - began)}
    finally:
        pool.close()


def run_jax(runs: int, seconds: float) -> dict[str, float]:
    """Steps per second of as many runs of the JAX program, batched with `vmap`."""
    n_envs = SETTINGS["cartpole"][1]["n_envs"]
    command = [sys.executable, str(Path(__file__).with_name("jax_ppo.py")), "--runs", str(runs)]
    command += ["--n-envs", str(n_envs), "--updates", str(_JAX_UPDATES), "--seconds", str(seconds), "--prng"]
    rates = {}
    for prng in ("threefry2x32", "rbg"):
        done = subprocess.run([*command, prng], stdout=subprocess.PIPE, text=True, check=True)
        rates[prng] = json.loads(done.stdout.splitlines()[-1])["steps_per_second"]
    return {"steps_per_second": max(rates.values()), **rates}


def start_mps(folder: Path) -> dict[str, str]:
    """Start NVIDIA MPS under a private directory; returns what its clients need in their environment."""
    pipes, logs = folder / "mps", folder / "mps-log"
    pipes.mkdir()
    logs.mkdir()
    private = {"CUDA_MPS_PIPE_DIRECTORY": str(pipes), "CUDA_MPS_LOG_DIRECTORY": str(logs)}
    subprocess.run(["nvidia-cuda-mps-control", "-d"], env={**os.environ, **private}, check=True)
    return private


def main() -> None:
    """Measure each setting and print the ratios to a single run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--settings", nargs="+", choices=list(SETTINGS), default=["fast", "heavy", "beast"])
    parser.add_argument("--runs", nargs="+", type=int, default=[4, 8])
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=["one", "group", *PROCESSES, "bare"])
    parser.add_argument("--seconds", type=float, default=12.0)
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the JSON")
    parser.add_argument("--one", nargs="+", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        name, folder, seeds, changes = arguments.one
        train(name, Path(folder), seeds, json.loads(changes))
        return
    path = arguments.out / "many_runs.json"
    result: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    for name in arguments.settings:
        machine = provenance()
        row = result.setdefault(name, {"machine": machine, "measured": {}})
        if row["machine"] != machine:  # measured by another call on the same machine and code: kept
            row = result[name] = {"machine": machine, "measured": {}}
        for side in arguments.sides:
            if side == "mps" and not shutil.which("nvidia-cuda-mps-control"):
                print("NVIDIA MPS is not installed here", file=sys.stderr)
                continue
            for runs in [1] if side == "one" else arguments.runs:
                if side == "bare":
                    measured = step_bare(name, runs, arguments.seconds)
                elif side == "jax":
                    measured = run_jax(runs, arguments.seconds)
                else:
                    measured = measure(side, name, runs, arguments.seconds)
                row["measured"][f"{side} {runs}"] = measured
                save("many_runs", result, arguments.out)
                base = row["measured"].get("one 1", measured)["steps_per_second"]
                gpu = f"  GPU {measured['gpu_percent']:.0f} %" if "gpu_percent" in measured else ""
                rate = measured["steps_per_second"]
                started = f"  start {measured['seconds_to_start']:.0f} s" if "seconds_to_start" in measured else ""
                shares = "".join(f"  {key[5:]} {value:.0%}" for key, value in measured.items() if key[:5] == "time/")
                print(
                    f"{name:<8}{side:<10}{runs:>3}{rate:>12,.0f}{rate / base:>7.2f}×{gpu}{started}{shares}", flush=True
                )


if __name__ == "__main__":
    main()
