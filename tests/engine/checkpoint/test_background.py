"""Checkpoints are written by a thread, from a snapshot, while training continues."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from paths import SOURCE
from resumed_runs import assert_same, final_state

import unidle
from unidle.engine.checkpoint import run_folder
from unidle.engine.checkpoint.checkpoint_file import load_checkpoint, save_checkpoint
from unidle.engine.checkpoint.run_folder import RunFolder
from unidle.engine.checkpoint.snapshot import snapshot
from unidle.errors import WriteError

SMALL: dict[str, Any] = {
    "preset": "classic",
    "n_envs": 2,
    "n_steps": 32,
    "batch_size": 32,
    "n_epochs": 1,
    "net_arch": (16,),
    "normalize_obs": True,
    "timesteps": 640,
    "checkpoint_every": 64,
    "eval_every": 0,
    "subproc": False,
    "tensorboard": False,
    "quiet": True,
    "seed": 3,
}


def fail_at(steps: set[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the checkpoints of these steps fail as on a full disk."""
    save = RunFolder.save

    def save_or_fail(folder: RunFolder, state: dict[str, Any], step: int, keep: int) -> Path:
        if step in steps:
            raise WriteError(f"Cannot write step {step} (No space left on device)", "fix that")
        return save(folder, state, step, keep)

    monkeypatch.setattr(RunFolder, "save", save_or_fail)


def test_snapshot_keeps_values_when_original_changes() -> None:
    weights = torch.arange(1000.0)
    state = {"weights": weights, "nested": [{"view": weights[:10]}, 3, None, "x"], "flag": torch.tensor(True)}
    copy = snapshot(state)
    weights.zero_()
    state["nested"].append(4)  # type: ignore[attr-defined]
    assert torch.equal(copy["weights"], torch.arange(1000.0))
    assert torch.equal(copy["nested"][0]["view"], torch.arange(10.0))
    assert copy["nested"][1:] == [3, None, "x"]
    assert copy["nested"][0]["view"].untyped_storage().nbytes() == 40  # not the whole storage


def test_checkpoints_are_written_without_a_thread_if_none_can_be_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = unidle.train("CartPole-v1", run_name="plain", runs_dir=str(tmp_path), **SMALL)
    start = threading.Thread.start

    def start_or_fail(thread: threading.Thread) -> None:
        if thread.name == "unidle-writer":
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_or_fail)
    run = unidle.train("CartPole-v1", run_name="no-threads", runs_dir=str(tmp_path), **SMALL)
    assert_same(final_state(run.path), final_state(expected.path))


def test_training_continues_while_a_checkpoint_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = unidle.train("CartPole-v1", run_name="plain", runs_dir=str(tmp_path), **SMALL)
    may_write, written_by = threading.Event(), set[str]()

    def slow(path: Path, state: dict[str, Any]) -> None:
        written_by.add(threading.current_thread().name)
        if state["step"] == 256:
            assert may_write.wait(60)
        save_checkpoint(path, state)

    def after_iteration(context: unidle.CallbackContext) -> None:
        if context.record["step"] == 320:  # the next checkpoint waits for this one
            assert not list(tmp_path.glob("slow/checkpoints/*256.pt"))
            may_write.set()

    monkeypatch.setattr(run_folder, "save_checkpoint", slow)
    run = unidle.train(
        "CartPole-v1", run_name="slow", runs_dir=str(tmp_path), after_iteration=[after_iteration], **SMALL
    )
    assert may_write.is_set()
    assert written_by == {"unidle-writer"}
    assert [path.name for path in run.folder.saved()] == ["step-000000000576.pt", "step-000000000640.pt"]
    assert_same(final_state(run.path), final_state(expected.path))


def test_training_survives_one_failed_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fail_at({128, 384}, monkeypatch)
    run = unidle.train("CartPole-v1", runs_dir=str(tmp_path), **SMALL)
    assert final_state(run.path)["step"] == 640
    message = "Cannot write step 128 (No space left on device); training continues. If the next checkpoint cannot be"
    assert message in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize("steps", [{0}, {256, 320}, {640}], ids=["the first", "two in a row", "the last"])
def test_run_ends_when_nothing_can_be_saved(steps: set[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = unidle.train("CartPole-v1", run_name="plain", runs_dir=str(tmp_path), **SMALL)
    with monkeypatch.context() as patch:
        fail_at(steps, patch)
        with pytest.raises(WriteError, match=r"^Cannot write step \d+ \(No space left on device\); fix that\.$"):
            unidle.train("CartPole-v1", run_name="r", runs_dir=str(tmp_path), **SMALL)
    resumed = unidle.resume(tmp_path / "r", quiet=True)
    assert_same(final_state(resumed.path), final_state(expected.path))


def test_state_that_does_not_fit_twice_is_written_before_training_continues(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = unidle.train("CartPole-v1", run_name="plain", runs_dir=str(tmp_path), **SMALL)
    monkeypatch.setattr("unidle.engine.checkpoint.snapshot._SMALL_BYTES", 0)
    monkeypatch.setattr("unidle.engine.checkpoint.snapshot.free_memory", lambda: 0)
    newest: list[str] = []

    def after_iteration(context: unidle.CallbackContext) -> None:
        newest.append(sorted(path.name for path in tmp_path.glob("r/checkpoints/step-*.pt"))[-1])

    run = unidle.train("CartPole-v1", run_name="r", runs_dir=str(tmp_path), after_iteration=[after_iteration], **SMALL)
    assert newest == [f"step-{step:012d}.pt" for step in range(0, 640, 64)]
    assert_same(final_state(run.path), final_state(expected.path))


def test_run_killed_during_a_background_write_resumes_exactly(tmp_path: Path) -> None:
    expected = unidle.train("CartPole-v1", run_name="plain", runs_dir=str(tmp_path), **SMALL)
    program = f"""
import os, signal, unidle
from unidle.engine.checkpoint import checkpoint_file
replacing, writes = checkpoint_file.replacing, []
def kill_in_third_write(path):
    writes.append(path)
    if len(writes) == 3:
        path.with_suffix(".1.tmp").write_bytes(b"half")
        os.kill(os.getpid(), signal.SIGKILL)
    return replacing(path)
checkpoint_file.replacing = kill_in_third_write
unidle.train("CartPole-v1", run_name="killed", runs_dir={str(tmp_path)!r}, **{SMALL!r})
"""
    done = subprocess.run([sys.executable, "-c", program], env={"PYTHONPATH": str(SOURCE)}, check=False)
    assert done.returncode == -signal.SIGKILL
    assert [path.name[-6:] for path in RunFolder.open(tmp_path / "killed").saved()] == ["000.pt", "064.pt"]
    resumed = unidle.resume(tmp_path / "killed", quiet=True)
    assert_same(final_state(resumed.path), final_state(expected.path))
    assert load_checkpoint(resumed.folder.saved()[-1])["step"] == 640
    assert not list(resumed.folder.checkpoints.glob("*.tmp"))
