"""`unidle eval` adds the page graph of a site episode to the report; the evaluation never fails because of it."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

import unidle
from unidle.cli.main import run as command
from unidle.tasks.web.site.serve import SiteServerConfig, in_background


@pytest.fixture(scope="module")
def site_run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A run on a small site, without an evaluation."""
    runs = tmp_path_factory.mktemp("runs")
    with in_background(SiteServerConfig(sites=1, pages=20, links=5, page_bytes=500)) as server:
        unidle.train(
            "unidle/SiteExplore-v0",
            env_kwargs={"site": server.urls, "budget": 3},
            preset="site-explore",
            n_envs=4,
            n_steps=8,
            batch_size=32,
            timesteps=32,
            eval_every=0,
            tensorboard=False,
            device="cpu",
            quiet=True,
            runs_dir=str(runs),
            run_name="crawl",
        )
        yield runs / "crawl"


def eval_stderr(folder: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """Run an evaluation, which must succeed; return its stderr."""
    capsys.readouterr()
    assert command(["eval", str(folder), "--episodes", "1", "--json"]) == 0
    output = capsys.readouterr()
    assert json.loads(output.out)["episodes"] == 1
    return output.err


def test_eval_does_not_touch_report_of_running_training(site_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = (site_run / "report.html").read_bytes()
    with (site_run / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        eval_stderr(site_run, capsys)
    assert not (site_run / "page_graph.json").exists()
    assert (site_run / "report.html").read_bytes() == report


def test_unwritable_run_folder_is_one_line_warning(site_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in (f"page_graph.{os.getpid()}.tmp", f"report.{os.getpid()}.tmp"):
        obstacle = site_run / name
        obstacle.mkdir()  # chmod would not stop root
        stderr = eval_stderr(site_run, capsys)
        obstacle.rmdir()
        assert (
            stderr == f"unidle: The report in {site_run} was not updated (Is a directory); make the folder writable.\n"
        )
    assert eval_stderr(site_run, capsys) == ""
    assert (site_run / "page_graph.json").exists()
