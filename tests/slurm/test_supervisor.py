"""The process that supervises training in a job, with stand-ins for SLURM's commands."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from slurm_cluster import wait_for

import unidle
from unidle.config.files import PBT_FILE
from unidle.slurm.attempts import Attempts, SlurmJob, step_of
from unidle.slurm.supervisor import main, resuming

JOB = SlurmJob("12", 0, "n1")
TRAIN = [
    *("train", "--env", "CartPole-v1", "--n-envs", "2", "--n-steps", "16", "--batch-size", "16", "--n-epochs", "1"),
    *("--net-arch", "8", "--eval-every", "0", "--no-tensorboard", "--no-subproc", "--device", "cpu"),
    *("--run-name", "r", "--resume", "auto", "--quiet"),
]
LONG = [*TRAIN, "--timesteps", "100000000"]


@pytest.fixture(autouse=True)
def in_tmp_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in [*os.environ]:
        if name.startswith("SLURM"):
            monkeypatch.delenv(name)


Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts a supervisor whose `scontrol` writes its arguments to a file, and says that the job is in `state`."""
    program = tmp_path / "bin" / "scontrol"
    program.parent.mkdir()

    def begin(
        *command: str, state: str = "RUNNING", cores: int = 1, fails: bool = False, ends_job: bool = False
    ) -> subprocess.Popen[str]:
        answer = f"JobId=12 JobState={state} Reason=None Restarts=0 Requeue=1"
        program.write_text(
            f'#!/bin/bash\necho "$@" >> {tmp_path}/scontrol.log\n'
            f'if [ "$1" = show ]; then echo "{answer}"; elif {"true" if fails else "false"}; then\n'
            'echo "Requested operation is presently disabled" >&2; exit 1; fi\n'
            f'if [ "$1" = requeue ] && {"true" if ends_job else "false"}; then kill $PPID $$; sleep 0.5; fi\n'
        )
        program.chmod(0o755)
        environment = {**os.environ, "PATH": f"{program.parent}:{os.environ['PATH']}", "SLURM_JOB_ID": "12"}
        words = [sys.executable, "-m", "unidle.slurm", "--folder", "runs/r", "--cores", str(cores), "--", *command]
        started.append(subprocess.Popen(words, env=environment, stderr=subprocess.PIPE, text=True))
        return started[-1]

    started: list[subprocess.Popen[str]] = []
    yield begin
    for supervisor in started:
        if supervisor.poll() is None:  # the test has failed
            supervisor.send_signal(signal.SIGUSR1)
            supervisor.communicate(timeout=30)


def lines(name: str) -> int:
    path = Path(name)
    return path.read_text().count("\n") if path.exists() else 0


def iterations() -> int:
    return lines("runs/r/metrics.jsonl")


def requeued() -> bool:
    path = Path("scontrol.log")
    return path.exists() and "requeue 12" in path.read_text().splitlines()


def test_finished_run_ends_the_job(start: Start) -> None:
    supervisor = start(*TRAIN, "--timesteps", "320")
    assert supervisor.communicate(timeout=60)[1] == ""
    assert supervisor.returncode == 0
    assert not requeued()
    assert step_of(Path("runs/r")) == 320


def test_signal_before_the_time_limit_saves_and_requeues(start: Start) -> None:
    supervisor = start(*LONG)
    wait_for(iterations, 30)
    supervisor.send_signal(signal.SIGUSR1)
    printed = supervisor.communicate(timeout=30)[1]
    assert supervisor.returncode == 0
    assert requeued()
    step = step_of(Path("runs/r"))
    assert step > 0
    assert f"Requeued at step {step:,}, restart 1." in printed
    assert "The time limit is near: saving a checkpoint." in printed


def test_requeue_that_ends_the_processes_of_the_job_is_not_reported_as_failed(start: Start) -> None:
    supervisor = start(*LONG, ends_job=True)
    wait_for(iterations, 30)
    supervisor.send_signal(signal.SIGUSR1)
    printed = supervisor.communicate(timeout=30)[1]
    assert supervisor.returncode == 0
    assert "restart 1." in printed


def test_cancelled_job_saves_and_is_not_requeued(start: Start) -> None:
    supervisor = start(*LONG, state="COMPLETING")
    wait_for(iterations, 30)
    supervisor.send_signal(signal.SIGTERM)
    printed = supervisor.communicate(timeout=30)[1]
    assert supervisor.returncode == 128 + signal.SIGUSR1  # training gets that in place of a SIGTERM
    assert not requeued()
    assert f"The job was cancelled at step {step_of(Path('runs/r')):,}; submit it again to continue." in printed


def test_refused_requeue_says_how_to_continue(start: Start) -> None:
    supervisor = start(*LONG, fails=True)
    wait_for(iterations, 30)
    supervisor.send_signal(signal.SIGUSR1)
    printed = supervisor.communicate(timeout=30)[1]
    assert supervisor.returncode == 128 + signal.SIGUSR1
    assert "SLURM refused to requeue the job (Requested operation is presently disabled); resubmit it to" in printed


def test_error_of_training_ends_the_job_with_its_code(start: Start) -> None:
    supervisor = start("train", "--env", "NoSuchEnv-v1")
    assert "NoSuchEnv" in supervisor.communicate(timeout=60)[1]
    assert supervisor.returncode == 2
    assert not requeued()


def test_job_without_progress_ends_after_two_attempts(start: Start) -> None:
    never = ["sweep", "--help-all"]  # anything that is never reached
    for attempt in (1, 2):
        supervisor = start(*LONG)
        wait_for(lambda n=attempt: lines("runs/r/slurm-12.jsonl") == n, 30)  # type: ignore[misc]
        supervisor.send_signal(signal.SIGUSR1)  # while it imports torch
        printed = supervisor.communicate(timeout=30)[1]
        assert ("stopped twice without completing an iteration (step 0)" in printed) == (attempt == 2)
        assert supervisor.returncode == (attempt == 2)
    # Also if it was SLURM that requeued it.
    supervisor = start(*never)
    assert "stopped twice without" in supervisor.communicate(timeout=30)[1]
    assert supervisor.returncode == 1
    assert Path("scontrol.log").read_text().splitlines() == ["show job -o 12", "requeue 12"]


def test_fewer_cores_than_asked_for_are_reported(start: Start) -> None:
    supervisor = start("presets", "--json", cores=9999)
    assert "This job asked for 9999 cores and may use " in supervisor.communicate(timeout=60)[1]
    assert supervisor.returncode == 0


def test_outside_slurm_nothing_is_trained(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["--folder", "runs/r", "--cores", "1", "--", *LONG]) == 2
    assert main(["train"]) == 2
    assert list(Path().iterdir()) == []
    assert "There is no SLURM job here; submit the script with sbatch." in capfd.readouterr().err


def test_task_of_an_array_is_never_called_by_the_id_of_the_array() -> None:
    last = {"SLURM_JOB_ID": "40", "SLURM_ARRAY_JOB_ID": "40", "SLURM_ARRAY_TASK_ID": "9", "SLURM_RESTART_COUNT": "2"}
    assert SlurmJob.of(last) == SlurmJob("40_9", 2, "")
    assert SlurmJob.of({"SLURM_JOB_ID": "7", "SLURMD_NODENAME": "n3"}) == SlurmJob("7", 0, "n3")
    assert SlurmJob.of({}) is None


def test_steps_are_those_of_all_runs_of_a_group_and_a_sweep(tmp_path: Path) -> None:
    for name in ("seed-1/checkpoints/step-000000000064.pt", "seed-1/checkpoints/step-000000000128.pt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    trial = tmp_path / "trial-3" / "seed-2" / "checkpoints"
    trial.mkdir(parents=True)
    for name in ("step-000000000010.pt", "best.pt", "step-000000000099.pt.damaged"):
        (trial / name).touch()
    assert step_of(tmp_path) == 138


def test_attempts_with_progress_are_not_stuck(tmp_path: Path) -> None:
    attempts, checkpoints = Attempts(tmp_path, JOB), tmp_path / "checkpoints"
    checkpoints.mkdir()
    for step in (0, 0, 64):
        (checkpoints / f"step-{step:012d}.pt").touch()
        attempts.begin()
        assert not attempts.are_stuck or step == 0
    attempts.begin()
    assert attempts.are_stuck
    (checkpoints / "step-000000000128.pt").touch()
    assert not attempts.are_stuck
    assert not Attempts(tmp_path, SlurmJob("13", 0, "n1")).are_stuck  # another job


def test_population_is_resumed_by_its_folder(tmp_path: Path) -> None:
    command = ["train", "--env", "CartPole-v1", "--pbt", "--seeds", "4"]
    assert resuming(command, tmp_path) == command
    (tmp_path / PBT_FILE).touch()
    assert resuming(command, tmp_path) == ["train", "--resume", str(tmp_path)]


def test_summary_says_how_often_a_run_was_requeued(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = {"n_envs": 2, "n_steps": 16, "batch_size": 16, "net_arch": (8,), "eval_every": 0, "quiet": True}
    settings |= {"tensorboard": False, "subproc": False, "device": "cpu"}
    monkeypatch.setenv("SLURM_JOB_ID", "12")
    monkeypatch.setenv("SLURMD_NODENAME", "n2")
    run = unidle.train("CartPole-v1", timesteps=64, run_name="r", **settings)
    assert run.summary()["requeues"] == 0
    for job, restarts, steps in (("12", 1, 128), ("12", 2, 192), ("15", 1, 256)):
        monkeypatch.setenv("SLURM_JOB_ID", job)
        monkeypatch.setenv("SLURM_RESTART_COUNT", str(restarts))
        run = unidle.resume("runs/r", timesteps=steps, quiet=True)
    assert json.loads(json.dumps(run.summary()))["requeues"] == 3
    page = run.report.read_text()
    assert "job 12, restarts 2, node n2" in page

    from rich.console import Console

    from unidle.report.terminal.summary import print_summary

    print_summary(Console(width=200), run.path)
    assert "3 times, by SLURM" in capsys.readouterr().out
