"""How busy a run's GPU was, and how full, from the lines of its `meter.jsonl`."""

from __future__ import annotations

from pathlib import Path

from unidle.formatting import figure, percent
from unidle.meter.attribution.run_meter import FILE
from unidle.metrics.jsonl import read_records
from unidle.report.history import Record, number

_GIB = 2**30
_REST = "unattributed"


class GpuUse:
    """Mean busy share and latest memory use; without lines of a GPU, nothing is known."""

    def __init__(self) -> None:
        self._seconds = self._busy = 0.0
        self._memory: str | None = None

    def add(self, line: Record) -> None:
        """Add a line of `meter.jsonl`; it stands for all the time since the previous one."""
        gpu, readings, covered = line.get("gpu"), line.get("readings"), number(line, "covered")
        busy = number(gpu, "busy") if isinstance(gpu, dict) else None
        if busy is not None and covered is not None:
            self._seconds += covered
            self._busy += covered * busy
        if isinstance(readings, dict) and (used := number(readings, "memory_bytes")) is not None:
            total = number(readings, "memory_total_bytes")
            of_total = "" if total is None else f" of {figure(total / _GIB)}"
            self._memory = f"memory {figure(used / _GIB)}{of_total} GiB"

    @property
    def text(self) -> str | None:
        """Both as text: busy 35 %   memory 12.3 of 140 GiB; None if nothing is known."""
        busy = f"busy {percent(self._busy / self._seconds)}" if self._seconds else None
        return "   ".join(filter(None, [busy, self._memory])) or None


def read_gpu_use(folder: Path) -> GpuUse:
    """Read the GPU use of a whole run from its folder."""
    use = GpuUse()
    for line in read_records(folder / FILE):
        use.add(line)
    return use


def read_gpu_shares(folder: Path) -> dict[str, float] | None:
    """Read what share of a run's time its GPU was busy, or idle and why; they sum to 1. None without a GPU."""
    shares: dict[str, float] = {}
    for line in read_records(folder / FILE):
        gpu, covered = line.get("gpu"), number(line, "covered")
        if not isinstance(gpu, dict) or covered is None:
            continue
        idle = gpu.get("idle")
        known = {"busy": gpu.get("busy"), **(idle if isinstance(idle, dict) else {}), _REST: gpu.get(_REST)}
        for name in known:
            shares[name] = shares.get(name, 0.0) + covered * (number(known, name) or 0.0)
    total = sum(shares.values())
    return {name: share / total for name, share in shares.items()} if total > 0 else None
