"""`unidle eval` draws what an episode did on a site into the report, and never fails, or meddles, because of it."""

from __future__ import annotations

import fcntl
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

import unidle
from unidle.cli.main import run as command
from unidle.tasks.web.site.serve import Serving, in_background


@pytest.fixture(scope="module")
def crawled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A run on a small site, without an evaluation."""
    runs = tmp_path_factory.mktemp("runs")
    with in_background(Serving(sites=1, pages=20, links=5, page_bytes=500)) as server:
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


def evaluated(folder: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """What is said beside the result of an evaluation, which must be there."""
    capsys.readouterr()
    assert command(["eval", str(folder), "--episodes", "1", "--json"]) == 0
    told = capsys.readouterr()
    assert json.loads(told.out)["episodes"] == 1
    return told.err


def test_the_report_of_a_run_that_trains_is_left_alone(crawled: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = (crawled / "report.html").read_bytes()
    with (crawled / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        evaluated(crawled, capsys)
    assert not (crawled / "page_graph.json").exists()
    assert (crawled / "report.html").read_bytes() == report


def test_a_folder_that_cannot_be_written_to_costs_one_sentence(
    crawled: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("page_graph.json.tmp", "report.html.tmp"):
        in_the_way = crawled / name
        in_the_way.mkdir()  # chmod would not stop root
        said = evaluated(crawled, capsys)
        in_the_way.rmdir()
        assert said == f"unidle: The report in {crawled} was not updated (Is a directory); make the folder writable.\n"
    assert evaluated(crawled, capsys) == ""
    assert (crawled / "page_graph.json").exists()
