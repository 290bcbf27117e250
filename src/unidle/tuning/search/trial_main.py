"""The process of a trial: trains like any run, but pauses after each segment until the tuner asks for the next."""

from __future__ import annotations

import contextlib
import errno
import gc
import os
import re
import sys
from multiprocessing.connection import Connection
from time import perf_counter
from typing import TYPE_CHECKING, Any

from unidle.config.machine import limit_threads
from unidle.errors import TrainingError, UsageError
from unidle.subprocesses import end_with_trainer

if TYPE_CHECKING:
    from unidle.config import Config
    from unidle.engine.callbacks import CallbackContext
    from unidle.engine.trainer import Trainer

_WARM_UP_SECONDS = 0.5  # at least, for caches and clocks
_OUT_OF_MEMORY = re.compile(r"\b(OutOfMemoryError|MemoryError|out of memory|Cannot allocate memory)\b")


def main() -> None:
    """Run segments for one tuner until it closes the pipe."""
    end_with_trainer()
    limit_threads()
    what, pipe = sys.argv[1], Connection(int(sys.argv[2]))
    try:
        tuner, path, config = pipe.recv()
        seconds = pipe.recv() if what == "profile" else 0.0
    except (EOFError, OSError):
        return  # the tuner has exited
    if os.getppid() != tuner:
        return  # the tuner exited before `end_with_trainer` took effect
    sys.path[:] = path
    try:
        if what == "train":
            _train(config, pipe)
            return
        from unidle.tuning.probes.probe_job import measure_profile

        answer: tuple[str, Any] = "answer", measure_profile(config, seconds)
    except Exception as error:  # any error of the job
        answer = _kind(error), _first_line(error)
    with contextlib.suppress(OSError):
        pipe.send(answer)


def _first_line(error: Exception) -> str:
    """The first line of the message, after the kind of error if it is not one of unidle's."""
    first = str(error).splitlines()[0] if str(error) else "no message"
    return first if isinstance(error, (TrainingError, UsageError)) else f"{type(error).__name__}: {first}"


def _kind(error: Exception) -> str:
    """Classify an error; those of environments and workers contain their traceback as text."""
    is_memory = isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == errno.ENOMEM)
    return "memory" if is_memory or _OUT_OF_MEMORY.search(f"{type(error).__name__}: {error}") else "crash"


def _train(config: Config, pipe: Connection) -> None:
    from unidle.tuning.probes.training import new_trainer, train

    callback = _SegmentCallback(pipe)
    callback.trainer = new_trainer(config, callback, lambda text: print(text, flush=True))  # into the trial's log
    callback.begin()
    train(callback.trainer)


class _SegmentCallback:
    """Iteration callback that pauses the run until the tuner requests the next segment."""

    trainer: Trainer

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe
        self._iterations, self._is_warm = 0, False
        self._trained, self._steps, self._until = 0.0, 0, _WARM_UP_SECONDS
        self._first_return: float | None = None

    def begin(self) -> None:
        """Start the clock when training begins."""
        self._began = perf_counter()

    def __call__(self, context: CallbackContext) -> None:
        passed = perf_counter() - self._began
        self._iterations += 1
        mean_return = context.record.get("rollout/return_mean")
        self._first_return = mean_return if self._first_return is None else self._first_return
        if passed < self._until or self._iterations < _warm_ups(self.trainer):
            return
        self._trained += passed
        step = context.record["step"]
        if self._is_warm:
            answer: dict[str, Any] = {
                "steps": step - self._steps,
                "seconds": passed,
                "trained": self._trained,
                "mean_return": mean_return,
                "first_return": self._first_return,
            }
        else:
            answer, self._is_warm = job_setup(self.trainer), True
        try:
            self._pipe.send(("answer", answer))
            seconds = self._pipe.recv()
        except (EOFError, OSError):
            seconds = None
        if seconds is None:
            context.stop()
            return
        self._steps, self._until, self._began = step, seconds, perf_counter()


def _warm_ups(trainer: Trainer) -> int:
    """Return the number of warm-up iterations: on a GPU, the first with each rollout captures a graph."""
    rollouts = 2 if trainer.config.recipe.overlap == "strict" else 1
    return 1 + rollouts if trainer.algo.parameters.flat.is_cuda else rollouts


def job_setup(trainer: Trainer) -> dict[str, Any]:
    """Return the fields of `trial.JobSetup`."""
    from unidle.config.machine import available_cores, gpu_name
    from unidle.engine.collect.host import HostCollector
    from unidle.tuning.probes.training import replay_is_off_device

    collector, env_spec = trainer.collector, trainer.env_spec
    workers = collector.envs.workers if isinstance(collector, HostCollector) else 0
    parts = len(collector.envs.bounds) if isinstance(collector, HostCollector) else 1
    return {
        "cores": available_cores(),
        "gpu": gpu_name(),
        "on_gpu": trainer.algo.parameters.flat.is_cuda,
        "on_device": env_spec.on_device,
        "vectorised": env_spec.vectorised,
        "workers": workers,
        "slices": parts // max(1, workers),
        "replay_off_device": replay_is_off_device(trainer.algo),
    }


if __name__ == "__main__":
    main()
    gc.freeze()  # else garbage collection at exit traverses all of torch
