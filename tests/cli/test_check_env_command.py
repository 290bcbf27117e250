"""`unidle check-env` shows how far a slow check is."""

from __future__ import annotations

import re
from typing import Any

import pytest

from unidle.cli.check_env import check_env_command


def test_slow_check_shows_progress_on_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    check_env_command(["cli_envs:SlowEnv", "--json"])
    output = capsys.readouterr()
    assert re.search(r"^checking: step \d+ of 2250$", output.err, re.MULTILINE)
    assert output.out == ""


def test_quick_check_shows_no_progress(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("unidle.cli.check_env._QUIET_SECONDS", 60.0)
    result: Any = check_env_command(["cli_envs:Choice", "--json"])
    assert result["steps"] == 1000
    assert capsys.readouterr().err == ""
