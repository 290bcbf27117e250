"""What a run was made with, in config.yaml and in the report."""

from __future__ import annotations

import platform
import subprocess
import sys
from datetime import datetime
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
import yaml

import unidle
from unidle.cli.main import run as command_line
from unidle.config import Config
from unidle.engine.checkpoint.provenance import command_line as command_in_words
from unidle.engine.checkpoint.provenance import git_state, provenance, with_entry
from unidle.engine.checkpoint.run_folder import RunFolder

SMALL = ["--preset", "classic", "--n-steps", "32", "--batch-size", "32", "--n-epochs", "1", "--net-arch", "8"]
SMALL += ["--eval-every", "0", "--no-tensorboard", "--quiet", "--device", "cpu", "--no-subproc"]


@pytest.fixture(autouse=True)
def run_in_tmp_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def entries(folder: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = yaml.safe_load((folder / "config.yaml").read_text())["provenance"]
    return found


def git(*words: str) -> str:
    identity = ["-c", "user.name=A", "-c", "user.email=a@b.c", "-c", "commit.gpgsign=false"]
    return subprocess.run(["git", *identity, *words], check=True, capture_output=True, text=True).stdout.strip()


def test_run_records_command_versions_and_git_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "notes.txt").write_text("a")
    git("init", "-q", "--initial-branch=main")
    git("add", "notes.txt")
    git("commit", "-qm", "first")
    monkeypatch.setenv("SOME_VARIABLE", "do-not-record-me")
    argv = ["train", "--env", "CartPole-v1", *SMALL, "--timesteps", "32", "--run-name", "a"]
    monkeypatch.setattr(sys, "argv", ["/opt/venv/bin/unidle", *argv])
    assert command_line(argv) == 0
    (start,) = entries(tmp_path / "runs/a")
    assert start["step"] == 0
    assert start["command"] == " ".join(["unidle", *argv])
    assert datetime.fromisoformat(start["started"]).tzinfo is not None
    assert start["versions"] == {
        "unidle": unidle.__version__,
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "cuda": torch.version.cuda,
        "gymnasium": gymnasium.__version__,
        "numpy": np.__version__,
    }
    assert start["git"] == {"commit": git("rev-parse", "HEAD"), "dirty": False}
    assert start["gpu"] is None
    assert start["cpu"].endswith(" cores")
    assert "do-not-record-me" not in (tmp_path / "runs/a/config.yaml").read_text()

    (tmp_path / "notes.txt").write_text("b")
    again = ["train", "--resume", "runs/a", "--timesteps", "64", "--quiet"]
    monkeypatch.setattr(sys, "argv", ["/opt/venv/bin/unidle", *again])
    assert command_line(again) == 0
    first, second = entries(tmp_path / "runs/a")
    assert first == start
    assert (second["step"], second["command"]) == (32, " ".join(["unidle", *again]))
    assert second["git"]["dirty"] is True

    page = (tmp_path / "runs/a/report.html").read_text()
    assert "Resumed at step 32" in page
    assert f"{second['git']['commit']}, with uncommitted changes" in page
    assert f"torch {torch.__version__}" in page


def test_config_with_provenance_repeats_and_resumes_the_run(tmp_path: Path) -> None:
    argv = ["train", "--env", "CartPole-v1", *SMALL, "--timesteps", "32"]
    assert command_line([*argv, "--run-name", "a"]) == 0
    assert command_line(["train", "--config", "runs/a/config.yaml", "--run-name", "b", "--quiet"]) == 0
    assert command_line(["train", "--resume", "runs/b", "--timesteps", "64", "--quiet"]) == 0
    assert [len(entries(tmp_path / "runs" / name)) for name in ("a", "b")] == [1, 2]
    a, b = (unidle.load(tmp_path / "runs" / name).config for name in ("a", "b"))
    assert a.recipe == b.recipe


def test_config_of_an_earlier_version_without_provenance_gets_it_on_resume(tmp_path: Path) -> None:
    assert command_line(["train", "--env", "CartPole-v1", *SMALL, "--timesteps", "32", "--run-name", "a"]) == 0
    path = tmp_path / "runs/a/config.yaml"
    path.write_text(path.read_text().partition("provenance:")[0])
    assert command_line(["report", "runs/a"]) == 0
    assert "Provenance" not in (tmp_path / "runs/a/report.html").read_text()
    assert command_line(["train", "--resume", "runs/a", "--timesteps", "64", "--quiet"]) == 0
    assert [entry["step"] for entry in entries(tmp_path / "runs/a")] == [32]


def test_damaged_provenance_is_replaced_and_shown_as_far_as_it_goes(tmp_path: Path) -> None:
    assert command_line(["train", "--env", "CartPole-v1", *SMALL, "--timesteps", "32", "--run-name", "a"]) == 0
    path = tmp_path / "runs/a/config.yaml"
    settings = path.read_text().partition("provenance:")[0]
    path.write_text(f"{settings}provenance: [1, {{step: x, git: 3, versions: [1], command: '<b>'}}]\n")
    assert command_line(["report", "runs/a"]) == 0
    assert "&lt;b&gt;" in (tmp_path / "runs/a/report.html").read_text()
    path.write_text(f"{settings}provenance: 5\n")
    assert command_line(["train", "--resume", "runs/a", "--timesteps", "64", "--quiet"]) == 0
    assert [entry["step"] for entry in entries(tmp_path / "runs/a")] == [32]


def test_many_resumes_keep_the_first_and_the_latest_entries() -> None:
    found: list[Any] = []
    for step in range(300):
        found = with_entry(found, {"step": step})
    assert len(found) == 100
    assert [found[0], found[1], found[-1]] == [{"step": 0}, {"step": 201}, {"step": 299}]


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["/usr/bin/unidle", "train", "--env-kwargs", "{a: 1}"], "unidle train --env-kwargs '{a: 1}'"),
        (["/x/site-packages/unidle/__main__.py", "train"], "unidle train"),
        (["my script.py", "--lr=1"], "python 'my script.py' --lr=1"),
        (["a.py", "--api-key", "k3y", "--n", "3"], "python a.py --api-key '***' --n 3"),
        (["a.py", "--wandb_token=abc", "--n=3"], "python a.py '--wandb_token=***' --n=3"),
        (["a.py", "--password", "--n", "3"], "python a.py --password --n 3"),
        (["a.py", "--site", "https://me:pw@host/x"], "python a.py --site 'https://***@host/x'"),
        ([], "python ''"),
    ],
)  # fmt: skip
def test_command_is_shown_as_a_shell_reads_it_without_secrets(argv: list[str], expected: str) -> None:
    assert command_in_words(argv) == expected


def test_folder_outside_a_repository_and_machine_without_git_have_no_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert git_state(tmp_path) is None
    git("init", "-q")
    assert git_state(tmp_path) == {"commit": None, "dirty": False}
    monkeypatch.setenv("PATH", "")
    assert git_state(tmp_path) is None
    assert provenance(torch.device("cpu"), tmp_path)["git"] is None


def test_folder_without_provenance_writes_settings_only(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "a", Config().with_values({"env": "CartPole-v1"}, "test"))
    folder.unlock()
    assert "provenance" not in (tmp_path / "a/config.yaml").read_text()
