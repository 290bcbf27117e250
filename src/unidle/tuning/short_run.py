"""A few seconds of real training, with the meter and sensor readings."""

from __future__ import annotations

import dataclasses
import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

from unidle.config import Config
from unidle.config.machine import available_memory, free_memory
from unidle.engine.callbacks import CallbackContext, RunGpu, TimeMeter
from unidle.errors import TrainingError
from unidle.meter.attribution.run_meter import FILE, RunMeter
from unidle.meter.sensors.host import Host, Tree
from unidle.meter.sensors.nvml import Driver, Gpu
from unidle.metrics.jsonl import read_records
from unidle.timeline import PHASES, Timeline
from unidle.tuning.advice.facts import Readings, Table
from unidle.tuning.probes.training import new_trainer, train

_POLL_SECONDS = 0.2
_LEAST_ITERATIONS = 3  # the first one includes set-up and does not count
_METER_SHARE = 0.03  # of the time that the meter may use; more than in a normal run


@dataclass(frozen=True)
class ShortRun:
    """Measurements of a short run."""

    iterations: int
    seconds: float
    """Seconds per iteration."""
    table: Table
    between: float
    """Seconds per iteration outside collecting and learning."""
    readings: Readings
    request_counts: dict[str, int]


def run_for(config: Config, seconds: float, say: Callable[[str], None]) -> ShortRun:
    """Train for `seconds` after the first iteration, without evaluations, and delete the run folder."""
    marks: list[_Mark] = []
    tree, host = Tree(os.getpid()), Host()
    meter = _SensorMeter(RunMeter(lambda sentence: None, own_share=_METER_SHARE))
    own: list[float] = []
    every: list[float] = []

    def after_iteration(context: CallbackContext) -> None:
        marks.append(_Mark(perf_counter(), context.record))
        own.extend(sample.value for sample in tree.poll().get("cpu", ()))
        every.extend(len(host.cores) * sample.value / 100 for sample in host.poll().get("cpu", ()))
        long_enough = marks[-1].at - marks[0].at >= seconds
        if long_enough and len(marks) >= _LEAST_ITERATIONS:
            context.stop()

    with TemporaryDirectory(prefix="unidle-diagnose-") as folder:
        run = dataclasses.replace(
            config.run,
            runs_dir=folder,
            eval_every=0,
            target_return=None,
            checkpoint_every=config.run.timesteps,
            save_replay_buffer=False,
            wandb=False,
            trace=False,
        )
        path = train(new_trainer(dataclasses.replace(config, run=run), after_iteration, say, meter))
        segments = read_records(path / FILE)
    if len(marks) < 2:
        raise TrainingError("The job was stopped before its second iteration ended, so there is nothing to diagnose.")
    first, last = marks[0], marks[-1]
    steps = last.record["step"] - first.record["step"]
    iterations = max(1, steps // config.recipe.total_batch)
    learning = [part for line in segments if (part := (line.get("parts") or {}).get("learning"))]
    readings = dataclasses.replace(
        meter.readings(),
        cores_used=_later_mean(own),
        others_cores=max(0.0, (_later_mean(every) or 0.0) - (_later_mean(own) or 0.0)) if own and every else None,
        learning_busy=fmean(part["busy"] for part in learning) if learning else None,
    )
    seconds, of_thread = (last.at - first.at) / iterations, thread_table(first.record, last.record)
    return ShortRun(
        iterations,
        seconds,
        gpu_table(segments) or of_thread,
        seconds * of_thread.share("checkpoint", "logging", "other"),
        readings,
        {name.removeprefix("requests/"): n for name, n in last.record.items() if name.startswith("requests/")},
    )


def _later_mean(values: Sequence[float]) -> float | None:
    """Return the mean without the first value, which includes the time before the run."""
    return fmean(values[1:] or values) if values else None


@dataclass(frozen=True)
class _Mark:
    at: float
    record: dict[str, Any]


def gpu_table(segments: Sequence[dict[str, Any]]) -> Table | None:
    """Return the GPU's time by cause from the run's meter; None without a GPU."""
    known = [line for line in segments if line.get("gpu")]
    whole = sum(line["length"] for line in known)
    if not whole:
        return None

    def mean(share: Callable[[dict[str, Any]], float]) -> float:
        return float(sum(line["length"] * share(line["gpu"]) for line in known) / whole)

    causes = list(dict.fromkeys(cause for line in known for cause in line["gpu"]["idle"]))
    idle = {cause: mean(lambda gpu, cause=cause: gpu["idle"].get(cause, 0.0)) for cause in causes}  # type: ignore[misc]
    busy = mean(lambda gpu: gpu["busy"])
    return Table(True, busy, idle, max(0.0, 1 - busy - sum(idle.values())))


def thread_table(first: dict[str, Any], last: dict[str, Any]) -> Table:
    """Return the trainer thread's time by phase between two records of a run."""
    spent = {name: last[f"time/{name}"] - first[f"time/{name}"] for name in PHASES}
    whole = max(last["wall"] - first["wall"], sum(spent.values()), 1e-9)
    shares = {name: seconds / whole for name, seconds in spent.items() if seconds > 0}
    return Table(False, 0.0, shares, max(0.0, 1 - sum(shares.values())))


class _SensorMeter:
    """The run's meter plus a background thread that polls memory use and GPU throttling."""

    def __init__(self, meter: TimeMeter) -> None:
        self._meter = meter
        self._ended = threading.Event()
        self._polls, self._reasons = 0, dict[str, int]()
        self._gpu_memory: float | None = None
        self._host_memory = 0.0

    def begin(self, folder: Path, timeline: Timeline, step: int, gpu: RunGpu | None) -> None:
        """Start the meter and the polling thread."""
        self._meter.begin(folder, timeline, step, gpu)
        self._thread = threading.Thread(target=self._run, args=(gpu,), name="unidle diagnose", daemon=True)
        self._thread.start()

    def iteration(self, step: int, wall: float, has_learned: bool) -> None:
        """Forward an iteration to the meter."""
        self._meter.iteration(step, wall, has_learned)

    def end(self) -> None:
        """Stop polling and the meter."""
        self._ended.set()
        self._thread.join()
        self._meter.end()

    def readings(self) -> Readings:
        """Return the readings of the run."""
        return Readings(
            gpu_memory=self._gpu_memory,
            host_memory=self._host_memory,
            throttled={reason: polls / self._polls for reason, polls in self._reasons.items()},
        )

    def _run(self, on: RunGpu | None) -> None:
        driver = Driver()
        try:
            gpu = None if on is None else driver.gpu_by_uuid(on.uuid)
            while True:
                self._poll(gpu)
                if self._ended.wait(_POLL_SECONDS):
                    return
        finally:
            driver.close()

    def _poll(self, gpu: Gpu | None) -> None:
        self._host_memory = max(self._host_memory, 1 - free_memory() / available_memory())
        self._polls += 1
        if gpu is None:
            return
        used = gpu.poll_only(("memory",)).get("memory")
        gpu.poll_throttling()
        total = next(reading.full for reading in gpu.readings if reading.name == "memory")
        if used and total:
            self._gpu_memory = max(self._gpu_memory or 0.0, used[-1].value / total)
        for reason in gpu.throttled_by or ():
            self._reasons[reason] = self._reasons.get(reason, 0) + 1
