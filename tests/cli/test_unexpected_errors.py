"""Errors that no command expects: the exit code, and the one object of --json."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from paths import SOURCE

from unidle.cli import presets
from unidle.cli.main import run


def fail_with(error: BaseException, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(presets, "presets_command", fail)


def test_exception_with_json_prints_traceback_and_one_object(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fail_with(ValueError("not expected"), monkeypatch)
    assert run(["presets", "--json"]) == 1
    output = capsys.readouterr()
    assert json.loads(output.out) == {"error": "ValueError: not expected"}
    assert output.err.splitlines()[-1] == "ValueError: not expected"
    assert "Traceback" in output.err


def test_full_disk_is_one_sentence(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    fail_with(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "runs/a/config.yaml.tmp"), monkeypatch)
    assert run(["presets"]) == 1
    sentence = "Cannot write runs/a/config.yaml.tmp (No space left on device); free some disk space, or use another"
    assert capsys.readouterr().err == f"unidle: {sentence} folder.\n"


def test_sys_exit_of_user_code_is_an_error(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    fail_with(SystemExit(0), monkeypatch)
    assert run(["presets", "--json"]) == 1
    output = capsys.readouterr()
    assert "called sys.exit(0)" in json.loads(output.out)["error"]
    assert len(output.err.splitlines()) == 1


def test_ctrl_c_exits_with_130(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    fail_with(KeyboardInterrupt(), monkeypatch)
    assert run(["presets"]) == 130
    assert capsys.readouterr().err == "unidle: Stopped before it finished.\n"


def test_ctrl_c_during_the_first_imports_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "yaml.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGINT)\n")  # imported early
    command = "import signal; signal.signal(2, signal.default_int_handler); from unidle.cli import main; main()"
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}:{SOURCE}"}
    done = subprocess.run([sys.executable, "-c", command], env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (130, "unidle: Stopped before it began.\n")


def test_help_of_a_command_still_exits(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        run(["presets", "--help"])
    assert end.value.code == 0
    assert "usage" in capsys.readouterr().out


def test_ctrl_c_that_an_import_swallows_ends_the_command(tmp_path: Path) -> None:
    """As NumPy and torch do while they load."""
    (tmp_path / "swallowing.py").write_text(
        "import os, signal\n"
        "try:\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n"
        "    sum(range(10**7))\n"  # the interpreter runs the handler here
        "except KeyboardInterrupt:\n"
        "    pass\n"
        "raise SystemExit('the import went on')\n"
    )
    command = "import signal; signal.signal(2, signal.default_int_handler); from unidle.cli import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", command, "check-env", "swallowing:Env", "--json"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(SOURCE)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stderr) == (130, "unidle: Stopped before it finished.\n")
    assert json.loads(done.stdout) == {"error": "Stopped before it finished."}
