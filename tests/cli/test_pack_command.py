"""`unidle pack` from the outside: real jobs, failures, signals, queueing, and what is left behind."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_mps import FakeMps
from processes import is_running, restore_sigint, wait_until

from unidle.report.dashboard.files import is_training

PACK = [sys.executable, "-m", "unidle", "pack"]


def python(code: str) -> list[str]:
    """A job that runs Python code."""
    return ["--", sys.executable, "-c", code]


# Writes its process id to the file NAME.pid, then sleeps.
SLEEPER = "import os, time; print(os.getpid(), file=open('NAME.pid', 'w'), flush=True); time.sleep(100)"
# The same, but ends on Ctrl-C with exit code 9 after writing NAME.saved: a trainer that saves.
SAVER = """
import os, signal, time
signals = []
signal.signal(signal.SIGINT, lambda number, _: signals.append(number))
print(os.getpid(), file=open('NAME.pid', 'w'), flush=True)
while not signals:
    time.sleep(0.01)
time.sleep(0.3)
print(len(signals), file=open('NAME.saved', 'w'), flush=True)
raise SystemExit(9)
"""
# A parent and a child that ignore everything but SIGKILL.
STUBBORN = """
import os, signal, subprocess, sys, time
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    signal.signal(number, signal.SIG_IGN)
code = "import os, time; print(os.getpid(), file=open('NAME-child.pid', 'w'), flush=True); time.sleep(100)"
subprocess.Popen([sys.executable, "-c", code])
print(os.getpid(), file=open('NAME.pid', 'w'), flush=True)
time.sleep(100)
"""


def named(code: str, name: str) -> list[str]:
    return python(code.replace("NAME", name))


def pid_in(path: Path) -> int:
    assert wait_until(lambda: path.exists() and path.read_text().endswith("\n")), path
    return int(path.read_text())


def finished(folder: Path, *argv: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """Run a pack to its end."""
    return subprocess.run(
        [*PACK, *argv], cwd=folder, env={**os.environ, **(env or {})}, capture_output=True, text=True, timeout=60
    )


def summary(folder: Path) -> dict[str, Any]:
    """The summary of the only pack in `folder`."""
    (path,) = folder.glob("packs/*/summary.json")
    found: dict[str, Any] = json.loads(path.read_text())
    return found


Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start a pack in an empty folder; it is ended after the test."""
    started: list[subprocess.Popen[str]] = []

    def start(*argv: str, env: dict[str, str] | None = None) -> subprocess.Popen[str]:
        streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        environment = {**os.environ, **(env or {})}
        command = [*PACK, *argv]
        started.append(
            subprocess.Popen(command, cwd=tmp_path, env=environment, preexec_fn=restore_sigint, **streams)  # type: ignore[call-overload]
        )
        return started[-1]

    yield start
    for each in started:
        each.kill()
        each.communicate()


# -- exit codes and output -------------------------------------------------------------------------------------------


def test_failed_job_leaves_the_others_running_and_gives_the_exit_code(tmp_path: Path) -> None:
    quick, slow = python("print('no data'); raise SystemExit(3)"), python("import time; time.sleep(1); print('done')")
    done = finished(tmp_path, "--json", *quick, *slow)
    assert done.returncode == 3
    assert "job-1 failed with code 3 after" in done.stderr
    assert "its output ends with: no data" in done.stderr
    result = json.loads(done.stdout)
    assert result == summary(tmp_path)
    assert [(job["state"], job["exit_code"]) for job in result["jobs"]] == [("failed", 3), ("finished", 0)]
    assert (tmp_path / result["jobs"][1]["output"]).read_text() == "done\n"
    assert result["exit_code"] == 3


def test_success_of_all_jobs_is_exit_code_0_and_a_closing_table(tmp_path: Path) -> None:
    done = finished(
        tmp_path, "--out", "out", *python("print('| fps | 123 |')"), *python("import time; time.sleep(0.1)")
    )
    assert done.returncode == 0, done.stderr
    assert re.search(r"job-1\s+finished\s+.* s\s+123\s.*out/job-1.log", done.stdout)
    assert "2 finished" in done.stdout
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        ".lock",
        "job-1.log",
        "job-2.log",
        "summary.json",
    ]


def test_job_that_a_signal_ends_is_reported_by_its_name(tmp_path: Path) -> None:
    done = finished(tmp_path, *python("import os; os.kill(os.getpid(), 9)"))
    assert done.returncode == 128 + 9
    assert "job-1 failed by SIGKILL" in done.stderr


def test_first_failure_in_time_gives_the_exit_code(tmp_path: Path) -> None:
    late, early = python("import time; time.sleep(1); raise SystemExit(4)"), python("raise SystemExit(5)")
    assert finished(tmp_path, *late, *early).returncode == 5


def test_jobs_of_a_file_have_their_own_cores_variables_and_folder(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    code = (
        "import os; print(sorted(os.sched_getaffinity(0)), os.environ['OMP_NUM_THREADS'], os.environ.get('X'), "
        "os.path.basename(os.getcwd()))"
    )
    jobs = {"command": [sys.executable, "-c", code], "cores": 1}
    first = {**jobs, "name": "first", "env": {"X": 1}, "cwd": "b"}
    second = {**jobs, "name": "second", "env": {"OMP_NUM_THREADS": 2}}
    (tmp_path / "jobs.yaml").write_text(json.dumps({"jobs": [first, second]}))
    env = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    done = subprocess.run([*PACK, "jobs.yaml", "--out", "out"], cwd=tmp_path, env=env, capture_output=True, timeout=60)
    assert done.returncode == 0, done.stderr
    one = re.fullmatch(r"\[(\d+)\] 1 1 b\n", (tmp_path / "out/first.log").read_text())
    two = re.fullmatch(rf"\[(\d+)\] 2 None {tmp_path.name}\n", (tmp_path / "out/second.log").read_text())
    assert one
    assert two
    assert one[1] != two[1]


def test_more_jobs_than_slots_take_turns(tmp_path: Path) -> None:
    code = "import time; open('log', 'a').write('start\\n'); time.sleep(0.2); open('log', 'a').write('end\\n')"
    done = finished(tmp_path, "--at-once", "1", *python(code), *python(code), *python(code))
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "log").read_text().split() == ["start", "end"] * 3
    assert "3 jobs, 1 at once" in done.stderr


def test_unidle_job_shows_its_speed_and_its_run_folder(tmp_path: Path) -> None:
    train = "--env CartPole-v1 --timesteps 12000 --eval-every 0 --run-name a"
    command = [sys.executable, "-m", "unidle", "train", *train.split()]
    done = finished(tmp_path, "--json", "--", *command)
    assert done.returncode == 0, done.stderr
    (job,) = json.loads(done.stdout)["jobs"]
    assert job["run"] == "runs/a"
    assert job["steps_per_second"] > 100
    assert job["most_memory"] > 50 * 2**20


# -- signals ---------------------------------------------------------------------------------------------------------


def test_ctrl_c_is_passed_on_once_and_waits_for_all_jobs(start: Start, tmp_path: Path) -> None:
    pack = start("--at-once", "2", *named(SAVER, "a"), *named(SAVER, "b"), *named(SLEEPER, "c"))
    pids = [pid_in(tmp_path / f"{name}.pid") for name in "ab"]
    pack.send_signal(signal.SIGINT)
    _, errors = pack.communicate(timeout=30)
    assert pack.returncode == 128 + signal.SIGINT
    assert [(tmp_path / f"{name}.saved").read_text() for name in "ab"] == ["1\n", "1\n"]
    assert not any(map(is_running, pids))
    assert not (tmp_path / "c.pid").exists()
    assert "Stopping 2 jobs (Ctrl-C again: end them immediately)." in errors
    states = [(job["state"], job["exit_code"]) for job in summary(tmp_path)["jobs"]]
    assert states == [("stopped", 9), ("stopped", 9), ("not started", None)]


def test_sigterm_is_passed_on(start: Start, tmp_path: Path) -> None:
    pack = start(*named(SLEEPER, "a"))
    pid = pid_in(tmp_path / "a.pid")
    pack.terminate()
    pack.communicate(timeout=30)
    assert pack.returncode == 128 + signal.SIGTERM
    assert not is_running(pid)
    assert summary(tmp_path)["jobs"][0]["exit_code"] == 128 + signal.SIGTERM


def test_third_ctrl_c_kills_what_ignores_the_others(start: Start, tmp_path: Path) -> None:
    pack = start(*named(STUBBORN, "a"))
    pids = pid_in(tmp_path / "a.pid"), pid_in(tmp_path / "a-child.pid")
    began = time.monotonic()
    for _ in range(3):
        pack.send_signal(signal.SIGINT)
        time.sleep(0.4)
    pack.communicate(timeout=30)
    assert pack.returncode == 128 + signal.SIGINT
    assert time.monotonic() - began < 5  # seconds after the second, without the third
    assert not any(map(is_running, pids))


def test_no_process_is_left_when_pack_is_killed(start: Start, tmp_path: Path) -> None:
    pack = start(*named(STUBBORN, "a"), *named(SLEEPER, "b"))
    pids = [pid_in(tmp_path / f"{name}.pid") for name in ("a", "a-child", "b")]
    (folder,) = tmp_path.glob("packs/*")
    assert is_training(folder)  # the dashboard shows it as running
    pack.kill()
    pack.wait()
    assert not is_training(folder)
    assert wait_until(lambda: not any(map(is_running, pids)))


# -- NVIDIA MPS ------------------------------------------------------------------------------------------------------


@pytest.fixture
def fake_mps(tmp_path: Path, fake_driver: Callable[..., dict[str, str]]) -> tuple[FakeMps, dict[str, str]]:
    """The stand-in for MPS, and an environment with it and a fake GPU."""
    fake = FakeMps(tmp_path)
    env = {**fake_driver(), **fake.environment}
    env.pop("CUDA_MPS_PIPE_DIRECTORY", None)
    return fake, env


ENVIRONMENT = "import os; print(os.environ.get('CUDA_MPS_PIPE_DIRECTORY'))"


def test_jobs_run_under_a_private_mps_daemon_that_ends_with_them(
    tmp_path: Path, fake_mps: tuple[FakeMps, dict[str, str]]
) -> None:
    fake, env = fake_mps
    done = finished(tmp_path, "--out", "out", *python(ENVIRONMENT), env=env)
    assert done.returncode == 0, done.stderr
    pipes = (tmp_path / "out/job-1.log").read_text().strip()
    assert fake.calls[0].startswith(f"start {pipes} ")
    assert fake.calls[-1] == "ended"
    assert not Path(pipes).exists()
    assert json.loads((tmp_path / "out/summary.json").read_text())["mps"] == "on"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_mps_daemon_ends_however_the_pack_ends(
    start: Start, tmp_path: Path, fake_mps: tuple[FakeMps, dict[str, str]], number: int
) -> None:
    fake, env = fake_mps
    pack = start(*named(SLEEPER, "a"), env=env)
    job = pid_in(tmp_path / "a.pid")
    daemon = int((Path(fake.calls[0].split()[1]) / "pid").read_text())
    pack.send_signal(number)
    pack.communicate(timeout=30)
    assert wait_until(lambda: not is_running(daemon) and not is_running(job))
    assert ("ended" in fake.calls) == (number != signal.SIGKILL)  # else it was not asked but ended by a signal


def test_no_mps_starts_none(tmp_path: Path, fake_mps: tuple[FakeMps, dict[str, str]]) -> None:
    fake, env = fake_mps
    done = finished(tmp_path, "--no-mps", "--out", "out", *python(ENVIRONMENT), env=env)
    assert done.returncode == 0
    assert fake.calls == []
    assert (tmp_path / "out/job-1.log").read_text() == "None\n"
    assert "NVIDIA MPS off: --no-mps" in done.stderr


# -- mistakes --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("argv", "sentence"),
    [
        ([], "There are no jobs; use: unidle pack jobs.yaml, or unidle pack -- python a.py -- python b.py."),
        (["jobs.yaml", "--", "true"], "There are both a file and commands; use: unidle pack jobs.yaml, or"),
        (["none.yaml"], "There is no file none.yaml; check the path."),
        (["--", "no-such-program"], "Job `job-1`: program `no-such-program` not found; check the command"),
        (["--", "true", "--"], "There is no command after a `--`"),
        (["--at-once", "0", "--", "true"], "--at-once 0 is too few; run at least 1 job at once."),
        (["--out", "full", "--", "true"], "The folder full is not empty; choose another --out."),
        (["--out", "full/file", "--", "true"], "The folder full/file cannot be created (File exists)"),
    ],
)
def test_mistake_is_one_sentence_and_nothing_is_written(tmp_path: Path, argv: list[str], sentence: str) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full/file").touch()
    done = finished(tmp_path, *argv)
    assert done.returncode == 2
    assert done.stderr.startswith(f"unidle: {sentence}")
    assert done.stderr.count("\n") == 1
    assert not (tmp_path / "packs").exists()


def test_more_jobs_than_cores_are_refused(tmp_path: Path) -> None:
    cores = len(os.sched_getaffinity(0))
    done = finished(tmp_path, *["--", "true"] * (cores + 1))
    assert done.returncode == 2
    assert f"{cores + 1} jobs at once need a core each" in done.stderr


def test_too_much_gpu_memory_is_refused_before_the_start(
    tmp_path: Path, fake_driver: Callable[..., dict[str, str]]
) -> None:
    jobs = [{"name": name, "command": "touch started", "gpu_memory": 4} for name in "ab"]
    (tmp_path / "jobs.yaml").write_text(json.dumps({"jobs": jobs}))
    done = finished(tmp_path, "jobs.yaml", env=fake_driver())  # 6 of 8 GiB are free
    assert done.returncode == 2
    sentence = (
        "2 jobs at once need up to 8.00 GiB of GPU memory, but 6.00 GiB are free; run fewer at once with --at-once 1."
    )
    assert sentence in done.stderr
    assert not (tmp_path / "started").exists()
    assert finished(tmp_path, "jobs.yaml", "--at-once", "1", env=fake_driver()).returncode == 0


# -- the terminal ----------------------------------------------------------------------------------------------------


def test_terminal_shows_one_live_table(tmp_path: Path) -> None:
    terminal, theirs = pty.openpty()
    code = "import time; print('| fps | 77 |', flush=True); time.sleep(2.5); print('end of it')"
    env = {**os.environ, "TERM": "xterm", "COLUMNS": "120", "LINES": "40"}
    pack = subprocess.Popen([*PACK, *python(code)], cwd=tmp_path, env=env, stdin=theirs, stdout=theirs, stderr=theirs)
    os.close(theirs)
    shown = b""
    while select.select([terminal], [], [], 30)[0]:
        try:
            shown += os.read(terminal, 65536)
        except OSError:  # the other end is closed
            break
    os.close(terminal)
    assert pack.wait() == 0
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown.decode())
    assert re.search(r"job-1\s+running\s+\S+ s\s+77\s+\S+ of \d+\s+\S+ GiB\s+–\s+\| fps \| 77 \|", text)
    assert re.search(r"job-1\s+finished\s+\S+ s\s+77 ", text)
    assert "\x1b[?25l" not in shown.decode().rpartition("\x1b[?25h")[2]  # the cursor is shown at the end
