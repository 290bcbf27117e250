"""Completion in a real bash, and the script for zsh."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from unidle.cli.main import COMMANDS, run

# As bash calls it: the words of the line, and the index of the one under the cursor.
COMPLETE = 'source "$1"; shift; COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); _unidle; printf "%s\\n" "${COMPREPLY[@]}"'


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    done = subprocess.run(
        [sys.executable, "-m", "unidle", "completion", "bash"], check=True, capture_output=True, timeout=100
    )
    path = tmp_path_factory.mktemp("completion") / "unidle.bash"
    path.write_bytes(done.stdout)
    return path


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
@pytest.mark.parametrize(
    ("line", "words"),
    [
        (["do"], ["doctor"]),
        (["help", "ex"], ["export"]),
        (["train", "--algo", "s"], ["sac"]),
        (["train", "--preset", "mt10-2"], ["mt10-20m", "mt10-2m"]),
        (["train", "--exploration-f"], ["--exploration-final-eps", "--exploration-fraction"]),  # of DQN
        (["tune", "--bud"], ["--budget"]),
        (["watch", "--w"], ["--windows"]),
        (["eval", "runs/"], [""]),  # then bash completes files
        (["pack", "--e"], [""]),  # its help has a command with --env as an example
        (["pack", "--", "unidle", "tr"], ["train"]),
        (["pack", "--", "python", "a.py", "--", "unidle", "eval", "--ep"], ["--episodes"]),
        (["pack", "--", "python", "--a"], [""]),
        (["train", "--no-sub"], ["--no-subproc"]),
    ],
)
def test_bash_completes(line: list[str], words: list[str], script: Path) -> None:
    command = ["bash", "-c", COMPLETE, "bash", str(script), "unidle", *line]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    assert (done.stdout.split("\n")[:-1], done.stderr) == (words, "")


def test_zsh_uses_the_same_function_and_knows_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["completion", "zsh"]) == 0
    first, *rest = capsys.readouterr().out.splitlines()
    assert "bashcompinit" in first
    assert rest[-1] == "complete -o default -F _unidle unidle"
    assert all(any(line.startswith(f"      {name}) ") for line in rest) for name in COMMANDS)


def test_unknown_shell_is_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["completion", "tcsh"]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1
