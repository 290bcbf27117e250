"""Polls GPU sensors in a background thread, so that readings can be averaged per phase.

Power is an instantaneous value and is read ten times a second. Memory rarely changes, and the driver itself sums or
averages the other readings, so they are polled once a second, at a tenth of the cost.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections import deque
from collections.abc import Container, Iterable, Sequence

from unidle.meter.sensors.nvml import Driver, Gpu
from unidle.meter.sensors.reading import Sample

_PERIOD_S = 0.1
_INSTANTANEOUS = "power"
_FULL_POLL_EVERY = 10  # polls
_KEPT = 1 << 16  # samples: about two hours


class Background:
    """Samples of one GPU's readings; without a GPU there are none, and no thread is started."""

    def __init__(self, readings: Sequence[str] = ("utilisation", "power")) -> None:
        self._samples: dict[str, deque[Sample]] = {name: deque(maxlen=_KEPT) for name in readings}
        self.memory_bytes: float | None = None
        """Total memory of that GPU."""
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None
        self._driver: Driver | None = None

    def start(self, uuid: str | None = None) -> None:
        """Start polling the GPU with this UUID, or the one this process uses."""
        self._driver = Driver()
        gpu = self._driver.own_gpu() if uuid is None else self._driver.gpu_by_uuid(uuid)
        if gpu is not None:
            memory = next(r.full for r in gpu.readings if r.name == "memory")
            self.memory_bytes = memory and memory * 2**30
            self._thread = threading.Thread(target=self._run, args=(gpu,), name="unidle readings", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """Stop polling; samples are kept."""
        self._ended.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._driver is not None:
            self._driver.close()
            self._driver = None

    def samples(self, name: str, since_ns: int) -> list[Sample]:
        """Return the samples since `since_ns` and the last one before it, oldest first."""
        found: list[Sample] = []
        for sample in reversed(list(self._samples[name])):
            found.append(sample)
            if sample.at_ns <= since_ns:
                break
        return found[::-1]

    def mean(self, name: str, start_ns: int, end_ns: int) -> float | None:
        """Return the mean of a reading from `start_ns` to `end_ns`; None if no sample covers any of it."""
        return means_by_phase([(0, start_ns, end_ns)], self.samples(name, start_ns)).get(0)

    def increase(self, name: str, start_ns: int, end_ns: int) -> float | None:
        """Return how much a counter grew from `start_ns` to `end_ns`; None if unknown."""
        kept = self.samples(name, start_ns)
        if not kept:
            return None
        times, values = [sample.at_ns for sample in kept], [sample.value for sample in kept]
        first, last = (values[max(0, bisect_right(times, at) - 1)] for at in (start_ns, end_ns))
        return last - first

    def means(self, intervals: Iterable[tuple[int, int, int]]) -> dict[int, tuple[float | None, float | None]]:
        """Return phase → mean utilisation (0 to 1) and power (W) over its intervals (phase, start, end)."""
        utilisation, power = (list(self._samples[name]) for name in ("utilisation", "power"))
        whole = list(intervals)
        shares, watts = means_by_phase(whole, utilisation), means_by_phase(whole, power)
        return {
            phase: (shares[phase] / 100 if phase in shares else None, watts.get(phase))
            for phase in {phase for phase, _, _ in whole}
        }

    def _run(self, gpu: Gpu) -> None:
        polls = 0
        while not self._ended.wait(_PERIOD_S):
            self._poll(gpu, self._samples if polls % _FULL_POLL_EVERY == 0 else (_INSTANTANEOUS,))
            polls += 1
        self._poll(gpu, self._samples)

    def _poll(self, gpu: Gpu, wanted: Container[str]) -> None:
        found = gpu.poll_only(wanted)
        for name, kept in self._samples.items():
            kept.extend(found.get(name, ()))


def means_by_phase(intervals: Iterable[tuple[int, int, int]], samples: list[Sample]) -> dict[int, float]:
    """Return the mean of a reading over each phase; a sample counts as the mean since the previous one."""
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
