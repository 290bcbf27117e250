"""Records a few iterations with torch's profiler as a trace for Perfetto."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any

from unidle.meter.watch.inside.unidle_windows import silence_kineto
from unidle.writing import remove_link

FILE = "trace.json.gz"
_ITERATIONS, _SECONDS = 2, 0.2  # at least
_ENOUGH_SECONDS = 5.0  # then a single iteration is enough


class Tracer:
    """Records one trace per run."""

    def __init__(self, folder: Path, say: Callable[[str], None]) -> None:
        self._path, self._say = folder / FILE, say
        self._profiler: Any = None
        self._iterations, self._begun = 0, 0.0
        self.is_done = False

    def iteration(self) -> None:
        """Start recording, or stop after enough iterations; called while the profiler may run."""
        if self._profiler is None:
            import torch

            silence_kineto()
            kinds = torch.profiler.ProfilerActivity
            activities = [kinds.CPU, kinds.CUDA] if torch.cuda.is_available() else [kinds.CPU]
            self._profiler = torch.profiler.profile(activities=activities)
            self._profiler.start()
            self._begun = perf_counter()
            return
        self._iterations += 1
        seconds = perf_counter() - self._begun
        if seconds >= (_SECONDS if self._iterations >= _ITERATIONS else _ENOUGH_SECONDS):
            self.finish()

    def finish(self) -> None:
        """Write the trace and report its path."""
        if self.is_done:
            return
        self.is_done = True
        if self._profiler is None:
            self._say("No trace was recorded because the run ended too early; give it more --timesteps.")
            return
        self._profiler.stop()
        self._profiler.export_chrome_trace(str(remove_link(self._path)))
        seconds = perf_counter() - self._begun
        self._say(f"Wrote a trace of {seconds:.1f} seconds to {self._path}; open it at ui.perfetto.dev.")
