"""A supervised command: none of its processes outlives it, its supervisor or the process that started it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from processes import is_running, wait_until

from unidle.packing.supervised import StartError, SupervisedProcess

Start = Callable[..., SupervisedProcess]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start `python -c code` in an empty folder; it is ended after the test."""
    started: list[SupervisedProcess] = []

    def start(code: str, cores: tuple[int, ...] = ()) -> SupervisedProcess:
        output = tmp_path / f"output-{len(started)}.txt"
        started.append(
            SupervisedProcess([sys.executable, "-c", code], cwd=tmp_path, env=os.environ, output=output, cores=cores)
        )
        return started[-1]

    yield start
    for each in started:
        each.close()


def pid_in(path: Path) -> int:
    """The process id that a process writes to `path`."""
    assert wait_until(lambda: path.exists() and path.read_text().endswith("\n"))
    return int(path.read_text())


# Starts a process in a session of its own, as a daemon does, whose parent then exits; its id is in daemon.pid.
DAEMON = """
import os, subprocess, sys
code = "import os, time; print(os.getpid(), file=open('daemon.pid', 'w'), flush=True); time.sleep(100)"
subprocess.Popen([sys.executable, "-c", code], start_new_session=True)
"""


def test_output_exit_code_and_cores_are_those_of_the_command(start: Start, tmp_path: Path) -> None:
    core = min(os.sched_getaffinity(0))
    process = start("import os, sys; print(os.sched_getaffinity(0)); print('x', file=sys.stderr); sys.exit(3)", (core,))
    assert process.wait(20) == 3
    assert sorted((tmp_path / "output-0.txt").read_text().split("\n")) == ["", "x", f"{{{core}}}"]


def test_signal_that_ends_the_command_is_its_status(start: Start) -> None:
    process = start("import time; time.sleep(100)")
    assert process.poll() is None
    process.send(signal.SIGUSR1)
    assert process.wait(20) == -signal.SIGUSR1


def test_command_can_stop_on_ctrl_c_even_if_it_is_ignored_here(start: Start, tmp_path: Path) -> None:
    code = """
import time
try:
    open("ready", "w").close()
    time.sleep(100)
except KeyboardInterrupt:
    raise SystemExit(7)
"""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        process = start(code)
    finally:
        signal.signal(signal.SIGINT, before)
    assert wait_until((tmp_path / "ready").exists)
    process.send(signal.SIGINT)
    assert process.wait(20) == 7


def test_program_that_cannot_run_says_why(tmp_path: Path) -> None:
    with pytest.raises(StartError, match="No such file or directory"):
        SupervisedProcess(["no-such-program"], cwd=tmp_path, env=os.environ, output=tmp_path / "output.txt")


def test_daemon_of_a_command_ends_soon_after_it(start: Start, tmp_path: Path) -> None:
    process = start(DAEMON + "while not os.path.exists('daemon.pid'): pass")
    daemon = pid_in(tmp_path / "daemon.pid")
    assert process.wait(20) == 0
    assert not is_running(daemon)


def test_kill_ends_every_process_at_once(start: Start, tmp_path: Path) -> None:
    ignore = "import signal\nfor number in (2, 15): signal.signal(number, signal.SIG_IGN)\n"
    process = start(ignore + DAEMON + "import time; time.sleep(100)")
    daemon = pid_in(tmp_path / "daemon.pid")
    process.send(signal.SIGTERM)
    assert process.wait(0.3) is None
    process.send(signal.SIGKILL)
    assert process.wait(20) == -signal.SIGKILL
    assert not is_running(daemon)


def test_command_ends_if_its_supervisor_is_killed(start: Start) -> None:
    process = start("import time; time.sleep(100)")
    os.kill(process.supervisor_pid, signal.SIGKILL)
    assert wait_until(lambda: not is_running(process.pid))
    assert process.wait(20) == -signal.SIGKILL


PARENT = """
import os, signal, sys, time
from pathlib import Path
from unidle.packing.supervised import SupervisedProcess
folder = Path(sys.argv[1])
command = [sys.executable, "-c", sys.argv[2]]
process = SupervisedProcess(command, cwd=folder, env=os.environ, output=folder / "output.txt")
(folder / "command.pid").write_text(f"{process.pid}\\n")
time.sleep(100)
"""


@pytest.mark.parametrize("ignores", [False, True], ids=["obeys", "ignores SIGTERM"])
def test_all_processes_end_if_the_one_that_started_them_is_killed(tmp_path: Path, ignores: bool) -> None:
    code = "import signal, time\n" + "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n" * ignores + DAEMON
    parent = subprocess.Popen([sys.executable, "-c", PARENT, str(tmp_path), code + "time.sleep(100)"])
    try:
        pids = pid_in(tmp_path / "command.pid"), pid_in(tmp_path / "daemon.pid")
    finally:
        parent.kill()
        parent.wait()
    killed = time.monotonic()
    assert wait_until(lambda: not any(map(is_running, pids)))
    if not ignores:
        assert time.monotonic() - killed < 4  # it was asked, and did not have to be killed
