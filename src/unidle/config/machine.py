"""What this machine has to offer: the cores and memory that this process may really use."""

from __future__ import annotations

import os
from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup")
_MEMBERSHIP = Path("/proc/self/cgroup")
_MEMORY = Path("/proc/meminfo")


def available_cores() -> int:
    """Cores this process may use: the least of affinity mask, cgroup quotas and SLURM's grant."""
    limits = [len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1]
    for folder in _cgroups("cpu"):
        quota = _numbers(folder / "cpu.max")
        quota = quota or _numbers(folder / "cpu.cfs_quota_us") + _numbers(folder / "cpu.cfs_period_us")
        if len(quota) == 2:  # microseconds of work, on all cores together, per period of so many microseconds
            limits.append(quota[0] // quota[1])
    slurm = os.environ.get("SLURM_CPUS_PER_TASK", "")
    if slurm.isdigit() and int(slurm) > 0:
        limits.append(int(slurm))
    return max(1, min(limits))


def available_memory() -> int:
    """Bytes of memory this process may use: the least of the machine's and the cgroup limits."""
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for folder in _cgroups("memory"):
        limits += _numbers(folder / "memory.max") + _numbers(folder / "memory.limit_in_bytes")
    return min(limits)


def free_memory() -> int:
    """Bytes of memory that are still to be had: of the machine, and of each cgroup; files that are kept count as such.

    A system that does not tell has all that `available_memory` says.
    """
    free = [available_memory()]
    free += [1024 * kibibytes for kibibytes in _entry(_MEMORY, "MemAvailable:")]
    for folder in _cgroups("memory"):
        limit = _numbers(folder / "memory.max") or _numbers(folder / "memory.limit_in_bytes")
        used = _numbers(folder / "memory.current") or _numbers(folder / "memory.usage_in_bytes")
        kept = _entry(folder / "memory.stat", "inactive_file") or [0]
        if limit and used:
            free.append(max(0, limit[0] - used[0] + kept[0]))
    return min(free)


def gpu_name() -> str | None:
    """What torch's first GPU is called; None if it sees none."""
    import torch  # not before it is asked for: it takes seconds

    return torch.cuda.get_device_name() if torch.cuda.is_available() else None


def _cgroups(controller: str) -> list[Path]:
    """Folders whose limits bind this process: its cgroup and all above it, in the trees of cgroup v2 and v1."""
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
    """The positive numbers in a file; none if it cannot be read, and none for `max` and -1, which mean no limit."""
    try:
        words = path.read_text().split()
    except OSError:
        return []
    return [int(word) for word in words if word.isdecimal() and int(word) > 0]


def _entry(path: Path, name: str) -> list[int]:
    """The number behind a name in a file of `name number` lines; none if it is not there."""
    try:
        lines = [line.split() for line in path.read_text().splitlines()]
    except OSError:
        return []
    return [int(words[1]) for words in lines if words[:1] == [name]]


def limit_threads() -> None:
    """One thread for OMP, MKL and OpenBLAS, here and in processes started from here."""
    # Call before NumPy and torch load: they read these variables once. What the user set is kept.
    for variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        os.environ.setdefault(variable, "1")
