"""Cores and memory that are available to this process: affinity, cgroups and SLURM."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from unidle.config import machine


@pytest.fixture
def cgroup(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cgroup folder, eight cores by affinity, and no SLURM."""
    monkeypatch.setattr(machine, "_CGROUP", tmp_path)
    monkeypatch.setattr(machine, "_MEMBERSHIP", tmp_path / "membership")
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)
    monkeypatch.delenv("SLURM_CPUS_PER_TASK", raising=False)
    return tmp_path


def write_v1(cgroup: Path, quota: int, period: int, path: str = "") -> None:
    folder = cgroup / "cpu" / path
    folder.mkdir()
    (folder / "cpu.cfs_quota_us").write_text(f"{quota}\n")
    (folder / "cpu.cfs_period_us").write_text(f"{period}\n")


def test_affinity_mask_limits_cores(cgroup: Path) -> None:
    assert machine.available_cores() == 8


@pytest.mark.parametrize(
    ("line", "cores"),
    [
        ("300000 100000", 3),
        ("250000 100000", 2),
        ("50000 100000", 1),  # half a core is still one process
        ("1600000 100000", 8),
        ("max 100000", 8),
        ("nonsense", 8),
        ("", 8),
    ],
)
def test_cgroup_v2_quota_limits_cores(cgroup: Path, line: str, cores: int) -> None:
    (cgroup / "cpu.max").write_text(line + "\n")
    assert machine.available_cores() == cores


@pytest.mark.parametrize(("quota", "cores"), [(400_000, 4), (50_000, 1), (-1, 8)])
def test_cgroup_v1_quota_limits_cores(cgroup: Path, quota: int, cores: int) -> None:
    write_v1(cgroup, quota, 100_000)
    assert machine.available_cores() == cores


@pytest.mark.parametrize(
    ("own", "parent", "root", "cores"),
    [(3, 5, 7, 3), (5, 3, 7, 3), (5, 7, 3, 3), (None, 4, None, 4), (None,) * 3 + (8,)],
)
def test_smallest_quota_of_cgroup_and_its_parents_limits_cores(
    cgroup: Path, own: int | None, parent: int | None, root: int | None, cores: int
) -> None:
    (cgroup / "membership").write_text("0::/system.slice/job.scope\n")
    (cgroup / "system.slice/job.scope").mkdir(parents=True)
    for folder, quota in (("system.slice/job.scope", own), ("system.slice", parent), (".", root)):
        (cgroup / folder / "cpu.max").write_text(f"{quota * 100_000 if quota else 'max'} 100000\n")
    assert machine.available_cores() == cores


def test_limits_of_other_cgroups_are_ignored(cgroup: Path) -> None:
    (cgroup / "membership").write_text("0::/mine\n")
    (cgroup / "other").mkdir()
    (cgroup / "other/cpu.max").write_text("100000 100000\n")
    (cgroup / "other/memory.max").write_text("1\n")
    assert machine.available_cores() == 8
    assert machine.available_memory() > 1


def test_cgroup_of_process_is_found_in_v1_hierarchies(cgroup: Path) -> None:
    (cgroup / "membership").write_text("4:memory:/job\n3:cpu,cpuacct:/job\n1:name=systemd:/elsewhere\n0::/\n")
    write_v1(cgroup, -1, 100_000)
    write_v1(cgroup, 200_000, 100_000, "job")
    (cgroup / "memory/job").mkdir(parents=True)
    (cgroup / "memory/memory.limit_in_bytes").write_text("9223372036854771712\n")  # no limit, in cgroup v1
    (cgroup / "memory/job/memory.limit_in_bytes").write_text(f"{2**20}\n")
    assert machine.available_cores() == 2
    assert machine.available_memory() == 2**20


def test_root_cgroup_is_used_if_own_path_is_outside_container(cgroup: Path) -> None:
    (cgroup / "membership").write_text("0::/../../docker/abc\n")
    (cgroup / "cpu.max").write_text("300000 100000\n")
    assert machine.available_cores() == 3


@pytest.mark.parametrize(("allocated", "cores"), [("4", 4), ("64", 8), ("0", 8), ("x", 8), ("", 8)])
def test_slurm_allocation_limits_cores(
    cgroup: Path, monkeypatch: pytest.MonkeyPatch, allocated: str, cores: int
) -> None:
    monkeypatch.setenv("SLURM_CPUS_PER_TASK", allocated)
    assert machine.available_cores() == cores


def test_smallest_of_all_limits_applies(cgroup: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (cgroup / "cpu.max").write_text("600000 100000\n")
    monkeypatch.setenv("SLURM_CPUS_PER_TASK", "5")
    assert machine.available_cores() == 5
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 3}, raising=False)
    assert machine.available_cores() == 2


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="no affinity on this system")
def test_process_pinned_to_one_core_has_one_core() -> None:
    code = (
        "import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))});"
        "from unidle.config.machine import available_cores; print(available_cores())"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "1"


def test_container_limit_limits_memory(cgroup: Path) -> None:
    total = machine.available_memory()
    assert total > 2**20
    (cgroup / "memory.max").write_text(f"{2**20}\n")
    assert machine.available_memory() == 2**20
    (cgroup / "memory.max").write_text("max\n")
    assert machine.available_memory() == total
    (cgroup / "memory.max").write_text(f"{total * 2}\n")
    assert machine.available_memory() == total


def test_smallest_limit_of_parent_cgroups_limits_memory(cgroup: Path) -> None:
    (cgroup / "membership").write_text("0::/a/b\n")
    (cgroup / "a/b").mkdir(parents=True)
    (cgroup / "a/b/memory.max").write_text("max\n")
    (cgroup / "a/memory.max").write_text(f"{2**20}\n")
    (cgroup / "memory.max").write_text(f"{2**21}\n")
    assert machine.available_memory() == 2**20


def test_free_memory_is_minimum_of_machine_and_cgroup(cgroup: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_MEMORY", cgroup / "meminfo")
    assert machine.free_memory() == machine.available_memory()  # no /proc/meminfo
    (cgroup / "meminfo").write_text("MemTotal:  4096 kB\nMemFree:  1 kB\nMemAvailable:  3072 kB\n")
    assert machine.free_memory() == 3 * 2**20
    (cgroup / "memory.max").write_text(f"{4 * 2**20}\n")
    (cgroup / "memory.current").write_text(f"{3 * 2**20}\n")
    assert machine.free_memory() == 2**20
    (cgroup / "memory.stat").write_text(f"anon 5\ninactive_file {2**20}\n")  # page cache that can be reclaimed
    assert machine.free_memory() == 2 * 2**20
    (cgroup / "memory.max").write_text("max\n")
    assert machine.free_memory() == 3 * 2**20


def test_free_memory_uses_cgroup_v1_limits(cgroup: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_MEMORY", cgroup / "meminfo")
    (cgroup / "memory").mkdir()
    (cgroup / "memory/memory.limit_in_bytes").write_text(f"{4 * 2**20}\n")
    (cgroup / "memory/memory.usage_in_bytes").write_text(f"{5 * 2**20}\n")
    assert machine.free_memory() == 0


def test_threads_of_another_environment_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", {})
    environment = {"OMP_NUM_THREADS": "2"}
    machine.limit_threads(environment)
    assert environment == {"OMP_NUM_THREADS": "2", "MKL_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    assert os.environ == {}


def test_threads_are_limited_to_one_unless_user_sets_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    environ = {"MKL_NUM_THREADS": "4"}
    monkeypatch.setattr(os, "environ", environ)
    machine.limit_threads()
    assert environ == {
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "4",
        "OPENBLAS_NUM_THREADS": "1",
    }
