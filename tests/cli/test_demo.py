"""The demo, with fewer steps than a user's."""

from __future__ import annotations

import json
import webbrowser
from pathlib import Path

import pytest

from unidle.cli import demo
from unidle.cli.main import run


@pytest.fixture(autouse=True)
def short_demo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(demo, "_TRAIN", "CartPole-v1 --preset classic --n-steps 64 --timesteps 64 --eval-every 0")


def test_demo_prints_its_commands_and_the_report(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["demo"]) == 0
    lines = capsys.readouterr().out.splitlines()
    (folder,) = Path("runs").iterdir()
    assert lines[0].startswith("$ unidle train CartPole-v1 --preset classic ")
    assert f"$ unidle eval {folder} --episodes 20" in lines
    assert lines[-1] == f"The report: {folder.absolute()}/report.html"
    assert (folder / "report.html").stat().st_size > 0


def test_demo_opens_the_report_in_the_folder_of_the_user(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    opened: list[str] = []
    monkeypatch.setattr(webbrowser, "open", opened.append)
    assert run(["demo", "--runs-dir", "mine", "--open", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert opened == [Path(found["report"]).as_uri()]
    assert Path(found["report"]).is_relative_to(Path("mine").absolute())
    assert (found["train"]["step"], found["eval"]["episodes"]) == (64, 20)
