"""Makes runs on a CPU use the loop in C of collecting, with inference in Python instead of a CUDA graph.

Also a plugin of pytest: `-p c_loop_on_cpu` uses it in all tests that collect in their own process.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import pytest

from unidle.engine.collect import host
from unidle.engine.collect.step_loop import Driver, Launcher, StepLoop

_LAUNCH = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)
_QUERY = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)
_NOT_READY = 600


class CpuLauncher:
    """Stands in for CUDA: a graph is the number of a slot, from 1 on; every inference is queried twice."""

    def __init__(self, slots: list[Any]) -> None:
        self._slots, self.launches, self._queries = slots, 0, 0
        functions = _LAUNCH(self._launch), _LAUNCH(lambda *_: 0), _QUERY(self._query)
        driver = Driver(*(ctypes.cast(function, ctypes.c_void_p) for function in functions))
        self.launcher = Launcher(driver, 0, 0, functions)

    def _launch(self, graph: int, _: int) -> int:
        inference = self._slots[graph - 1].inference
        ready = np.flatnonzero(inference.positions < inference._steps)
        inference._infer_on_cpu((inference.positions[ready], ready))
        self.launches += 1
        return 0

    def _query(self, _: int) -> int:
        self._queries += 1
        return _NOT_READY if self._queries % 2 else 0


def use_c_loop(monkeypatch: pytest.MonkeyPatch) -> list[CpuLauncher]:
    """Returns the launchers of the collectors that come to be, in their order."""
    launchers = []

    def new_loop(collector: Any) -> StepLoop:
        launchers.append(CpuLauncher(collector._slots))
        graphs = range(1, len(collector._slots) + 1)
        limits = collector._min_ready, host._STALL_SECONDS
        return StepLoop(collector.envs, collector.schedule, collector._slots, graphs, launchers[-1].launcher, *limits)

    unsupported = host.loop_unsupported
    monkeypatch.setattr(host.HostCollector, "_new_loop", new_loop)
    monkeypatch.setattr(host, "loop_unsupported", lambda *given, on_gpu: unsupported(*given, on_gpu=True))
    return launchers


def pytest_configure(config: pytest.Config) -> None:
    """As a plugin: for the whole session."""
    use_c_loop(pytest.MonkeyPatch())
