"""Readings of the GPU from a thread of their own, ten times a second, for whoever wants to know them phase by phase."""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections import deque
from collections.abc import Iterable

from unidle.meter.nvml import Driver
from unidle.meter.reading import Sample

_PERIOD_S = 0.1
_KEPT = 1 << 16  # samples: about two hours


class Background:
    """Utilisation and power of the first GPU. Without a GPU nothing is started, and nothing is known."""

    def __init__(self) -> None:
        self._samples: dict[str, deque[Sample]] = {"utilisation": deque(maxlen=_KEPT), "power": deque(maxlen=_KEPT)}
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None
        self._driver: Driver | None = None

    def start(self) -> None:
        """Begin to read, if there is anything to read."""
        self._driver = Driver()
        if self._driver.gpus:
            self._thread = threading.Thread(target=self._run, name="unidle readings", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """End it; what was read stays."""
        self._ended.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._driver is not None:
            self._driver.close()
            self._driver = None

    def means(self, intervals: Iterable[tuple[int, int, int]]) -> dict[int, tuple[float | None, float | None]]:
        """Phase → mean utilisation (0 to 1) and power (W) over its intervals (phase, start, end), where known."""
        utilisation, power = (list(self._samples[name]) for name in ("utilisation", "power"))
        whole = list(intervals)
        shares, watts = means_by_phase(whole, utilisation), means_by_phase(whole, power)
        return {
            phase: (shares[phase] / 100 if phase in shares else None, watts.get(phase))
            for phase in {phase for phase, _, _ in whole}
        }

    def _run(self) -> None:
        assert self._driver is not None
        gpu = self._driver.gpus[0]
        while not self._ended.wait(_PERIOD_S):
            found = gpu.poll()
            for name, kept in self._samples.items():
                kept.extend(found.get(name, ()))


def means_by_phase(intervals: Iterable[tuple[int, int, int]], samples: list[Sample]) -> dict[int, float]:
    """The mean of a reading over each phase; a sample is taken for the mean since the one before it."""
    times = [sample.at_ns for sample in samples]
    lengths: dict[int, int] = {}
    sums: dict[int, float] = {}
    for phase, start, end in intervals:
        place = max(1, bisect_right(times, start))
        while place < len(samples) and times[place - 1] < end:
            held = min(end, times[place]) - max(start, times[place - 1])
            if held > 0:
                lengths[phase] = lengths.get(phase, 0) + held
                sums[phase] = sums.get(phase, 0.0) + held * samples[place].value
            place += 1
    return {phase: sums[phase] / length for phase, length in lengths.items()}
