"""What a process and those that it starts use."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import psutil

from unidle.packing.process_tree import descendants, open_files, resources


def test_memory_and_time_of_a_child_are_its_own() -> None:
    code = "import sys; kept = bytearray(100_000_000); sum(range(10**7)); print('ready', flush=True); sys.stdin.read()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        assert child.pid in [process.pid for process in descendants(os.getpid())]
        cpu_seconds, memory = resources([psutil.Process(child.pid)])
        assert 100e6 < memory < 130e6
        assert cpu_seconds > 0.05
        assert descendants(child.pid) == []


def test_grandchildren_are_descendants_and_time_of_those_that_ended_counts() -> None:
    spin = "import time\nwhile time.process_time() < 0.3: pass"
    code = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {spin!r}]); print('over', flush=True); "
    code += "subprocess.run(['sleep', '60'], stdin=subprocess.DEVNULL)"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        while not (below := descendants(child.pid)):
            pass
        assert below[0].pid in [process.pid for process in descendants(os.getpid())]
        assert resources([psutil.Process(child.pid)])[0] > 0.25  # of the one that has ended
        for process in [*below, psutil.Process(child.pid)]:
            process.kill()


def test_open_files_are_found(tmp_path: Path) -> None:
    with (tmp_path / "metrics.jsonl").open("w"):
        assert tmp_path / "metrics.jsonl" in open_files(psutil.Process())


def test_process_that_has_ended_uses_nothing() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    process = psutil.Process(child.pid)
    child.communicate()
    assert open_files(process) == []
    assert descendants(child.pid) == []
    assert resources([process]) == (0.0, 0)
