"""A few iterations as a trace for Perfetto: every operation and kernel, with its time, by torch's profiler."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any

from unidle.meter.watch.inside.unidle_windows import hush_kineto

FILE = "trace.json.gz"
_ITERATIONS, _SECONDS = 2, 0.2  # at least
_ENOUGH_SECONDS = 5.0  # after which one will do


class Tracer:
    """Records once, from the first iteration at which it may."""

    def __init__(self, folder: Path, say: Callable[[str], None]) -> None:
        self._path, self._say = folder / FILE, say
        self._profiler: Any = None
        self._seen, self._begun = 0, 0.0
        self.is_done = False

    def iteration(self) -> None:
        """An iteration is done, and nothing stands against recording the next."""
        if self._profiler is None:
            import torch

            hush_kineto()
            kinds = torch.profiler.ProfilerActivity
            activities = [kinds.CPU, kinds.CUDA] if torch.cuda.is_available() else [kinds.CPU]
            self._profiler = torch.profiler.profile(activities=activities)
            self._profiler.start()
            self._begun = perf_counter()
            return
        self._seen += 1
        seconds = perf_counter() - self._begun
        if seconds >= (_SECONDS if self._seen >= _ITERATIONS else _ENOUGH_SECONDS):
            self.finish()

    def finish(self) -> None:
        """Write what was recorded, and say where it is."""
        if self.is_done:
            return
        self.is_done = True
        if self._profiler is None:
            self._say("There is no trace: the run was over before one could be recorded; give it more --timesteps.")
            return
        self._profiler.stop()
        self._profiler.export_chrome_trace(str(self._path))
        self._say(f"{perf_counter() - self._begun:.1f} seconds of it are in {self._path}: open it at ui.perfetto.dev.")
