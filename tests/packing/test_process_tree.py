"""What a process and those that it starts use."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

from unidle.packing.process_table import Process, descendants, open_files, process_table


def test_memory_and_time_of_a_child_are_its_own(tmp_path: Path) -> None:
    code = "import sys; kept = bytearray(100_000_000); sum(range(10**7)); print('ready', flush=True); sys.stdin.read()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        table = process_table()
        found = table[child.pid]
        assert found.parent == os.getpid()
        assert 100e6 < found.memory < 130e6
        assert found.cpu_seconds > 0.05
        assert child.pid in descendants(table, os.getpid())
        assert descendants(table, child.pid) == set()


def test_descendants_are_those_at_any_depth() -> None:
    table = {pid: Process(parent, 0.0, 0) for pid, parent in {1: 0, 2: 1, 3: 2, 4: 3, 5: 1, 9: 8}.items()}
    assert descendants(table, 2) == {3, 4}
    assert descendants(table, 1) == {2, 3, 4, 5}


def test_open_files_are_found_and_a_process_that_has_ended_has_none(tmp_path: Path) -> None:
    with (tmp_path / "metrics.jsonl").open("w"):
        assert tmp_path / "metrics.jsonl" in open_files(os.getpid())
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    time.sleep(0.01)
    assert open_files(child.pid) == []
