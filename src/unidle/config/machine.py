"""What this machine has to offer: the cores and memory that this process may really use."""

from __future__ import annotations

import os
from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup")


def available_cores() -> int:
    """Cores this process may use: the least of affinity mask, cgroup quota and SLURM's grant."""
    limits = [len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1]
    quota = _cgroup_quota(_CGROUP)
    if quota:
        limits.append(quota)
    slurm = os.environ.get("SLURM_CPUS_PER_TASK", "")
    if slurm.isdigit() and int(slurm) > 0:
        limits.append(int(slurm))
    return max(1, min(limits))


def _cgroup_quota(root: Path) -> int | None:
    """Whole cores granted by cgroup v2 or v1, at least one; None if there is no limit."""
    try:
        if (root / "cpu.max").exists():
            quota, period = (root / "cpu.max").read_text().split()[:2]
        else:
            quota = (root / "cpu/cpu.cfs_quota_us").read_text()
            period = (root / "cpu/cpu.cfs_period_us").read_text()
        if quota == "max" or int(quota) <= 0:
            return None
        return max(1, int(quota) // int(period))
    except (OSError, ValueError):
        return None


def available_memory() -> int:
    """Bytes of memory this machine or container has in all."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        limit = (_CGROUP / "memory.max").read_text().strip()
        return min(total, int(limit)) if limit != "max" else total
    except (OSError, ValueError):
        return total


def limit_threads() -> None:
    """One thread for OMP, MKL and OpenBLAS, here and in processes started from here."""
    # Call before NumPy and torch load: they read these variables once. What the user set is kept.
    for variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        os.environ.setdefault(variable, "1")
