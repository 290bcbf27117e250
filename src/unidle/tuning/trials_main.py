"""A trial's process: trains as any run does, but stops after each stretch until it is told to go on."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import sys
from multiprocessing.connection import Connection
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

from unidle.config.machine import limit_threads
from unidle.lifeline import end_with_trainer

if TYPE_CHECKING:
    from unidle.config import Config
    from unidle.engine.listener import Moment
    from unidle.engine.trainer import Trainer

_WARM_UP_SECONDS = 0.5  # at least; caches fill, clocks rise
_OUT_OF_MEMORY = re.compile(r"\b(OutOfMemoryError|MemoryError|out of memory|Cannot allocate memory)\b")


def main() -> None:
    """Serve one tuner until it hangs up."""
    end_with_trainer()
    limit_threads()
    what, pipe = sys.argv[1], Connection(int(sys.argv[2]))
    try:
        tuner, path, config = pipe.recv()
        if os.getppid() != tuner:
            return  # it was gone before this process was tied to it
        sys.path[:] = path
        if what == "profile":
            from unidle.tuning.probes import measure_profile

            pipe.send(("answer", measure_profile(config, pipe.recv())))
        else:
            _train(config, pipe)
    except (EOFError, ConnectionError):
        pass  # the tuner is gone
    except Exception as error:
        with contextlib.suppress(OSError):
            pipe.send((_kind(error), f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'none'}"))


def _kind(error: Exception) -> str:
    """An environment's or a worker's error comes with its traceback in the text."""
    is_memory = isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == errno.ENOMEM)
    return "memory" if is_memory or _OUT_OF_MEMORY.search(f"{type(error).__name__}: {error}") else "crash"


def _train(config: Config, pipe: Connection) -> None:
    from unidle.engine.build import resolve_network
    from unidle.engine.checkpoint import RunFolder
    from unidle.engine.trainer import Trainer
    from unidle.envs.make import env_maker

    maker = env_maker(config.run.env, config.run.env_kwargs)
    if config.engine.subproc or config.engine.workers:
        maker = maker.on_host()
    pace = _Pace(pipe)
    network = resolve_network(config.recipe.network)[0]
    trainer = Trainer(config, maker, _Log(), network=network, after_iteration=[pace])
    try:
        pace.trainer = trainer
        trainer.train(RunFolder.create(Path(config.run.runs_dir) / "run", config))
    finally:
        trainer.close()


class _Pace:
    """Called after each iteration: keeps the run waiting until the tuner says how long it may go on."""

    trainer: Trainer

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe
        self._iterations, self._is_warm = 0, False
        self._trained, self._began = 0.0, perf_counter()
        self._steps, self._until = 0, _WARM_UP_SECONDS
        self._first_return: float | None = None

    def __call__(self, moment: Moment) -> None:
        passed = perf_counter() - self._began
        self._iterations += 1
        mean_return = moment.record.get("rollout/return_mean")
        self._first_return = mean_return if self._first_return is None else self._first_return
        if passed < self._until or self._iterations < _warm_ups(self.trainer):
            return
        self._trained += passed
        step = moment.record["step"]
        if self._is_warm:
            answer: dict[str, Any] = {
                "steps": step - self._steps,
                "seconds": passed,
                "trained": self._trained,
                "mean_return": mean_return,
                "first_return": self._first_return,
            }
        else:
            answer, self._is_warm = situation(self.trainer), True
        try:
            self._pipe.send(("answer", answer))
            told = self._pipe.recv()
        except (EOFError, OSError):
            told = None
        if told is None:
            moment.stop()
            return
        self._steps, self._until, self._began = step, told, perf_counter()


def _warm_ups(trainer: Trainer) -> int:
    """Iterations that do not count: on a GPU, the first with each rollout captures a graph."""
    rollouts = 2 if trainer.config.recipe.overlap == "strict" else 1
    return 1 + rollouts if trainer.algo.parameters.flat.is_cuda else rollouts


def situation(trainer: Trainer) -> dict[str, Any]:
    """What `trials.Situation` holds."""
    from unidle.config.machine import available_cores, gpu_name
    from unidle.engine.collector import Collector

    collector, contract = trainer.collector, trainer.contract
    workers = collector.envs.workers if isinstance(collector, Collector) else 0
    parts = len(collector.envs.bounds) if isinstance(collector, Collector) else 1
    return {
        "cores": available_cores(),
        "gpu": gpu_name(),
        "on_gpu": trainer.algo.parameters.flat.is_cuda,
        "on_device": contract.on_device,
        "vectorised": contract.vectorised,
        "workers": workers,
        "slices": parts // max(1, workers),
    }


class _Log:
    """A listener that leaves what must be said in the trial's log."""

    def on_start(self, facts: dict[str, str], total_steps: int, step: int, best: dict[str, Any] | None = None) -> None:
        pass

    def on_iteration(self, record: dict[str, Any]) -> None:
        pass

    def on_evaluation(self, record: dict[str, Any]) -> None:
        pass

    def on_message(self, text: str) -> None:
        print(text, flush=True)

    def on_end(self) -> None:
        pass


if __name__ == "__main__":
    main()
