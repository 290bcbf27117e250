"""Is a run's meter accurate (GPU only), and what is its overhead?

    python benchmarks/meter.py [--jobs "beast off" …] [--seconds 6] [--pairs 24]

*Agreement*: the GPU's busy share by the meter (CUDA events, times the kernel-active share calibrated in one earlier
profiler window) against the profiler's, which records every kernel, in the same segments of real training. *Cost*:
steps per second with and without the meter, A B B A, within one run, because two processes differ by more than the
effect. Phases and CUDA events count as part of the meter, except those around one inference in 16. The time that the
trainer's thread spends in the meter is also summed over all calls; use it if steps per second are too noisy.
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
import torch
from machine import RESULTS, WARM_UP_S, provenance, save

from unidle.engine.callbacks import CallbackContext
from unidle.meter.sensors.background import Background

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
    "sac": {"env": "HalfCheetah-v5", "preset": "sac", "n_envs": 32, "utd_ratio": 0.25},
    "device": {"env": "unidle/CartPole-v1", "n_envs": 4096, "n_steps": 32, "batch_size": 16_384},
}
_JOBS_WITHOUT_GPU = {"classic": {"env": "HalfCheetah-v5", "preset": "classic", "n_envs": 8, "n_steps": 64}}
_PAIRS = 4
_TIMED_S = 40.0  # several meter segments long
_EMPTY_CALLS = 100_000  # to measure the overhead of timing
_SEGMENT_S = 1.0  # the meter's pauses go on while it is off, so its segments are twice as dense while it is on


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
    """Return pairs of busy shares: the meter's and the profiler's."""
    import unidle.api.build
    from unidle.meter.attribution import run_meter
    from unidle.meter.watch.inside.unidle_windows import Window, torch_in_use
    from unidle.metrics.jsonl import read_records

    pairs: list[tuple[float, float]] = []

    class Compared(run_meter.RunMeter):
        def _begin_segment(self, now: int) -> None:
            super()._begin_segment(now)
            self._profiler_window = None
            if self._segment is not None and self._segment.window is None:
                self._profiler_window = Window(torch_in_use())

        def _end_segment(self, segment: Any, now: int, step: int, wall: float) -> None:
            window = self._profiler_window
            profiled = window.close() if window else None
            super()._end_segment(segment, now, step, wall)
            if window is not None and profiled is not None:
                line = read_records(self._path)[-1]
                pairs.append((line["gpu"]["busy"], profiled.active_ns / (window.ended_ns - window.begun_ns)))
                self.latest = line

    # Measure segments without pauses: the overhead does not matter here.
    vars(unidle.api.build)["RunMeter"] = partial(Compared, own_share=0.5)
    began = list[float]()

    def stop(context: unidle.CallbackContext) -> None:
        # From the first iteration on: before it, graphs are captured and kernels compiled.
        began.append(time.perf_counter())
        if len(pairs) >= _PAIRS or began[-1] - began[0] > 2 * seconds + 2 * WARM_UP_S:
            context.stop()

    train(settings, stop)
    ours, theirs = np.array(pairs).T
    return {"pairs": pairs, "meter": ours.mean(), "profiler": theirs.mean(), "off_by": abs(ours - theirs).mean()}


def cost(settings: dict[str, Any], pairs: int) -> dict[str, Any]:
    """Return steps/s with and without the meter in alternating segments after its calibration, and its own time."""
    from unidle.meter.attribution.run_meter import RunMeter
    from unidle.timeline import DeviceClock, Timeline
    from unidle.tuning.search.interval import ratio

    def discard_segment(meter: RunMeter, *args: Any, **kwargs: Any) -> None:
        if meter._segment is not None and meter._segment.window is not None:
            meter._segment.window.close()
        meter._segment, meter._timeline.is_recording = None, False  # discards a segment in progress

    switch = _Switch(
        {
            (Timeline, "enter"): lambda timeline, phase: timeline._phase,
            (Timeline, "add_device_work"): lambda timeline, phase, nanoseconds: None,
            (DeviceClock, "launch"): lambda clock, phase, work: work(),
            (DeviceClock, "read"): lambda clock: None,
            (RunMeter, "iteration"): discard_segment,
            (Background, "_poll"): lambda background, gpu, wanted: None,
        }
    )
    began, rates = list[float](), list[float]()
    mark = [0.0, 0]

    def alternate(context: CallbackContext) -> None:
        now, step = time.perf_counter(), context.record["step"]
        began.append(now)  # from the first iteration on, as in `agreement`
        if now - began[0] < 2 * WARM_UP_S:
            mark[:] = now, step
        elif len(rates) == 2 * pairs:
            if now - mark[0] >= _TIMED_S:
                switch.own_share = switch.own_seconds() / (now - mark[0])
                context.stop()
        elif now - mark[0] >= _SEGMENT_S:
            rates.append((step - mark[1]) / (now - mark[0]))
            if len(rates) == 2 * pairs:
                switch.start_timing()
            else:
                switch.set(on=len(rates) % 4 in (0, 3))
            mark[:] = time.perf_counter(), step

    train(settings, alternate)
    # The order alternates: with and without, without and with, …
    in_order = [rates[i : i + 2] for i in range(0, len(rates), 2)]
    pairs_of_rates = [(first, second) if i % 2 == 0 else (second, first) for i, (first, second) in enumerate(in_order)]
    return {
        "with_and_without": pairs_of_rates,
        "without_over_with": vars(ratio(pairs_of_rates)),
        "own_share": switch.own_share,
    }


class _Switch:
    """Replaces the meter's methods by no-ops and restores them, or sums the time spent in them."""

    def __init__(self, replacements: dict[tuple[type, str], Any]) -> None:
        self._replacements = replacements
        self._originals = {place: getattr(*place) for place in replacements}
        self.own_share = 0.0
        self._own_ns = self._calls = 0

    def set(self, *, on: bool) -> None:
        for (owner, name), method in (self._originals if on else self._replacements).items():
            setattr(owner, name, method)

    def start_timing(self) -> None:
        self.set(on=True)
        for owner, name in self._replacements:
            if owner is not Background:  # it has its own thread
                setattr(owner, name, self._timed(self._originals[owner, name]))

    def own_seconds(self) -> float:
        """Return the summed time minus the overhead of timing, measured on an empty call."""
        own_ns, calls = self._own_ns, self._calls
        self._own_ns, nothing = 0, self._timed(lambda switch, phase: phase)
        for _ in range(_EMPTY_CALLS):
            nothing(self, 0)
        return (own_ns - calls * self._own_ns / _EMPTY_CALLS) * 1e-9

    def _timed(self, method: Any) -> Any:
        """Wrap a method to time it, without the callbacks passed to it, such as the work of `launch`."""

        def timed(*args: Any, **kwargs: Any) -> Any:
            self._calls += 1
            args = tuple(self._untimed(arg) if callable(arg) else arg for arg in args)
            began = time.perf_counter_ns()
            try:
                return method(*args, **kwargs)
            finally:
                self._own_ns += time.perf_counter_ns() - began

        return timed

    def _untimed(self, work: Any) -> Any:
        def call() -> Any:
            began = time.perf_counter_ns()
            try:
                return work()
            finally:
                self._own_ns -= time.perf_counter_ns() - began

        return call


def main() -> None:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    on_gpu = torch.cuda.is_available()
    jobs = JOBS if on_gpu else _JOBS_WITHOUT_GPU
    cost_jobs = ["beast 1024x32 strict", "device"] if on_gpu else list(jobs)
    parser.add_argument("--jobs", nargs="*", default=list(JOBS) if on_gpu else [], choices=list(jobs))
    parser.add_argument("--cost-of", nargs="*", default=cost_jobs, choices=list(jobs))
    parser.add_argument("--seconds", type=float, default=6.0)
    parser.add_argument("--pairs", type=int, default=24, help="of segments, with and without the meter")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the JSON")
    parser.add_argument("--child", choices=["agreement", "cost"], help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        settings = jobs[arguments.jobs[0]]
        is_cost = arguments.child == "cost"
        print(json.dumps(cost(settings, arguments.pairs) if is_cost else agreement(settings, arguments.seconds)))
        return
    result: dict[str, Any] = {"machine": provenance(), "agreement": {}, "cost": {}}
    name = "meter" if on_gpu else "meter_without_gpu"
    for job in arguments.jobs:
        measured = result["agreement"][job] = _run_in_subprocess("agreement", job, arguments)
        save(name, result, arguments.out)
        print(
            f"{job:<24} busy {measured['meter']:.1%} by the meter, {measured['profiler']:.1%} by the profiler",
            flush=True,
        )
    for job in arguments.cost_of:
        measured = result["cost"][job] = _run_in_subprocess("cost", job, arguments)
        save(name, result, arguments.out)
        low, mean, high = (measured["without_over_with"][key] - 1 for key in ("low", "mean", "high"))
        line = f"{job:<24} without the meter {mean:+.2%} ({low:+.2%} … {high:+.2%}) steps/s"
        print(f"{line}; time in the meter {measured['own_share']:.2%}", flush=True)


def _run_in_subprocess(what: str, job: str, arguments: argparse.Namespace) -> dict[str, Any]:
    flags = ["--seconds", str(arguments.seconds), "--pairs", str(arguments.pairs)]
    command = [sys.executable, __file__, "--child", what, "--jobs", job, *flags]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{what} of {job} failed:\n{done.stderr[-3000:]}")
    measured: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return measured


if __name__ == "__main__":
    main()
