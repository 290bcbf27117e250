"""Is the time of a simulator on the device booked as the environment's? unidle's account against independent ones.

    python benchmarks/simulator_account.py [--seconds 20] [--n-envs 4096]

PPO on Brax's ant (spring) through the JAX adapter, with the run's own meter. The trainer thread's time by phase is
compared with plain timers around the simulator's step, inference, storage and learning, over the same iterations. The
GPU's idle time by cause is compared with torch's profiler in a window after them: tiny marker kernels, launched where
phases begin, tell which phase each kernel belongs to, and a gap belongs to the phase of the next kernel, because the
GPU waits for that. Then `unidle diagnose` predicts the speed with four times as many environments and as many
transitions, and the job is measured with both, alternating, A B B A. Needs `pip install brax`; without a GPU only the
thread's account and the prediction are compared. Use an otherwise idle machine.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from machine import RESULTS, WARM_UP_S, provenance, save

from unidle.meter.watch.inside.unidle_windows import Window, torch_in_use, try_window

ENV, ENV_KWARGS = "brax:ant", {"backend": "spring"}
# Row of both tables → the phases of unidle's thread, and its causes of idle GPU time; other ones are "rest".
ROWS: dict[str, tuple[set[str], set[str]]] = {
    "environment": ({"environment"}, {"environment"}),
    "inference": ({"inference"}, {"inference"}),
    "storage": ({"storage"}, {"storage"}),
    "learning": ({"learn"}, {"learn (launch)"}),
    "waiting for the GPU": ({"sync"}, set()),
}
REST = "rest"
MARKER = "spin_kernel"  # what `torch.cuda._sleep` launches
_WARM_UP_ITERATIONS = 3  # at least; the first ones compile and open the log
_MAX_WINDOWS = 3
_SEGMENT, _TIMEOUT = 0.8, 150.0  # seconds: of a segment of the comparison, and for a job to compile and start

Kernel = tuple[str, int, int]  # name, start, end


class Phases:
    """Timers around functions; each may also launch a marker when it begins and when it ends."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.marks: list[str] = []  # the phase that begins with each marker
        self.marking = False

    def wrap(self, owner: type, name: str, phase: str) -> None:
        """Time a method of `owner`."""
        call = getattr(owner, name)

        def timed(*arguments: Any, **settings: Any) -> Any:
            self._mark(phase)
            began = time.perf_counter()
            try:
                return call(*arguments, **settings)
            finally:
                self.seconds[phase] += time.perf_counter() - began
                self._mark(REST)

        setattr(owner, name, timed)

    def _mark(self, phase: str) -> None:
        if self.marking:
            import torch

            torch.cuda._sleep(1)
            self.marks.append(phase)


class Account:
    """Compares the accounts in the course of one run."""

    def __init__(self, phases: Phases, warm_up: float, seconds: float, window: float) -> None:
        self._phases, self._warm_up, self._until, self._length = phases, warm_up, seconds, window
        self._first: dict[str, Any] | None = None
        self._window: Window | None = None
        self._windows = 0
        self._opened = 0.0, 0
        self.found: dict[str, Any] = {}

    def iteration(self, record: dict[str, Any]) -> bool:
        """An iteration is done; True when everything has been measured."""
        now = time.perf_counter()
        if self._first is None:
            if record["wall"] >= self._warm_up and record["iteration"] >= _WARM_UP_ITERATIONS:
                self._first = record
                self._phases.seconds.clear()
            return False
        if not self.found:
            if record["wall"] < self._until or record["step"] == self._first["step"]:
                return False
            self._end_timers(self._first, record)
        return self._profiled(record, now)

    def _end_timers(self, first: dict[str, Any], last: dict[str, Any]) -> None:
        """Both accounts of the thread since the warm-up."""
        spent = {key.removeprefix("time/"): last[key] - first[key] for key in last if key.startswith("time/")}
        seconds = last["wall"] - first["wall"]
        timers = {row: self._phases.seconds[row] / seconds for row in ROWS}
        self.found = {
            "steps": [first["step"], last["step"]],
            "steps_per_second": (last["step"] - first["step"]) / seconds,
            "thread": {
                "unidle": by_row({name: value / seconds for name, value in spent.items()}, of_gpu=False),
                "timers": timers | {REST: 1 - sum(timers.values())},
            },
        }

    def _profiled(self, record: dict[str, Any], now: float) -> bool:
        """Whether the profiler's window is over, or there is no GPU."""
        import torch

        if not torch.cuda.is_available():
            return True
        if self._window is not None:
            if now - self._opened[0] < self._length:
                return False
            torch.cuda.synchronize()
            self._phases.marking = False
            window, self._window = self._window, None
            kernels = window.close_with_names()
            account = gpu_account(kernels or [], self._phases.marks, window.begun_ns, window.ended_ns)
            if account is not None:
                rate = (record["step"] - self._opened[1]) / (now - self._opened[0])
                self.found["profiler"] = account | {"steps_per_second": rate}
                return True
        if self._windows == _MAX_WINDOWS or record["wall"] > self._until + 60:
            raise SystemExit("torch's profiler could not be used or lost kernels; run it again.")
        torch.cuda.synchronize()
        self._window = try_window(torch_in_use())  # None while the run's own meter uses the profiler
        if self._window is not None:
            self._windows += 1
            self._opened = time.perf_counter(), record["step"]
            self._phases.marks.clear()
            self._phases.marking = True
        return False


def by_row(shares: dict[str, float], *, of_gpu: bool) -> dict[str, float]:
    """Shares by phase or cause as rows of the table."""
    row_of = {name: row for row, names in ROWS.items() for name in names[of_gpu]}
    found = dict.fromkeys([*(row for row, names in ROWS.items() if names[of_gpu]), REST], 0.0)
    for name, share in shares.items():
        found[row_of.get(name, REST)] += share
    return found


def gpu_account(kernels: Sequence[Kernel], marks: Sequence[str], begin: int, end: int) -> dict[str, Any] | None:
    """Busy and idle time of the GPU from `begin` to `end` by phase; None if markers are missing.

    A kernel belongs to the phase of the latest marker before it; before the first one, to the rest. Markers themselves
    count as idle.
    """
    started = sorted(start for name, start, _ in kernels if MARKER in name)
    if not marks or len(started) != len(marks):
        return None
    busy: Counter[str] = Counter()
    idle: Counter[str] = Counter()
    counts: Counter[str] = Counter()
    at = begin
    for name, start, stop in sorted(kernels, key=lambda kernel: kernel[1]):
        if MARKER in name:
            continue
        place = bisect_right(started, start)
        phase = marks[place - 1] if place else REST
        counts[phase] += 1
        start, stop = max(start, at), min(stop, end)
        if stop <= start:
            continue  # within another kernel
        idle[phase] += start - at
        busy[phase] += stop - start
        at = stop
    idle[REST] += end - at
    rows = [*(row for row, names in ROWS.items() if names[1]), REST]
    length = end - begin
    return {
        "busy": sum(busy.values()) / length,
        "busy_with": {row: busy[row] / length for row in rows},
        "idle": {row: idle[row] / length for row in rows},
        "kernels": {row: counts[row] for row in rows},
    }


def metered(lines: Sequence[dict[str, Any]], first: int, last: int) -> dict[str, Any] | None:
    """The GPU's account by the run's meter between two steps; None without a GPU."""
    known = [line for line in lines if line["gpu"] and first < line["step"] <= last]
    whole = sum(line["length"] for line in known)
    if not whole:
        return None
    causes: defaultdict[str, float] = defaultdict(float)
    for line in known:
        for cause, share in line["gpu"]["idle"].items():
            causes[cause] += line["length"] * share / whole
    return {
        "segments": len(known),
        "busy": sum(line["length"] * line["gpu"]["busy"] for line in known) / whole,
        "idle": by_row(causes, of_gpu=True),
        "unattributed": sum(line["length"] * line["gpu"]["unattributed"] for line in known) / whole,
    }


def settings_of(arguments: argparse.Namespace) -> dict[str, Any]:
    """The recipe of the job."""
    batch = arguments.n_envs * arguments.n_steps // 4
    return {"n_envs": arguments.n_envs, "n_steps": arguments.n_steps, "batch_size": batch}


def timed_methods() -> list[tuple[type, str, str]]:
    """The methods in which a run spends its time, and their phases; none of them calls another."""
    from unidle.engine.collect.device import DeviceCollector
    from unidle.engine.learn.learner import Learner
    from unidle.envs.device.jax_env import JaxEnv

    return [
        (JaxEnv, "step", "environment"),
        (DeviceCollector, "_act", "inference"),
        (DeviceCollector, "_store", "storage"),
        (Learner, "begin", "learning"),
        (Learner, "advance", "learning"),
        (Learner, "metrics", "waiting for the GPU"),
    ]


def measure_account(arguments: argparse.Namespace) -> dict[str, Any]:
    """Train in this process and compare the accounts."""
    import torch

    import unidle
    from unidle.metrics.jsonl import read_records

    phases = Phases()
    for owner, name, phase in timed_methods():
        phases.wrap(owner, name, phase)
    warm_up = WARM_UP_S if torch.cuda.is_available() else 0.2 * arguments.seconds
    account = Account(phases, warm_up, warm_up + arguments.seconds, arguments.window)

    def after_iteration(context: unidle.CallbackContext) -> None:
        if account.iteration(context.record):
            context.stop()

    with tempfile.TemporaryDirectory() as folder:
        run = unidle.train(
            ENV,
            env_kwargs=ENV_KWARGS,
            preset="device",
            **settings_of(arguments),
            timesteps=10**10,
            eval_every=0,
            checkpoint_every=10**10,
            runs_dir=folder,
            quiet=True,
            after_iteration=[after_iteration],
        )
        lines = read_records(run.path / "meter.jsonl")
    found = account.found
    found["meter"] = metered(lines, *found["steps"])
    return found


def measure_prediction(arguments: argparse.Namespace) -> dict[str, Any]:
    """Diagnose the job, and measure it with and without four times as many environments."""
    from predictions import measured

    from unidle.cli.job import JobFlags, job_of
    from unidle.report.terminal.diagnose import lines
    from unidle.tuning.advice.collecting import with_more_envs
    from unidle.tuning.diagnose import diagnose

    flags = ["--env", ENV, "--env-kwargs", json.dumps(ENV_KWARGS, separators=(",", ":")), "--preset", "device"]
    for name, value in settings_of(arguments).items():
        flags += [f"--{name.replace('_', '-')}", str(value)]
    config = job_of(JobFlags, flags, "train").config
    diagnosis = diagnose(config, arguments.diagnose_seconds, lambda text: print(text, file=sys.stderr))
    facts = diagnosis.facts
    print(*lines(diagnosis), sep="\n", file=sys.stderr, flush=True)
    simulator = facts.profile.simulator
    if simulator is None or simulator.larger is None:
        raise SystemExit("diagnose could not measure the simulator with more environments.")
    n_envs, step = simulator.larger
    n_steps, predicted = with_more_envs(facts.profile, simulator.larger, config.recipe)
    change = f"--n-envs {n_envs} --n-steps {n_steps}"
    found = measured(" ".join(flags), change, _SEGMENT, _TIMEOUT, arguments.compare_seconds)
    return {
        "verdict": diagnosis.verdict.sentence,
        "shares": facts.shares,
        "steps_per_second": facts.steps_per_second,
        "simulator_step": {str(facts.profile.n_envs): simulator.step, str(n_envs): step},
        "change": change,
        "advised": any(change == advice.flags for advice in diagnosis.verdict.recipe),
        "predicted": predicted,
        "is_rough": facts.predictions_are_rough,
        "measured": found,
        "off_by": abs(predicted / found["mean"] - 1),
    }


def show(found: dict[str, Any]) -> None:
    """Print both accounts side by side."""

    def line(name: str, *shares: float) -> str:
        ours, theirs = shares[:2]
        return f"{name:<22}" + "".join(f"{share:>10.1%}" for share in (ours, theirs, ours - theirs, *shares[2:]))

    thread = found["thread"]
    print(f"{'trainer thread':<22}{'unidle':>10}{'timers':>10}{'off by':>10}")
    for row, share in thread["unidle"].items():
        print(line(row, share, thread["timers"][row]))
    meter, profiler = found["meter"], found.get("profiler")
    if meter is not None and profiler is not None:
        print(f"{'the GPU':<22}{'unidle':>10}{'profiler':>10}{'off by':>10}{'busy with':>10}")
        print(line("busy", meter["busy"], profiler["busy"]))
        for row, share in meter["idle"].items():
            print(line(f"idle: {row}", share, profiler["idle"][row], profiler["busy_with"][row]))
        print(line("unattributed", meter["unattributed"], 0.0))
        rates = f"{found['steps_per_second']:,.0f} steps/s, {profiler['steps_per_second']:,.0f} under the profiler"
        print(f"{rates}; kernels {profiler['kernels']}; {meter['segments']} segments of the meter")


def main() -> None:
    """Measure both parts, each in a separate process."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=20.0, help="of training after the warm-up")
    parser.add_argument("--window", type=float, default=2.0, help="seconds under the profiler")
    parser.add_argument("--n-envs", type=int, default=4096, help="64 is enough to try it on a CPU")
    parser.add_argument("--n-steps", type=int, default=32)
    parser.add_argument("--diagnose-seconds", type=float, default=6.0, help="of training in the diagnosis")
    parser.add_argument("--compare-seconds", type=float, default=8.0, help="of the comparison")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the JSON")
    parser.add_argument("--part", choices=list(PARTS), help=argparse.SUPPRESS)  # internal: one part in this process
    arguments = parser.parse_args()
    if arguments.part:
        print(json.dumps(PARTS[arguments.part](arguments)))
        return
    result: dict[str, Any] = {"machine": provenance("jax", "brax"), "env": ENV, "env_kwargs": ENV_KWARGS}
    result["settings"] = settings_of(arguments)
    with tempfile.TemporaryDirectory() as cache:  # so that all processes of a size compile once
        environment = {"JAX_COMPILATION_CACHE_DIR": cache, **os.environ}
        for part in PARTS:
            began = time.perf_counter()
            command = [sys.executable, __file__, "--part", part, *sys.argv[1:]]
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=environment)
            if done.returncode:
                raise SystemExit(f"the {part} failed.")
            result[part] = json.loads(done.stdout.splitlines()[-1])
            save("simulator_account", result, arguments.out)
            if part == "account":
                show(result[part])
            else:
                found, measured = result[part], result[part]["measured"]
                print("diagnose: " + ", ".join(f"{name} {share:.1%}" for name, share in found["shares"].items()))
                print(f"{found['change']}: {found['predicted']:.2f} × predicted, {measured['mean']:.2f} × measured")
            print(f"{part}: {time.perf_counter() - began:.0f} s", file=sys.stderr, flush=True)


PARTS: dict[str, Callable[[argparse.Namespace], dict[str, Any]]] = {
    "account": measure_account,
    "prediction": measure_prediction,
}

if __name__ == "__main__":
    main()
