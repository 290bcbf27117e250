"""`unidle tune` end to end: trials are processes that train, crash, hang and are killed."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import yaml
from paths import TESTS
from processes import restore_sigint
from tuning_envs import SLOW_CREATION_S

from unidle.cli.main import run as command_line
from unidle.cli.tune import _check_writable
from unidle.config import Config
from unidle.config.validate import validated
from unidle.engine.checkpoint.checkpoint_file import load_checkpoint
from unidle.engine.checkpoint.run_folder import RunFolder
from unidle.tuning.search.changes import Change
from unidle.tuning.search.interval import Interval
from unidle.tuning.search.outcomes import Outcome, Tuned
from unidle.tuning.search.trial import Trial, TrialError, _python_path
from unidle.tuning.search.tune import tune

PROGRAM = str(Path(sys.executable).with_name("unidle"))
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(TESTS)}
SMALL = shlex.split("--preset classic --n-envs 8 --n-steps 16 --batch-size 32 --n-epochs 1 --net-arch 8")
SLEEPY = ["--env", "tuning_envs:SlowStep", *SMALL, "--n-steps", "8"]


def failing_job(how: str, **values: Any) -> Config:
    """A job that works only in the trainer's process."""
    small = {"n_envs": 4, "n_steps": 16, "batch_size": 32, "n_epochs": 1, "net_arch": (8,), **values}
    kwargs = {"env": "tuning_envs:FailingTrial", "env_kwargs": {"how": how}}
    return validated(Config().with_values({**kwargs, **small}, "test"))


class StopAfterFirstOutcome:
    """Interrupts after the first outcome."""

    def on_stage(self, text: str) -> None:
        pass

    def on_start(self, tuned: Tuned) -> None:
        pass

    def on_interim_result(self, change: Change, measured: Interval, pairs: int) -> None:
        pass

    def on_outcome(self, outcome: Outcome) -> None:
        raise KeyboardInterrupt


def weights(run: Path) -> dict[str, torch.Tensor]:
    latest = RunFolder.open(run).latest()
    assert latest is not None
    policy: dict[str, torch.Tensor] = load_checkpoint(latest)["algo"]["policy"]
    return policy


def test_tune_speeds_up_a_slow_job_and_keeps_its_weights(tmp_path: Path) -> None:
    argv = [PROGRAM, "tune", *SLEEPY, "--workers", "1", "--budget", "3m", "--json"]
    process = subprocess.Popen(
        argv,
        cwd=tmp_path,
        env=ENVIRONMENT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=restore_sigint,
    )
    assert process.stderr is not None
    progress = ""
    for line in process.stderr:  # rows go to stderr, the JSON to stdout
        progress += line
        if line.startswith("workers 1 → ") and line.endswith("  kept\n"):
            break
    process.send_signal(signal.SIGINT)
    printed, rest = process.communicate(timeout=120)
    assert process.returncode == 0, progress + rest
    result = json.loads(printed)
    assert result["ended_by"] == "Ctrl-C", progress + rest
    kept = [change for change in result["changes"] if change["kept"]]
    assert "workers" in kept[0]["settings"]
    assert kept[0]["measured"]["low"] > 1
    assert result["recipe"] == {}
    file = yaml.safe_load((tmp_path / "engine.yaml").read_text())
    assert (file["engine"], file["machine"]) == (result["engine"], result["machine"])
    assert file["engine"]["workers"] != 1
    assert (tmp_path / "engine.yaml").read_text().startswith("# Found by `unidle tune` on ")

    command = shlex.split(result["command"])
    assert command[:2] == ["unidle", "train"]
    assert "--workers" not in command
    more = ["--timesteps", "256", "--quiet", "--eval-every", "0", "--run-name"]
    before = [PROGRAM, "train", *SLEEPY, "--workers", "1", *more, "before"]
    for words in ([PROGRAM, *command[1:], *more, "tuned"], before):
        assert subprocess.run(words, cwd=tmp_path, env=ENVIRONMENT, timeout=120).returncode == 0
    settings = yaml.safe_load((tmp_path / "runs/tuned/config.yaml").read_text())
    assert settings["engine"]["workers"] == file["engine"]["workers"]
    ours, theirs = weights(tmp_path / "runs/tuned"), weights(tmp_path / "runs/before")
    assert file["engine"]["threads"] == 1  # more threads would sum in another order
    assert [name for name in theirs if not torch.equal(ours[name], theirs[name])] == []


@pytest.mark.parametrize(
    ("how", "patience", "kind", "text"),
    [
        ("memory", 60.0, "memory", "the process was killed, probably because the system ran out of memory"),
        ("raise", 60.0, "memory", "Environment "),
        ("hang", 5.0, "hang", "no response for 5 seconds"),
    ],
)
def test_failed_trial_reports_its_kind_and_leaves_no_process(how: str, patience: float, kind: str, text: str) -> None:
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    trial = Trial(failing_job(how, subproc=True))
    try:
        with pytest.raises(TrialError, match=f"^{text}") as error:
            trial.start(patience)
        assert error.value.kind == kind
    finally:
        trial.close()
    assert {child.pid for child in psutil.Process().children(recursive=True)} <= before


@pytest.mark.parametrize(
    ("seconds", "dying_s", "text"),
    [(0.3, 5.0, "the process ended with exit status 3"), (60.0, 0.3, "the trial closed its connection without")],
)
def test_slowly_exiting_crash_is_not_reported_as_a_kill(
    seconds: float, dying_s: float, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pipe closes before the process exits, by as long as freeing its memory takes."""
    trial = Trial(failing_job("never"))
    code = f"import os, sys, time; os.close(int(sys.argv[1])); time.sleep({seconds}); os._exit(3)"
    popen = subprocess.Popen
    monkeypatch.setattr("unidle.tuning.search.trial._DYING_SECONDS", dying_s)
    monkeypatch.setattr(subprocess, "Popen", lambda argv, **options: popen([argv[0], "-c", code, argv[-1]], **options))
    try:
        with pytest.raises(TrialError, match=f"^{text}") as error:
            trial.start(30.0)
        assert error.value.kind == "crash"
    finally:
        trial.close()


def test_connection_error_in_the_job_is_a_crash() -> None:
    trial = Trial(failing_job("never", subproc=False, network="tuning_envs:unreachable_network"))
    try:
        with pytest.raises(TrialError, match=r"^ConnectionResetError: no response") as error:
            trial.start(60.0)
        assert error.value.kind == "crash"
    finally:
        trial.close()


def test_python_path_has_no_empty_entry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONPATH", raising=False)
    assert "" not in _python_path().split(os.pathsep)
    monkeypatch.setenv("PYTHONPATH", "/somewhere")
    assert _python_path().split(os.pathsep)[1:] == ["/somewhere"]


def test_crashed_trial_is_recorded_and_settings_are_kept() -> None:
    tuned = tune(failing_job("crash", subproc=False), 35.0, StopAfterFirstOutcome())
    (outcome,) = tuned.outcomes
    assert outcome.change.text == "subproc off → on"
    assert not outcome.kept
    assert outcome.note.startswith("crashed: the process ended with signal 6")
    assert tuned.config.engine.subproc is False
    assert tuned.rate > 0


def test_trial_trains_in_consecutive_segments() -> None:
    trial = Trial(failing_job("never", subproc=False))
    try:
        setup = trial.start(60.0)
        assert (setup.workers, setup.on_gpu, setup.on_device) == (0, False, False)
        first = trial.train_segment(0.1, 60.0)
        second = trial.train_segment(0.3, 60.0)
        assert first.seconds >= 0.1
        assert second.seconds >= 0.3
        assert second.steps % 64 == 0  # whole iterations
        assert second.trained >= first.trained + second.seconds
        assert second.mean_return is not None
        assert first.first_return == second.first_return
    finally:
        trial.close()


@pytest.mark.parametrize(
    ("argv", "sentence"),
    [
        (["--budget", "soon"], "unidle: --budget soon is not a duration; use, for example, 90s, 5m or 1h."),
        (["--budget", "3s"], "unidle: --budget 3s is too short: one comparison starts the job twice "),
        (["--out", "nowhere/engine.yaml"], "unidle: --out nowhere/engine.yaml cannot be written (No such file"),
        (["--wurkers", "2"], "unidle: --wurkers: there is no setting `wurkers`; did you mean `workers`?"),
        (["--budgett", "40s"], "unidle: --budgett: there is no setting `budgett`; did you mean `budget`?"),
        (["--xyzzy", "2"], "unidle: --xyzzy: there is no setting `xyzzy`; `unidle tune --help-all` lists them all."),
        (["--workers", "many"], "unidle: --workers: `workers` must be an integer or auto, not 'many'."),
    ],
)
def test_invalid_flag_prints_one_sentence(
    argv: list[str],
    sentence: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert command_line(["tune", "--env", "CartPole-v1", "--preset", "classic", *argv]) == 2
    assert capsys.readouterr().err.startswith(sentence)
    assert list(tmp_path.iterdir()) == []


def test_output_check_keeps_existing_files_and_creates_none(tmp_path: Path) -> None:
    empty, fresh = tmp_path / "empty.yaml", tmp_path / "fresh.yaml"
    empty.touch()
    for path in (empty, fresh):
        _check_writable(path)
    assert list(tmp_path.iterdir()) == [empty]


def test_close_ends_the_children_of_a_crashed_trial(tmp_path: Path) -> None:
    left = tmp_path / "left"
    trial = Trial(failing_job("orphan", subproc=False, env_kwargs={"how": "orphan", "pid_file": str(left)}))
    with pytest.raises(TrialError, match=r"^the process ended with signal 6"):
        trial.start(60.0)
    trial.close()
    until = time.monotonic() + 10
    with contextlib.suppress(psutil.NoSuchProcess):
        while psutil.Process(int(left.read_text())).status() != psutil.STATUS_ZOMBIE:
            assert time.monotonic() < until
            time.sleep(0.01)


def test_trial_startup_does_not_count_as_training() -> None:
    trial = Trial(failing_job("slow creation", subproc=False))
    try:
        trial.start(60.0)
        turn = trial.train_segment(0.1, 60.0)
        assert 0.5 + turn.seconds <= turn.trained < 4 * SLOW_CREATION_S  # four environments were created before
    finally:
        trial.close()
