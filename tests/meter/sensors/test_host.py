"""Host readings against processes with known CPU use."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator

import psutil
import pytest

from unidle.errors import UsageError
from unidle.meter.sensors.host import Busiest, Host, Tree

# A parent that sleeps, and a child that uses a full core and prints a line when it starts.
FAMILY = """
import subprocess, sys, time
burn = "print('burning', flush=True)\\nwhile True: pass"
child = subprocess.Popen([sys.executable, "-c", burn])
try:
    time.sleep(60)
finally:
    child.kill()
"""


@pytest.fixture(scope="module")
def family() -> Iterator[int]:
    process = subprocess.Popen([sys.executable, "-c", FAMILY], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "burning\n"
    members = psutil.Process(process.pid).children(recursive=True)
    yield process.pid
    for member in [*members, process]:
        member.kill()
    process.communicate()


def test_host_reads_cores_and_memory(family: int) -> None:
    host = Host()
    time.sleep(0.5)
    found = host.poll()
    assert list(host.core_names) == [f"core {core}" for core in sorted(os.sched_getaffinity(0))]
    assert {"cpu", "memory", *host.core_names} <= found.keys()
    assert found.keys() <= {reading.name for reading in host.readings}
    for name in ("cpu", *host.core_names):
        assert all(0 <= sample.value <= 100 for sample in found[name])
    assert found["cpu"][0].value > 50 / len(host.cores)  # one core is busy; the others may be too
    total = next(reading.full for reading in host.readings if reading.name == "memory")
    assert total is not None
    assert 0 < found["memory"][0].value < total


def test_immediate_second_poll_has_no_cpu_reading() -> None:
    host = Host()
    assert "cpu" not in host.poll()
    time.sleep(0.2)
    assert "cpu" in host.poll()
    assert "cpu" not in host.poll()


def test_unknown_core_numbers_are_omitted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {10_000, 10_001})
    host = Host()
    time.sleep(0.2)
    assert host.poll().keys() == {"memory"}


def test_process_tree_scan_is_rate_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    tree, scans = Tree(os.getpid()), list[int]()
    use = tree._use
    monkeypatch.setattr(tree, "_use", lambda: scans.append(1) or use())
    began = time.perf_counter()
    while time.perf_counter() < began + 0.5:
        tree.poll()
    tree.poll()
    assert 1 <= len(scans) <= 6


def test_process_tree_includes_children(family: int) -> None:
    tree = Tree(family)
    time.sleep(1)
    found = tree.poll()
    assert found["processes"][0].value == 2
    assert 0.02 < found["cpu"][0].value < 1.3  # less than 1 if other processes use the core too
    assert found["memory"][0].value > 0.005
    assert "subprocess" in tree.command


def test_cpu_time_of_finished_child_is_counted() -> None:
    half_a_second = "import time\nend = time.process_time() + 0.5\nwhile time.process_time() < end: pass"
    tree = Tree(os.getpid())
    began = time.perf_counter()
    subprocess.run([sys.executable, "-c", half_a_second], check=True)
    found = tree.poll()
    assert found["cpu"][0].value * (time.perf_counter() - began) >= 0.45


def test_finished_process_tree_has_no_readings() -> None:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    tree = Tree(process.pid)
    process.communicate(b"\n")
    assert tree.poll() == {}
    assert tree.command == "ended"


def test_missing_process_raises_usage_error() -> None:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    for pid in (process.pid, -1):
        with pytest.raises(UsageError, match=rf"There is no process {pid}; "):
            Tree(pid)


def test_busiest_processes_are_updated_once_a_second(family: int) -> None:
    now_ns = [0]
    busiest = Busiest(50, lambda: now_ns[0])
    assert busiest.poll()
    assert busiest.processes == []  # needs two polls
    time.sleep(0.5)
    now_ns[0] = 500_000_000
    assert not busiest.poll()
    now_ns[0] = 1_000_000_000
    assert busiest.poll()
    (child,) = psutil.Process(family).children()
    found = {process.pid: process for process in busiest.processes}
    assert found[child.pid].cores > 0
    assert family not in found
    assert [p.cores for p in busiest.processes] == sorted((p.cores for p in busiest.processes), reverse=True)
