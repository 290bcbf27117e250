"""Starting and ending ranks."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from processes import is_running, restore_sigint, wait_until

from unidle.distributed.launch import launch

WRITES_PID = (
    "import os, sys, time, pathlib; r = os.environ['RANK']; pathlib.Path(sys.argv[1], r).write_text(str(os.getpid()))"
)


def run(code: str, folder: Path, size: int = 2, grace: float = 0.5) -> tuple[int, list[str]]:
    said: list[str] = []
    return launch([sys.executable, "-c", f"{WRITES_PID}\n{code}", str(folder)], size, said.append, grace), said


def pids(folder: Path) -> list[int]:
    return [int(file.read_text()) for file in folder.iterdir() if file.read_text()]


def test_all_ranks_that_succeed_are_success(tmp_path: Path) -> None:
    assert run("", tmp_path, 3) == (0, [])
    assert len(pids(tmp_path)) == 3


def test_code_of_rank_that_failed_is_returned_and_no_rank_is_left(tmp_path: Path) -> None:
    began = time.monotonic()
    code, said = run("sys.exit(7) if r == '1' else time.sleep(60)", tmp_path)
    assert (code, said) == (7, [])
    assert time.monotonic() - began < 10
    assert not any(is_running(pid) for pid in pids(tmp_path))


def test_code_of_rank_0_counts_if_it_failed_too(tmp_path: Path) -> None:
    code, _ = run("sys.exit(7) if r == '1' else (time.sleep(0.2), sys.exit(2))", tmp_path, grace=20)
    assert code == 2


def test_killed_rank_is_named(tmp_path: Path) -> None:
    code, said = run("os.kill(os.getpid(), 9) if r == '1' else time.sleep(60)", tmp_path)
    assert code == 128 + signal.SIGKILL
    assert said == ["Rank 1 was ended by SIGKILL; the other ranks end too."]


def test_only_rank_0_prints(tmp_path: Path) -> None:
    script = (
        f"from unidle.distributed.launch import launch\n"
        f"launch([{sys.executable!r}, '-c', 'import os; print(os.environ[\"RANK\"])'], 3, print)"
    )
    printed = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    assert printed.split() == ["0"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_reaches_every_rank_once(number: signal.Signals, tmp_path: Path) -> None:
    code = (
        "import signal\n"
        "got = lambda *_: open(sys.argv[1] + '/got' + r, 'a').write('x') and sys.exit(0)\n"
        "signal.signal(int(os.environ['NUMBER']), got)\n"
        "pathlib.Path(sys.argv[1], 'ready' + r).touch()\n"
        "time.sleep(60)"
    )
    script = (
        "import sys\nfrom unidle.distributed.launch import launch\n"
        f"sys.exit(launch([sys.executable, '-c', {WRITES_PID + chr(10) + code!r}, {str(tmp_path)!r}], 2, print))"
    )
    environment = {**os.environ, "NUMBER": str(int(number))}
    process = subprocess.Popen([sys.executable, "-c", script], env=environment, preexec_fn=restore_sigint)
    assert wait_until(lambda: all((tmp_path / f"ready{rank}").exists() for rank in range(2)))
    process.send_signal(number)
    assert process.wait(20) == 0
    assert [(tmp_path / f"got{rank}").read_text() for rank in range(2)] == ["x", "x"]


def test_ranks_end_with_their_launcher(tmp_path: Path) -> None:
    script = (
        "import sys\nfrom unidle.distributed.launch import launch\n"
        f"launch([sys.executable, '-c', {WRITES_PID + chr(10) + 'time.sleep(60)'!r}, {str(tmp_path)!r}], 2, print)"
    )
    process = subprocess.Popen([sys.executable, "-c", script])
    assert wait_until(lambda: len(pids(tmp_path)) == 2)
    process.kill()
    process.wait()
    assert wait_until(lambda: not any(is_running(pid) for pid in pids(tmp_path)))


def test_handlers_of_this_process_are_as_before(tmp_path: Path) -> None:
    assert threading.current_thread() is threading.main_thread()
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    run("", tmp_path)
    assert {number: signal.getsignal(number) for number in before} == before
