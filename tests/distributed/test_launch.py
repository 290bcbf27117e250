"""Starting and ending ranks."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from processes import is_running, restore_sigint, wait_until
from torch._C._distributed_c10d import TCPStore

from unidle.distributed.launch import _store, launch

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
    assert said == ["Rank 1 was killed by SIGKILL; stopping the other ranks."]


def test_only_rank_0_prints(tmp_path: Path) -> None:
    script = (
        f"from unidle.distributed.launch import launch\n"
        f"launch([{sys.executable!r}, '-c', 'import os; print(os.environ[\"RANK\"])'], 3, print)"
    )
    printed = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    assert printed.split() == ["0"]


RECORDS_SIGNALS = """
import signal
def got(number, _):
    with open(sys.argv[1] + '/got' + r, 'a') as file:
        print(signal.Signals(number).name, file=file)
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
    signal.signal(number, got)
pathlib.Path(sys.argv[1], 'ready' + r).touch()
until = time.monotonic() + 60
while time.monotonic() < until and not os.path.exists(sys.argv[1] + '/end'):
    time.sleep(0.02)
sys.exit(128 + signal.SIGUSR1)
"""


def started(folder: Path) -> subprocess.Popen[bytes]:
    """A launcher of two ranks that note the signals they get, and end when there is a file `end`."""
    script = (
        "import sys\nfrom unidle.distributed.launch import launch\n"
        f"sys.exit(launch([sys.executable, '-c', {WRITES_PID + RECORDS_SIGNALS!r}, {str(folder)!r}], 2, print))"
    )
    process = subprocess.Popen([sys.executable, "-c", script], preexec_fn=restore_sigint)
    assert wait_until(lambda: all((folder / f"ready{rank}").exists() for rank in range(2)))
    return process


def received(folder: Path) -> list[list[str]]:
    files = [folder / f"got{rank}" for rank in range(2)]
    return [file.read_text().split() if file.exists() else [] for file in files]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1])
def test_first_signal_reaches_every_rank_once_as_one_that_never_ends_it_at_once(
    number: signal.Signals, tmp_path: Path
) -> None:
    process = started(tmp_path)
    process.send_signal(number)
    assert wait_until(lambda: all(received(tmp_path)))
    (tmp_path / "end").touch()
    assert process.wait(20) == 128 + number
    assert received(tmp_path) == [["SIGUSR1"], ["SIGUSR1"]]


def test_sigterm_after_sigusr1_as_slurm_sends_it_is_not_passed_on(tmp_path: Path) -> None:
    process = started(tmp_path)
    process.send_signal(signal.SIGUSR1)
    assert wait_until(lambda: all(received(tmp_path)))
    process.send_signal(signal.SIGTERM)
    time.sleep(0.3)
    (tmp_path / "end").touch()
    assert process.wait(20) == 128 + signal.SIGUSR1
    assert received(tmp_path) == [["SIGUSR1"], ["SIGUSR1"]]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_that_comes_again_is_passed_on_and_ends_ranks_that_go_on(number: signal.Signals, tmp_path: Path) -> None:
    process = started(tmp_path)
    process.send_signal(number)
    assert wait_until(lambda: all(received(tmp_path)))
    process.send_signal(number)
    assert process.wait(20) == 128 + number
    assert received(tmp_path) == [["SIGUSR1", number.name]] * 2
    assert not any(is_running(int((tmp_path / str(rank)).read_text())) for rank in range(2))


def test_store_is_reachable_from_this_machine_only(tmp_path: Path) -> None:
    store = _store()
    rows = [row.split() for name in ("tcp", "tcp6") for row in Path("/proc/net", name).read_text().splitlines()[1:]]
    listening = {row[1] for row in rows if row[3] == "0A"}
    port = f"{store.port:04X}"
    assert [address for address in listening if address.endswith(f":{port}")] == [f"0100007F:{port}"]  # 127.0.0.1
    store.set("key", "value")
    assert TCPStore("127.0.0.1", store.port, is_master=False).get("key") == b"value"


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
