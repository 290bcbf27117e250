"""Readings of the GPU from a thread of their own, for whoever wants to know them phase by phase.

Power is that of the moment, and is read ten times a second. Once a second is enough for memory, which changes seldom,
and for what the driver itself adds up or averages from one look to the next; it costs the tenth.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections import deque
from collections.abc import Container, Iterable, Sequence

from unidle.meter.sensors.nvml import Driver, Gpu
from unidle.meter.sensors.reading import Sample

_PERIOD_S = 0.1
_OF_THE_MOMENT = "power"
_LOOKS_FOR_ALL = 10  # one look in so many
_KEPT = 1 << 16  # samples: about two hours


class Background:
    """Some readings of one GPU. Without a GPU nothing is started, and nothing is known."""

    def __init__(self, readings: Sequence[str] = ("utilisation", "power")) -> None:
        self._samples: dict[str, deque[Sample]] = {name: deque(maxlen=_KEPT) for name in readings}
        self.memory_bytes: float | None = None
        """Of that GPU."""
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None
        self._driver: Driver | None = None

    def start(self, uuid: str | None = None) -> None:
        """Begin to read the GPU that is called so, or this process's own, if there is such."""
        self._driver = Driver()
        gpu = self._driver.own_gpu() if uuid is None else self._driver.gpu_called(uuid)
        if gpu is not None:
            memory = next(r.full for r in gpu.readings if r.name == "memory")
            self.memory_bytes = memory and memory * 2**30
            self._thread = threading.Thread(target=self._run, args=(gpu,), name="unidle readings", daemon=True)
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

    def samples(self, name: str, since_ns: int) -> list[Sample]:
        """What was read since `since_ns`, and the last before it, oldest first."""
        found: list[Sample] = []
        for sample in reversed(list(self._samples[name])):
            found.append(sample)
            if sample.at_ns <= since_ns:
                break
        return found[::-1]

    def mean(self, name: str, start_ns: int, end_ns: int) -> float | None:
        """The mean of a reading from `start_ns` to `end_ns`; None where no sample covers any of it."""
        return means_by_phase([(0, start_ns, end_ns)], self.samples(name, start_ns)).get(0)

    def grown(self, name: str, start_ns: int, end_ns: int) -> float | None:
        """By how much a total grew from `start_ns` to `end_ns`; None where that is not known."""
        kept = self.samples(name, start_ns)
        if not kept:
            return None  # with one, what has grown since is told when the next is there
        times, values = [sample.at_ns for sample in kept], [sample.value for sample in kept]
        first, last = (values[max(0, bisect_right(times, at) - 1)] for at in (start_ns, end_ns))
        return last - first

    def means(self, intervals: Iterable[tuple[int, int, int]]) -> dict[int, tuple[float | None, float | None]]:
        """Phase → mean utilisation (0 to 1) and power (W) over its intervals (phase, start, end), where known."""
        utilisation, power = (list(self._samples[name]) for name in ("utilisation", "power"))
        whole = list(intervals)
        shares, watts = means_by_phase(whole, utilisation), means_by_phase(whole, power)
        return {
            phase: (shares[phase] / 100 if phase in shares else None, watts.get(phase))
            for phase in {phase for phase, _, _ in whole}
        }

    def _run(self, gpu: Gpu) -> None:
        looks = 0
        while not self._ended.wait(_PERIOD_S):
            self._look(gpu, self._samples if looks % _LOOKS_FOR_ALL == 0 else (_OF_THE_MOMENT,))
            looks += 1
        self._look(gpu, self._samples)

    def _look(self, gpu: Gpu, wanted: Container[str]) -> None:
        found = gpu.poll_only(wanted)
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
