"""Is a run's own account right, and what does it cost? On a machine with a GPU.

    python benchmarks/meter.py [--jobs "beast off" …] [--seconds 6] [--rounds 2]

*Agreement*: the GPU's busy share by the meter (CUDA events, times the kernel-active share that one look by the profiler
found before) against the profiler's own, which sees every kernel, in the same stretches of real training.
*Cost*: steps per second with the meter and without, A B B A, each in a process of its own.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from machine import WARM_UP_S, provenance, save

JOBS: dict[str, dict[str, Any]] = {
    "beast 1024x32 strict": {
        "env": "HalfCheetah-v5",
        "preset": "beast",
        "n_envs": 1024,
        "n_steps": 32,
        "overlap": "strict",
    },
    "heavy strict": {"env": "HalfCheetah-v5", "preset": "heavy", "overlap": "strict"},
    "beast off": {"env": "HalfCheetah-v5", "preset": "beast", "overlap": "off"},
    "sac": {"env": "HalfCheetah-v5", "preset": "sac", "n_envs": 32, "updates_per_step": 0.25},
    "device": {"env": "unidle/CartPole-v1", "n_envs": 4096, "n_steps": 32, "batch_size": 16_384},
}
_PAIRS = 4


def train(settings: dict[str, Any], after_iteration: Any) -> None:
    """Train until `after_iteration` stops it."""
    import unidle

    with tempfile.TemporaryDirectory() as folder:
        unidle.train(
            **settings,
            timesteps=10**10,
            runs_dir=folder,
            eval_every=0,
            checkpoint_every=10**10,
            tensorboard=False,
            quiet=True,
            after_iteration=[after_iteration],
        )


def agreement(settings: dict[str, Any], seconds: float) -> dict[str, Any]:
    """Pairs of busy shares, the meter's and the profiler's."""
    import unidle.api
    from unidle.journal import read_records
    from unidle.meter import account
    from unidle.meter.inside.unidle_windows import Window, torch_in_use

    pairs: list[tuple[float, float]] = []

    class Compared(account.RunMeter):
        def _begin_stretch(self, now: int) -> None:
            super()._begin_stretch(now)
            self._look = None
            if self._stretch is not None and self._stretch.window is None:
                self._look = Window(torch_in_use())

        def _end_stretch(self, stretch: Any, now: int, step: int, wall: float) -> None:
            seen = self._look.close() if self._look else None
            super()._end_stretch(stretch, now, step, wall)
            if seen is not None:
                line = read_records(self._path)[-1]
                pairs.append((line["gpu"]["busy"], seen.active_ns * 1e-9 / line["length"]))
                self.latest = line

    # Stretch after stretch: here it is not the cost that matters.
    vars(unidle.api)["RunMeter"] = partial(Compared, own_share=0.5)
    began = list[float]()

    def stop(moment: unidle.Moment) -> None:
        began.append(time.perf_counter())  # not before: captures and compilers take their time at first
        if len(pairs) >= _PAIRS or began[-1] - began[0] > 2 * seconds + 2 * WARM_UP_S:
            moment.stop()

    train(settings, stop)
    ours, theirs = np.array(pairs).T
    return {"pairs": pairs, "meter": ours.mean(), "profiler": theirs.mean(), "off_by": abs(ours - theirs).mean()}


def speed(settings: dict[str, Any], seconds: float, *, with_meter: bool) -> dict[str, Any]:
    """Steps per second, after a warm-up in which a meter has its first look."""
    import unidle.api

    class Nobody:
        def __init__(self, say: Any, *, trace: bool) -> None: ...
        def begin(self, *about: Any) -> None: ...
        def iteration(self, step: int, wall: float, has_learned: bool) -> None: ...
        def end(self) -> None: ...

    if not with_meter:
        vars(unidle.api)["RunMeter"] = Nobody
    begun, first = list[float](), list[tuple[float, int]]()

    def watch(moment: unidle.Moment) -> None:
        now, step = time.perf_counter(), moment.record["step"]
        begun.append(now)  # not before: captures and compilers take their time at first
        if not first and now - begun[0] > WARM_UP_S:
            first.append((now, step))
        elif first and now - first[0][0] > seconds:
            result["steps_per_second"] = (step - first[0][1]) / (now - first[0][0])
            moment.stop()

    result: dict[str, Any] = {}
    train(settings, watch)
    return result


def main() -> None:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", nargs="+", default=list(JOBS), choices=list(JOBS))
    parser.add_argument("--cost-of", default="beast 1024x32 strict", choices=list(JOBS))
    parser.add_argument("--seconds", type=float, default=6.0)
    parser.add_argument("--rounds", type=int, default=2, help="of with, without, without, with")
    parser.add_argument("--out", type=Path, default=None, help="folder for the JSON (default: benchmarks/results)")
    parser.add_argument("--child", choices=["agreement", "with", "without"], help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        settings, seconds = JOBS[arguments.jobs[0]], arguments.seconds
        if arguments.child == "agreement":
            print(json.dumps(agreement(settings, seconds)))
        else:
            print(json.dumps(speed(settings, seconds, with_meter=arguments.child == "with")))
        return
    result: dict[str, Any] = {"machine": provenance(), "agreement": {}, "cost": {"job": arguments.cost_of}}
    for job in arguments.jobs:
        found = result["agreement"][job] = _child("agreement", job, arguments.seconds)
        save("meter", result, arguments.out)
        print(f"{job:<24} busy {found['meter']:.1%} by the meter, {found['profiler']:.1%} by the profiler", flush=True)
    speeds: dict[str, list[float]] = {"with": [], "without": []}
    for side in ("with", "without", "without", "with") * arguments.rounds:
        speeds[side].append(_child(side, arguments.cost_of, arguments.seconds)["steps_per_second"])
        result["cost"] |= speeds
        save("meter", result, arguments.out)
    loss = 1 - np.mean(speeds["with"]) / np.mean(speeds["without"])
    print(f"{arguments.cost_of}: the meter costs {loss:.1%} of {np.mean(speeds['without']):,.0f} steps/s ({speeds})")


def _child(side: str, job: str, seconds: float) -> dict[str, Any]:
    command = [sys.executable, __file__, "--child", side, "--jobs", job, "--seconds", str(seconds)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{side} of {job} failed:\n{done.stderr[-3000:]}")
    seen: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return seen


if __name__ == "__main__":
    main()
