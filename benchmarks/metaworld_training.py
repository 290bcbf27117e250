"""Multi-task SAC on Meta-World's MT10, end to end: how fast it trains, how busy the GPU is, and what it learns.

    python benchmarks/metaworld_training.py speed [--n-envs 1 16 32 48] [--seconds 10]
    python benchmarks/metaworld_training.py learn [--preset mt10-paper-1024] [--seeds 1 2 3] [--timesteps 2000000]
    python benchmarks/metaworld_training.py draw [--pictures docs/images]

*speed* trains with the recipe of mt10-paper-1024 and each `--n-envs`, without evaluations, and measures once learning
has started; the hours for 20 million steps are extrapolated. *learn* trains from the first step with the preset's
asynchronous evaluations, and saves every evaluation. Each run is a separate process. *draw* plots the saved evaluations
up to 2 million steps against the paper's results, and the longest run in full.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from cpu_bound import GpuWatch, gpu_shares
from machine import RESULTS, WARM_UP_S, provenance, save

from unidle.report.page.svg import Reference, Series, line_chart, standalone

PRESETS = ("mt10-paper-400", "mt10-paper-1024", "mt10-2m", "mt10-20m")
# McLean et al. 2025, actor 400, critic 1024: inter-quartile mean of success by steps.
_PAPER = {"2000000": 0.67, "5000000": 0.80, "10000000": 0.88, "20000000": 0.88}
_COMPARED_AT = 2_000_000
_FULL_RUN = 20_000_000
_WARM_UP_STEPS, _PROFILED_SECONDS = 60_000, 1.0
_LOGGED_ITERATIONS = 40  # per run, in the JSON


class Speedometer:
    """Measures steps per second and GPU use after warm-up, then profiles a short segment."""

    def __init__(self, seconds: float) -> None:
        import torch

        self._seconds, self._has_gpu = seconds, torch.cuda.is_available()
        self._learning_since: float | None = None
        self._first: tuple[float, dict[str, Any]] | None = None
        self._watch: GpuWatch | None = None
        self._profiler: Any = None
        self._profiled_since = 0.0
        self.result: dict[str, Any] = {}

    def mark(self, record: dict[str, Any]) -> bool:
        """Record the end of an iteration; True when the measurement is complete."""
        import torch

        now = time.perf_counter()
        if self._profiler is not None:
            if now - self._profiled_since < _PROFILED_SECONDS:
                return False
            self._profiler.stop()
            self.result["gpu_active"] = gpu_shares(self._profiler)["profiled_gpu_overall"]
            return True
        if self._first is None:
            if self._learning_since is None and record["step"] >= _WARM_UP_STEPS:
                self._learning_since = now
            if self._learning_since is not None and now - self._learning_since >= WARM_UP_S * self._has_gpu:
                self._first = now, record
                if self._has_gpu:
                    self._watch = GpuWatch()
                    self._watch.start()
            return False
        since, first = self._first
        if now - since < self._seconds:
            return False
        phases = [key for key in record if key.startswith("time/")]
        rate = (record["step"] - first["step"]) / (now - since)
        self.result = {
            "steps_per_second": rate,
            "hours_for_20m": _FULL_RUN / rate / 3600,
            "host": {key.removeprefix("time/"): (record[key] - first[key]) / (now - since) for key in phases},
        }
        if self._watch is None:
            return True
        self.result |= self._watch.result()
        self.result["gpu_memory_mib"] = torch.cuda.max_memory_reserved() / 2**20
        activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
        self._profiler = torch.profiler.profile(activities=activities)
        self._profiler.start()
        self._profiled_since = time.perf_counter()
        return False


def measure_speed(n_envs: int, seconds: float) -> dict[str, Any]:
    """Run one training, stopped when the measurement is complete."""
    import unidle

    meter = Speedometer(seconds)

    def after_iteration(context: unidle.CallbackContext) -> None:
        if meter.mark(context.record):
            context.stop()

    with tempfile.TemporaryDirectory() as folder:
        unidle.train(
            "metaworld:MT10",
            preset="mt10-paper-1024",
            n_envs=n_envs,
            runs_dir=folder,
            eval_every=0,
            checkpoint_every=10**9,
            tensorboard=False,
            quiet=True,
            after_iteration=[after_iteration],
        )
    return meter.result


def learn(preset: str, seed: int, timesteps: int, n_envs: int | None, eval_every: int | None, limit: float) -> Any:
    """Run one training with its evaluations, for at most `limit` seconds."""
    import unidle
    from unidle.report.history import read_history

    began = time.perf_counter()
    changes: dict[str, Any] = {"n_envs": n_envs, "eval_every": eval_every}

    def after_iteration(context: unidle.CallbackContext) -> None:
        if time.perf_counter() - began > limit:
            context.stop()

    with tempfile.TemporaryDirectory() as folder:
        run = unidle.train(
            "metaworld:MT10",
            preset=preset,
            seed=seed,
            timesteps=timesteps,
            runs_dir=folder,
            checkpoint_every=10**9,
            tensorboard=False,
            quiet=True,
            after_iteration=[after_iteration],
            **{key: value for key, value in changes.items() if value is not None},
        )
        history = read_history(run.folder.path)
    every = max(1, len(history.iterations) // _LOGGED_ITERATIONS)
    return {
        "steps": history.steps,
        "steps_per_second": history.steps_per_second,
        "seconds": time.perf_counter() - began,
        "evaluations": [
            {key: value for key, value in record.items() if key in ("step", "wall") or key.startswith("eval/")}
            for record in history.evaluations
        ],
        "training": [_learning_metrics(record) for record in history.iterations[::every]],
    }


def _learning_metrics(record: dict[str, Any]) -> dict[str, Any]:
    """Return the learning metrics of an iteration: returns, losses, values, entropy and temperature."""
    kept = ("train/critic_loss", "train/value", "train/actor_loss", "train/entropy", "train/temperature")
    return {key: record[key] for key in ("step", "rollout/return_mean", "rollout/success", *kept) if key in record}


def main() -> None:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["speed", "learn", "draw"])
    parser.add_argument("--n-envs", type=int, nargs="+", help="(default: 1 16 32 48; for learn, the preset's)")
    parser.add_argument("--seconds", type=float, default=10.0, help="of each speed measurement")
    parser.add_argument("--preset", default="mt10-paper-1024", choices=PRESETS)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--timesteps", type=int, default=_COMPARED_AT)
    parser.add_argument("--eval-every", type=int, help="steps between evaluations (default: the preset's)")
    parser.add_argument("--limit", type=float, default=1e9, help="seconds after which a run is ended")
    parser.add_argument(
        "--at-once", type=int, default=1, help="concurrent runs; speeds are not comparable if more than 1"
    )
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the JSON")
    parser.add_argument("--pictures", type=Path, default=Path("docs/images"), help="folder to draw into")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        if arguments.what == "speed":
            print(json.dumps(measure_speed(arguments.n_envs[0], arguments.seconds)))
        else:
            n_envs = arguments.n_envs[0] if arguments.n_envs else None
            limits = arguments.timesteps, n_envs, arguments.eval_every, arguments.limit
            print(json.dumps(learn(arguments.preset, arguments.seeds[0], *limits)))
        return
    path = arguments.out / "metaworld_training.json"
    result = json.loads(path.read_text()) if path.exists() else {"speed": {}, "learning": {}}
    if arguments.what == "draw":
        for name, picture in (("mt10", draw(result)), ("mt10-long", draw_longest(result))):
            (arguments.pictures / f"{name}.svg").write_text(picture + "\n")
        _print_learning(result["learning"])
        return
    result |= {"machine": provenance("metaworld", "mujoco"), "paper": _PAPER}
    if arguments.what == "speed":
        for n_envs in arguments.n_envs or [1, 16, 32, 48]:
            flags = ["--n-envs", n_envs, "--seconds", arguments.seconds]
            result["speed"][str(n_envs)] = _run_in_subprocess("speed", *flags)
            save("metaworld_training", result, arguments.out)
        _print_speeds(result["speed"])
        return
    settings = ["--preset", arguments.preset, "--timesteps", arguments.timesteps, "--limit", arguments.limit]
    settings += ["--n-envs", arguments.n_envs[0]] if arguments.n_envs else []
    settings += ["--eval-every", arguments.eval_every] if arguments.eval_every else []
    with ThreadPoolExecutor(arguments.at_once) as pool:
        runs = pool.map(lambda seed: _run_in_subprocess("learn", *settings, "--seeds", seed), arguments.seeds)
        for seed, run in zip(arguments.seeds, runs):
            setup = {"n_envs": arguments.n_envs and arguments.n_envs[0], "at_once": arguments.at_once}
            result["learning"].setdefault(arguments.preset, {})[str(seed)] = run | setup
            save("metaworld_training", result, arguments.out)
    _print_learning(result["learning"])


def _run_in_subprocess(*arguments: Any) -> dict[str, Any]:
    command = [sys.executable, __file__, *map(str, arguments), "--child"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(map(str, arguments))} failed:\n{done.stderr[-3000:]}")
    measured: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return measured


def _print_speeds(speeds: dict[str, Any]) -> None:
    print(f"{'envs':>6}{'steps/s':>10}{'h for 20 M':>12}{'GPU active':>12}{'NVML':>7}{'MiB':>8}{'watts':>7}  host")
    for n_envs, measured in speeds.items():
        gpu = (
            f"{measured['gpu_active']:>12.0%}{measured['gpu_percent']:>6.0f}%{measured['gpu_memory_mib']:>8,.0f}{measured['watts']:>7.0f}"
            if "gpu_active" in measured
            else f"{'–':>12}{'–':>7}{'–':>8}{'–':>7}"
        )
        host = ", ".join(f"{name} {share:.0%}" for name, share in measured["host"].items() if share > 0.005)
        print(f"{n_envs:>6}{measured['steps_per_second']:>10,.0f}{measured['hours_for_20m']:>12.2f}{gpu}  {host}")


def draw(result: dict[str, Any]) -> str:
    """Plot success over steps: the mean over seeds, and their range as a band."""
    series = []
    for preset, runs in result["learning"].items():
        seeds = [
            {e["step"]: e["eval/success"] for e in run["evaluations"] if e["step"] <= _COMPARED_AT}
            for run in runs.values()
        ]
        steps = sorted(set.intersection(*map(set, seeds)))
        by_step = [[seed[step] for seed in seeds] for step in steps]
        name = f"{preset}, {len(seeds)} seeds" if len(seeds) > 1 else f"{preset}, one seed"
        means = [float(np.mean(values)) for values in by_step]
        band = (list(map(min, by_step)), list(map(max, by_step))) if len(seeds) > 1 else ()
        series.append(Series(name, steps, means, *band))
    return _chart(result, series, Reference(_PAPER[str(_COMPARED_AT)], "mt10-paper-1024 in the paper, at 2 million"))


def draw_longest(result: dict[str, Any]) -> str:
    """Plot success over steps of the longest run, with the paper's result."""
    runs = result["learning"]["mt10-paper-1024"]
    seed, longest = max(runs.items(), key=lambda item: item[1]["steps"])
    evaluations = longest["evaluations"]
    steps, success = [e["step"] for e in evaluations], [e["eval/success"] for e in evaluations]
    paper = {int(at): value for at, value in _PAPER.items() if int(at) <= steps[-1]}
    ours = Series(f"mt10-paper-1024, seed {seed}", steps, success)
    return _chart(result, [ours, Series("in the paper", list(paper), list(paper.values()))])


def _chart(result: dict[str, Any], series: list[Series], reference: Reference | None = None) -> str:
    title = f"Meta-World MT10, {result['machine']['gpu']}, {result['machine']['cores']} cores"
    size, axes = (720, 330), ("environment steps", "success")
    return standalone(line_chart(title, series, *axes, size=size, reference=reference, from_zero=True), size)


def _print_learning(learning: dict[str, Any]) -> None:
    for preset, runs in learning.items():
        compared = []
        for seed, run in runs.items():
            last = run["evaluations"][-1]
            compared += [at["eval/success"] for at in run["evaluations"] if at["step"] == _COMPARED_AT]
            print(
                f"{preset} seed {seed}: success {last['eval/success']:.3f} at {last['step']:,} steps, "
                f"{run['steps_per_second']:,.0f} steps/s, {run['at_once']} at once"
            )
        if compared:
            print(f"{preset}: mean success {np.mean(compared):.3f} at {_COMPARED_AT:,} steps, {len(compared)} seeds")


if __name__ == "__main__":
    main()
