"""`unidle watch` with real commands."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

PROGRAM = [sys.executable, "-m", "unidle", "watch"]
# Ignores CPU use by other programs: a planted cause must be found while other tests use the machine.
ALONE = [
    sys.executable,
    "-c",
    "from unidle.meter.watch.command import WatchedCommand\n"
    "from unidle.cli.main import main\n"
    "WatchedCommand.others_cores = 0.0\n"
    "main()\n",
    "watch",
]

# A training loop without any library: the class has step and reset, so it counts as an environment.
LOOP = """
import sys, time
class Game:
    def reset(self): pass
    def step(self): self.think()
    def think(self):
        {work}
game, end = Game(), time.monotonic() + {seconds}
while time.monotonic() < end:
    game.step()
"""
SLEEP, BURN = "time.sleep(0.03)", "sum(range(20000))"


def watch(
    folder: Path,
    *words: str,
    env: dict[str, str] | None = None,
    text: str = "",
    own: tuple[str, ...] = (),
    program: Sequence[str] = PROGRAM,
) -> subprocess.CompletedProcess[str]:
    command = [*program, *own, "--", *words]
    return subprocess.run(command, cwd=folder, env=env, input=text, capture_output=True, text=True, timeout=120)


def python(folder: Path, script: str, *words: str, **more: Any) -> subprocess.CompletedProcess[str]:
    (folder / "program.py").write_text(script)
    return watch(folder, sys.executable, "program.py", *words, **more)


def watch_alone(folder: Path, script: str) -> tuple[dict[str, Any], str]:
    """Watch a Python script, ignoring other programs; returns watch.json and the printed report."""
    done = python(folder, script, own=("--out", "found"), program=ALONE)
    assert done.returncode == 0, done.stderr
    return json.loads((folder / "found" / "watch.json").read_text()), done.stderr


def shares(report: str) -> list[int]:
    """The column of shares, with the total last; below it may be the time of start-up and exit."""
    rows = report.partition("main process  ")[2].partition("\n\n")[0].splitlines()[1:]
    rows = [row for row in rows if not row.startswith("start-up and exit: ")]
    return [int(re.search(r"(\d+) %", row)[1]) for row in rows]  # type: ignore[index]


def test_stdin_stdout_and_exit_status_pass_through(tmp_path: Path) -> None:
    program = "import sys; print(sys.argv[1:], sys.stdin.read()); print('oh', file=sys.stderr); sys.exit(7)"
    done = python(tmp_path, program, "--json", "--out", "a b", text="hello")
    assert done.stdout == "['--json', '--out', 'a b'] hello\n"
    assert done.stderr.startswith("oh\n\nunidle watched this command for ")
    assert done.returncode == 7


def test_watcher_ends_with_signal_of_command(tmp_path: Path) -> None:
    done = python(tmp_path, "import os, signal; os.kill(os.getpid(), signal.SIGKILL)")
    assert done.returncode == -signal.SIGKILL
    assert "unidle watched this command for" in done.stderr


@pytest.mark.parametrize("status", [0, 7])
def test_exit_status_is_kept_when_report_cannot_be_written(tmp_path: Path, status: int) -> None:
    read, write = os.pipe()
    os.close(read)
    words = ["sh", "-c", f"exit {status}"]
    with os.fdopen(write) as gone:  # the report's pipe is closed
        done = subprocess.run([*PROGRAM, "--out", "found", "--", *words], cwd=tmp_path, stderr=gone, timeout=60)
    assert done.returncode == status
    assert (tmp_path / "found" / "watch.json").exists()
    # The command replaces the output folder with a file.
    done = watch(tmp_path, "sh", "-c", f"rm -r found; touch found; exit {status}", own=("--out", "found"))
    assert done.returncode == status
    assert done.stderr.splitlines()[-1].startswith("unidle: The report could not be written: ")
    assert "unidle watched this command for" in done.stderr
    assert "Traceback" not in done.stderr


def test_uncreatable_output_folder_is_an_error_before_command_runs(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    done = watch(tmp_path, "touch", "ran", own=("--out", "file/found"))
    assert done.returncode == 2
    assert done.stderr == "unidle: --out file/found cannot be created (Not a directory); choose another folder.\n"
    assert not (tmp_path / "ran").exists()


def test_exit_status_is_kept_when_sigchld_is_ignored(tmp_path: Path) -> None:
    command = [*PROGRAM, "--", "sh", "-c", "exit 3"]
    ignore = (
        "import os, signal, sys; signal.signal(signal.SIGCHLD, signal.SIG_IGN); os.execv(sys.argv[1], sys.argv[1:])"
    )
    done = subprocess.run([sys.executable, "-c", ignore, *command], cwd=tmp_path, capture_output=True, timeout=60)
    assert done.returncode == 3, done.stderr


def test_flags_after_command_belong_to_command(tmp_path: Path) -> None:
    done = watch(tmp_path, "no-such-program", "--json")
    assert (done.returncode, done.stdout) == (2, "")


def test_signal_to_watcher_reaches_command_once(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(
        "import signal, time\n"
        "seen = []\n"
        "signal.signal(signal.SIGINT, lambda *_: seen.append(1))\n"
        "print('ready', flush=True)\n"
        "end = time.monotonic() + 30\n"
        "while not seen and time.monotonic() < end: time.sleep(0.01)\n"
        "end = time.monotonic() + 0.4\n"  # time for a second one to arrive
        "while time.monotonic() < end: time.sleep(0.01)\n"
        "raise SystemExit(40 + len(seen))\n"
    )
    command = [*PROGRAM, "--", sys.executable, "program.py"]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as run:
        assert run.stdout is not None
        assert run.stdout.readline() == "ready\n"
        run.send_signal(signal.SIGINT)
        assert run.wait(30) == 41


def test_command_keeps_its_environment_and_sitecustomize(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import os; os.environ['MINE'] = __file__")
    env = {name: value for name, value in os.environ.items() if not name.endswith("_NUM_THREADS")}
    program = (
        "import os, sys, sitecustomize\n"
        "print([n for n in os.environ if n.endswith('_NUM_THREADS')], os.environ['MINE'] == sitecustomize.__file__)\n"
    )
    done = python(tmp_path, program, env={**env, "PYTHONPATH": str(tmp_path)})
    assert done.stdout == "[] True\n", done.stderr


def test_fork_in_single_threaded_program_does_not_warn(tmp_path: Path) -> None:
    # Since Python 3.12, forking with another thread running is a warning; before, check the number of threads.
    program = (
        "import os\n"
        "pid = os.fork()\n"
        "if not pid: os._exit(0)\n"
        "os.waitpid(pid, 0)\n"
        "r, w = os.pipe()\n"
        "os.register_at_fork(before=lambda: os.write(w, b'%d' % len(os.listdir('/proc/self/task'))))\n"
        "if not os.fork(): os._exit(0)\n"
        "print(os.read(r, 9))\n"
    )
    done = watch(tmp_path, sys.executable, "-W", "error", "-c", program)
    # Hooks run in reverse order of registration, so this one may still see the sampler, which the next one stops.
    assert done.stdout in ("b'1'\n", "b'2'\n")
    assert "Warning" not in done.stderr
    assert done.returncode == 0


def test_non_python_command_runs_and_reports_missing_samples(tmp_path: Path) -> None:
    done = watch(tmp_path, "sh", "-c", "echo hello; exit 3")
    assert (done.stdout, done.returncode) == ("hello\n", 3)
    assert "no Python process of the command could be sampled" in done.stderr


@pytest.mark.parametrize("words", [["--", "no-such-program"], ["python", "train.py"], ["--"], []])
def test_usage_error_is_one_line(tmp_path: Path, words: list[str]) -> None:
    done = subprocess.run([*PROGRAM, *words], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert done.stderr.startswith("unidle: ")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(("work", "cause"), [(SLEEP, "environment waits"), (BURN, "environment computes")])
def test_waiting_env_is_distinguished_from_computing_env(tmp_path: Path, work: str, cause: str) -> None:
    found, report = watch_alone(tmp_path, LOOP.format(work=work, seconds=1.8))
    assert found["cause"] == cause, report
    assert "`Game.think` (environment, program.py:7)" in found["verdict"]
    assert "program.py → Game.step → Game.think" in report
    assert (tmp_path / "found" / "watch.txt").read_text() in report
    assert abs(sum(found["idle"].values()) + found["unattributed"] - 1) < 1e-9
    assert found["idle"]["environment"] > 0.6


def test_gpu_idle_time_is_attributed_to_activities(tmp_path: Path, fake_driver: Callable[..., dict[str, str]]) -> None:
    done = python(tmp_path, LOOP.format(work=SLEEP, seconds=2.0), env=fake_driver(), program=ALONE)
    assert re.search(r"^GPU idle \d+ %: \d+ % of that in `Game.think`", done.stderr, re.MULTILINE), done.stderr
    assert "gpu 0 Fake Large" in done.stderr
    assert "power 210" in done.stderr
    assert re.search(r"temperature 41.0 \(means\); energy [\d.,]+ J in total$", done.stderr, re.MULTILINE)
    assert "the driver does not show which GPUs the command uses" in done.stderr
    *parts, total = shares(done.stderr)
    assert total == 100
    assert abs(sum(parts) - 100) <= len(parts) / 2  # rounding


USES_CUDA = """
import os, sys, types
open("gpu.pid", "w").write(str(os.getpid()))
sys.modules["torch"] = torch = types.ModuleType("torch")
sys.modules["torch.autograd.profiler"] = types.ModuleType("profiler")
torch.cuda = types.SimpleNamespace(is_initialized=lambda: True)
"""


def test_gpu_program_gets_busy_share_from_driver_readings(
    tmp_path: Path, fake_driver: Callable[..., dict[str, str]]
) -> None:
    # The fake driver's utilisation rises by 20 points per second.
    program = USES_CUDA + LOOP.format(work=SLEEP, seconds=1.5) + "time.sleep(1.5)\n"
    done = python(tmp_path, program, env=fake_driver("gpu 0"), own=("--out", "found"))
    found = json.loads((tmp_path / "found" / "watch.json").read_text())
    assert found["busy_source"] == "driver", done.stderr
    active = {row["activity"]: row["active"] for row in found["rows"]}
    assert active["user code"] - active["environment"] == pytest.approx(0.3, abs=0.06), done.stderr
    assert "GPU use" in done.stderr


@pytest.mark.parametrize("gpu", ["gpu 0", "gpu 1"])
def test_only_gpu_used_by_command_counts(tmp_path: Path, fake_driver: Callable[..., dict[str, str]], gpu: str) -> None:
    # Through a shell: the process that uses the GPU is not the one that was started.
    (tmp_path / "program.py").write_text(LOOP.format(work=SLEEP, seconds=1.8))
    words = ["sh", "-c", f"sh -c 'echo $$ > gpu.pid; exec {sys.executable} program.py'; true"]
    done = watch(tmp_path, *words, env=fake_driver(gpu), own=("--out", "found"))
    found = json.loads((tmp_path / "found" / "watch.json").read_text())
    assert found["gpus_of_the_command"] == [gpu], done.stderr
    assert found["busy"] == pytest.approx(found["readings"][gpu]["utilisation"]["mean"] / 100)
    assert "does not show which GPUs" not in done.stderr


def test_non_ascii_names_are_read(tmp_path: Path) -> None:
    folder = tmp_path / "Übung 🚀"
    folder.mkdir()
    found, report = watch_alone(folder, LOOP.format(work=SLEEP, seconds=1.5).replace("think", "überlege"))
    assert found["cause"] == "environment waits", report
    assert "program.py → Game.step → Game.überlege" in report


WORKERS = """
import multiprocessing, time
class Game:
    def reset(self): pass
    def step(self):
        end = time.thread_time() + 0.003
        while time.thread_time() < end: pass
def work(pipe):
    game = Game()
    while pipe.recv(): pipe.send(game.step())
class Games:
    def __init__(self, n):
        pairs = [multiprocessing.Pipe() for _ in range(n)]
        for _, theirs in pairs: multiprocessing.get_context("fork").Process(target=work, args=(theirs,)).start()
        self.pipes = [ours for ours, _ in pairs]
    def reset(self): pass
    def step(self):
        for pipe in self.pipes: pipe.send(1)
        self.step_wait()
    def step_wait(self):
        for pipe in self.pipes: pipe.recv()
games, end = Games(3), time.monotonic() + 2
while time.monotonic() < end: games.step()
for pipe in games.pipes: pipe.send(0)
"""


def test_worker_processes_are_sampled_and_counted(tmp_path: Path) -> None:
    found, report = watch_alone(tmp_path, WORKERS)
    assert found["cause"] == "environment computes", report
    assert re.search(
        r"in `Games.step_wait` \(environment, program.py:21\) while 3 worker processes used [\d.]+ of", found["verdict"]
    )
    assert found["workers"]["place"]["function"] == "Game.step"
    assert sum(process["main"] for process in found["processes"]) == 1


def test_computing_torch_program_is_compute_bound(tmp_path: Path) -> None:
    program = (
        "import time, torch\n"
        "torch.set_num_threads(1)\n"
        "a, end = torch.randn(600, 600), time.monotonic() + 2\n"
        "while time.monotonic() < end: a = torch.tanh(a @ a)\n"
    )
    found, report = watch_alone(tmp_path, program)
    assert found["cause"] == "compute-bound", report
    assert next(row for row in found["rows"] if row["activity"] == "user code")["active"] > 0.6


def test_torch_program_with_too_many_threads_is_told_to_use_fewer(tmp_path: Path) -> None:
    program = (
        "import time, torch\n"
        "torch.set_num_threads(64)\n"
        "a, end = torch.randn(300, 300), time.monotonic() + 3\n"
        "while time.monotonic() < end: a = torch.tanh(a @ a)\n"
    )
    found, report = watch_alone(tmp_path, program)
    assert found["cause"] == "too many threads", report


def test_sb3_with_subproc_vec_env_waits_for_environments(tmp_path: Path) -> None:
    pytest.importorskip("stable_baselines3")
    program = (
        "import time, gymnasium, torch\n"
        "from stable_baselines3 import PPO\n"
        "from stable_baselines3.common.vec_env import SubprocVecEnv\n"
        "envs = SubprocVecEnv([lambda: gymnasium.make('Acrobot-v1')] * 16, start_method='fork')\n"
        "torch.set_num_threads(1)\n"
        "ends = []\n"
        "def go_on(*_):\n"
        "    ends or ends.append(time.monotonic() + 4)\n"  # independent of the start-up time
        "    return time.monotonic() < ends[0]\n"
        "model = PPO('MlpPolicy', envs, n_steps=64, batch_size=512, n_epochs=2, device='cpu')\n"
        "model.learn(10**9, callback=go_on)\n"
        "envs.close()\n"
    )
    found, report = watch_alone(tmp_path, program)
    assert found["cause"] in ("environment computes", "messages to workers"), report
    where = r"`SubprocVecEnv\.step_\w+` \((environment, )?called in program.py:11\) while 16 worker processes used"
    assert re.search(where, found["verdict"]), report
    assert "OnPolicyAlgorithm.collect_rollouts" in report


def test_sampler_uses_little_cpu_time(tmp_path: Path) -> None:
    """A loose bound on the extra CPU time of the watched process."""
    program = LOOP.format(work=SLEEP, seconds=2.0) + "print(time.process_time())\n"
    (tmp_path / "bare.py").write_text(program)
    with subprocess.Popen([sys.executable, "bare.py"], cwd=tmp_path, stdout=subprocess.PIPE, text=True) as bare:
        watched = python(tmp_path, program)
        unwatched, _ = bare.communicate(timeout=30)
    assert float(watched.stdout) - float(unwatched) < 0.3


@pytest.mark.gpu
@pytest.mark.parametrize("windows", [True, False])
def test_gpu_table_comes_from_windows_or_driver(tmp_path: Path, windows: bool) -> None:
    program = (
        "import time, torch\n"
        "net, x = torch.nn.Linear(64, 64).cuda(), torch.randn(8, 64, device='cuda')\n"
        "end = time.monotonic() + 12\n"
        "while time.monotonic() < end: net(x).mean().backward()\n"
    )
    done = python(tmp_path, program, own=("--out", "found", *(["--windows"] if windows else [])))
    assert done.returncode == 0, done.stderr
    assert done.stderr.startswith("\nunidle watched")
    found = json.loads((tmp_path / "found" / "watch.json").read_text())
    assert found["busy_source"] == ("kineto" if windows else "driver")
    assert found["cause"] == "small batches"
