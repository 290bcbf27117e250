"""Which cores each job runs on: no core is used by two jobs."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path

from unidle.config.machine import available_cores
from unidle.errors import UsageError
from unidle.packing.jobs import Job

_CPUS = Path("/sys/devices/system/cpu")
_STAT = Path("/proc/stat")
_SAMPLE_S = 0.2


def usable_cores() -> list[int]:
    """The cores that jobs may use; those that share a physical core are neighbours.

    If a quota (of a container, or SLURM) allows fewer than the affinity mask, those are taken that are least busy now:
    other containers run on the rest.
    """
    cores, allowed = sorted(os.sched_getaffinity(0)), available_cores()
    if allowed < len(cores):
        before = _busy_ticks()
        time.sleep(_SAMPLE_S)
        now = _busy_ticks()
        cores.sort(key=lambda core: now.get(core, 0) - before.get(core, 0))
    return sorted(cores[:allowed], key=_position)


class CoreDivision:
    """Hands out cores to jobs when they start, and takes them back when they end."""

    def __init__(self, cores: Sequence[int], jobs: Sequence[Job], at_once: int) -> None:
        """UsageError if `at_once` of the jobs cannot have a core each, or the number that they ask for."""
        self.total, self._order, self._free = len(cores), list(cores), list(cores)
        asked = sorted((job.cores for job in jobs if job.cores is not None), reverse=True)
        here = f"this process may use {_counted(self.total)}"
        if asked and asked[0] > self.total:
            name = next(job.name for job in jobs if job.cores == asked[0])
            raise UsageError(f"Job `{name}` asks for {_counted(asked[0])}, but {here}; lower its `cores`.")
        if at_once > self.total:
            raise UsageError(
                f"{at_once} jobs at once need a core each, but {here}; run fewer at once with --at-once {self.total}."
            )
        # Whichever jobs run together, these are the largest requests that run at the same time as a job without one.
        requested = asked[: at_once - 1] if len(asked) < len(jobs) else asked[:at_once]
        left, slots = self.total - sum(requested), at_once - len(requested)
        if left < slots:
            needed = _counted(sum(requested) + slots)
            raise UsageError(
                f"{at_once} jobs at once need {needed}, but {here}; lower `cores`, or run fewer at once with --at-once."
            )
        self._shares = sorted((left // slots + (slot < left % slots) for slot in range(slots)), reverse=True)

    def take(self, job: Job) -> tuple[int, ...] | None:
        """The cores for a job that starts now; None if it has to wait for another one."""
        wanted = job.cores if job.cores is not None else self._shares[0] if self._shares else None
        if wanted is None or wanted > len(self._free):
            return None
        if job.cores is None:
            self._shares.pop(0)
        taken = tuple(self._free[:wanted])
        del self._free[:wanted]
        return taken

    def give_back(self, job: Job, cores: Sequence[int]) -> None:
        """`job` has ended."""
        self._free = sorted([*self._free, *cores], key=self._order.index)
        if job.cores is None:
            self._shares = sorted([*self._shares, len(cores)], reverse=True)


def _counted(cores: int) -> str:
    return f"{cores} core{'s' * (cores > 1)}"


def _position(core: int) -> tuple[int, int, int]:
    """Sorts cores by socket and physical core."""
    topology = _CPUS / f"cpu{core}" / "topology"
    return _number(topology / "physical_package_id"), _number(topology / "core_id"), core


def _number(path: Path) -> int:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return 0


def _busy_ticks() -> dict[int, int]:
    """Core → clock ticks in which it has worked since boot."""
    try:
        lines = [line.split() for line in _STAT.read_text().splitlines()]
    except OSError:
        return {}
    cores = (words for words in lines if words and words[0][:3] == "cpu" and words[0][3:].isdecimal())
    return {int(words[0][3:]): sum(map(int, words[1:4])) for words in cores}
