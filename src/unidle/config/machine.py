"""The cores, memory and GPU that this process may use."""

from __future__ import annotations

import os
from collections.abc import MutableMapping
from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup")
_MEMBERSHIP = Path("/proc/self/cgroup")
_MEMORY = Path("/proc/meminfo")


def available_cores() -> int:
    """Cores this process may use: the minimum of affinity mask, cgroup quotas and SLURM allocation."""
    limits = [len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1]
    quota = cgroup_cores()
    if quota is not None:
        limits.append(int(quota))
    slurm = os.environ.get("SLURM_CPUS_PER_TASK", "")
    if slurm.isdecimal() and int(slurm) > 0:
        limits.append(int(slurm))
    return max(1, min(limits))


def cgroup_cores() -> float | None:
    """Cores' worth of CPU time that cgroup quotas allow; None without a quota."""
    limits = []
    for folder in _cgroups("cpu"):
        quota = _numbers(folder / "cpu.max")
        quota = quota or _numbers(folder / "cpu.cfs_quota_us") + _numbers(folder / "cpu.cfs_period_us")
        if len(quota) == 2:  # microseconds of CPU time per period, length of the period in microseconds
            limits.append(quota[0] / quota[1])
    return min(limits, default=None)


def available_memory() -> int:
    """Bytes of memory this process may use: the minimum of physical memory and cgroup limits."""
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for folder in _cgroups("memory"):
        limits += _numbers(folder / "memory.max") + _numbers(folder / "memory.limit_in_bytes")
    return min(limits)


def free_memory() -> int:
    """Bytes of memory still free, on the machine and in each cgroup; the page cache counts as free.

    Falls back to `available_memory` on systems that do not report it.
    """
    free = [available_memory()]
    free += [1024 * kibibytes for kibibytes in _entry(_MEMORY, "MemAvailable:")]
    for folder in _cgroups("memory"):
        limit = _numbers(folder / "memory.max") or _numbers(folder / "memory.limit_in_bytes")
        used = _numbers(folder / "memory.current") or _numbers(folder / "memory.usage_in_bytes")
        cached = _entry(folder / "memory.stat", "inactive_file") or [0]
        if limit and used:
            free.append(max(0, limit[0] - used[0] + cached[0]))
    return min(free)


def gpu_name() -> str | None:
    """The name of torch's first GPU; None without a GPU."""
    import torch  # takes seconds, so only when needed

    return torch.cuda.get_device_name() if torch.cuda.is_available() else None


def _cgroups(controller: str) -> list[Path]:
    """Folders whose limits apply to this process: its cgroup and all parents, in cgroup v2 and v1."""
    folders = [_CGROUP, _CGROUP / controller]
    try:
        lines = _MEMBERSHIP.read_text().splitlines()  # v2: `0::/path`; v1: `4:cpu,cpuacct:/path`
    except OSError:
        return folders
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers or controller in controllers.split(","):
            tree = _CGROUP / controller if controllers else _CGROUP
            own = tree / path.lstrip("/")
            folders += [folder for folder in (own, *own.parents) if tree in folder.parents]
    return folders


def _numbers(path: Path) -> list[int]:
    """The positive numbers in a file; empty if it cannot be read, or for `max` and -1, which mean no limit."""
    try:
        words = path.read_text().split()
    except OSError:
        return []
    return [int(word) for word in words if word.isdecimal() and int(word) > 0]


def _entry(path: Path, name: str) -> list[int]:
    """The number after `name` in a file of `name number` lines; empty if it is not there."""
    try:
        lines = [line.split() for line in path.read_text().splitlines()]
    except OSError:
        return []
    return [int(words[1]) for words in lines if words[:1] == [name]]


def limit_threads(environment: MutableMapping[str, str] | None = None) -> None:
    """Limit OpenMP, MKL and OpenBLAS to one thread, in this environment or in that of this process and its children."""
    # Call before NumPy and torch load: they read these variables once. The user's values take precedence.
    for variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        (os.environ if environment is None else environment).setdefault(variable, "1")
