"""The GPU that the jobs share: its free memory, and what each job uses of it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from unidle.errors import UsageError
from unidle.formatting import figure
from unidle.meter.sensors.nvml import Driver, Gpu
from unidle.packing.jobs import Job

_GIB = 2**30
_CONTROL_FILE = Path("/dev/nvidiactl")


class SharedGpu:
    """The first GPU that this process may use, or none."""

    def __init__(self) -> None:
        self._driver = Driver()
        self._gpu: Gpu | None = self._driver.own_gpu()
        self.missing = None if self._gpu else self._driver.no_gpu_reason or "CUDA_VISIBLE_DEVICES names no GPU."
        """Why there is none, or none that can be read."""
        # Without the package that reads it, a driver without known GPUs still has some.
        self.is_there = self._gpu is not None or (_CONTROL_FILE.exists() and not self._driver.gpus)
        self.utilisation: float | None = None
        """Percent of the time in which some kernel ran."""
        self.memory: float | None = None
        """GiB in use, by all programs."""
        self._shares: dict[int, float] = {}

    @property
    def text(self) -> str | None:
        """All that is known now: GPU 0: 78 %, 12.3 of 140 GiB."""
        if self._gpu is None:
            return None
        busy = None if self.utilisation is None else f"{self.utilisation:.0f} %"
        memory = None if self.memory is None else f"{figure(self.memory)} of {figure(self._memory_size)} GiB"
        return f"GPU {self._gpu.index}: " + (", ".join(filter(None, [busy, memory])) or "no readings")

    def poll(self) -> None:
        """Update the readings."""
        if self._gpu is None:
            return
        found = self._gpu.poll_only({"utilisation", "memory"})
        if samples := found.get("utilisation"):
            self.utilisation = sum(sample.value for sample in samples) / len(samples)
        if samples := found.get("memory"):
            self.memory = samples[-1].value
        self._gpu.poll_processes()
        self._shares = {
            process.pid: process.utilisation for process in self._gpu.processes or () if process.utilisation is not None
        }

    def share(self, pids: Iterable[int]) -> float | None:
        """Percent of the time in which a kernel of these processes ran; None if the driver does not say.

        In a container the driver names processes by ids that are unknown here.
        """
        shares = [self._shares[pid] for pid in pids if pid in self._shares]
        return sum(shares) if shares else None

    def require_memory(self, jobs: Sequence[Job], at_once: int) -> str | None:
        """UsageError if `at_once` of the jobs may need more memory than is free; a note if that is not known."""
        needed = sorted((job.gpu_memory for job in jobs if job.gpu_memory is not None), reverse=True)
        if not needed:
            return None
        self.poll()
        if self.memory is None or self._memory_size is None:
            reason = self.missing or "The driver does not report it."
            return f"GPU memory is not checked. {reason}"
        free = (self._memory_size - self.memory) * _GIB
        if sum(needed[:at_once]) <= free:
            return None
        have = f"{figure(free / _GIB)} GiB are free"
        if needed[0] > free:
            name = next(job.name for job in jobs if job.gpu_memory == needed[0])
            raise UsageError(
                f"Job `{name}` needs {figure(needed[0] / _GIB)} GiB of GPU memory, but {have}; make it smaller, or end "
                "other programs."
            )
        fitting = max(n for n in range(1, at_once) if sum(needed[:n]) <= free)
        raise UsageError(
            f"{at_once} jobs at once need up to {figure(sum(needed[:at_once]) / _GIB)} GiB of GPU memory, but {have}; "
            f"run fewer at once with --at-once {fitting}."
        )

    def close(self) -> None:
        """Release the driver."""
        self._driver.close()

    @property
    def _memory_size(self) -> float | None:
        """GiB."""
        assert self._gpu is not None
        return next(reading.full for reading in self._gpu.readings if reading.name == "memory")
