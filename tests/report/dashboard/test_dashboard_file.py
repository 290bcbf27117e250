"""`unidle report --html`: a run's dashboard as a single file."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from dashboard_runs import make_run, segment

from unidle.cli.main import run as command_line

MARKUP = "<img src=x onerror=alert(1)>"


def test_html_file_contains_data_and_loads_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = make_run(tmp_path, "x", meter=True, env=f"</script>{MARKUP}")
    assert command_line(["report", "--html", str(folder)]) == 0
    path = folder / "dashboard.html"
    assert capsys.readouterr().out.strip() == str(path)
    assert not (folder / "report.html").exists()
    page = path.read_text(encoding="utf-8")
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', page)
    assert policy
    assert re.fullmatch(
        r"default-src 'none'; script-src 'sha256-\S+' 'sha256-\S+'; style-src 'unsafe-inline'; img-src data: blob:",
        policy[1],
    )
    assert MARKUP not in page
    data = re.search(r'<script id="data" type="application/json">(.*?)</script>', page)
    assert data
    kept = json.loads(data[1])
    assert kept["view"]["facts"][0] == ["environment", f"</script>{MARKUP}"]
    assert [kept["spans"][str(offset)] for offset in kept["view"]["timeline"]["offset"]] == [
        segment(i + 1)["spans"] for i in range(4)
    ]


def test_html_file_can_be_named_and_plain_report_is_unchanged(tmp_path: Path) -> None:
    folder = make_run(tmp_path, "x")
    assert command_line(["report", str(folder), "--html", str(tmp_path / "y.html"), "--json"]) == 0
    assert (tmp_path / "y.html").exists()
    assert not (folder / "dashboard.html").exists()
    assert command_line(["report", str(folder)]) == 0
    assert "<script" not in (folder / "report.html").read_text()
    (tmp_path / "link").symlink_to(folder)
    assert command_line(["report", str(tmp_path / "link"), "--html"]) == 0
    assert (folder / "dashboard.html").exists()
    assert command_line(["report", str(tmp_path), "--html"]) == 2
    assert command_line(["report", str(folder), "--html", str(tmp_path / "none" / "y.html")]) == 2
