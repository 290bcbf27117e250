"""The page of a group, compared with the files of its runs."""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest
from dashboard_runs import evaluation, iteration, make_run, write_lines
from mutations import mutations
from report_pages import Page

import unidle
from unidle.engine.checkpoint.run_folder import RunFolder
from unidle.formatting import score
from unidle.groups.page import write_group_page
from unidle.groups.statistics import summarise
from unidle.report.statistics import bootstrap_interval

MARKUP = "<img src=x onerror=alert(1)>"
RETURNS = (120.0, 80.0, 200.0, 160.0)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A group folder with two short runs on CartPole."""
    group = tmp_path_factory.mktemp("groups") / "group"
    for seed in (1, 2):
        unidle.train(
            "CartPole-v1",
            seed=seed,
            n_envs=2,
            n_steps=32,
            net_arch=(8,),
            batch_size=32,
            n_epochs=1,
            timesteps=256,
            eval_every=64,
            eval_episodes=1,
            eval_workers=0,
            device="cpu",
            subproc=False,
            runs_dir=str(group),
            run_name=f"seed-{seed}",
            quiet=True,
        )
    return group


@pytest.fixture
def group(tmp_path: Path) -> Path:
    """A group folder with four finished runs, whose evaluations are RETURNS."""
    for i, mean in enumerate(RETURNS):
        run = make_run(tmp_path / "group", f"seed-{i}", seed=i)
        halfway = evaluation(2, **{"eval/return_mean": mean / 2})
        records = [iteration(1), iteration(2), halfway, iteration(3), iteration(4)]
        write_lines(run / "metrics.jsonl", [*records, evaluation(4, **{"eval/return_mean": mean})])
    return tmp_path / "group"


def runs_of(group: Path) -> list[Path]:
    return sorted(path for path in group.glob("*") if path.is_dir())


def page_of(group: Path, runs: Sequence[Path] | None = None, failures: Mapping[str, str] | None = None) -> Page:
    path = write_group_page(group, runs_of(group) if runs is None else runs, failures)
    assert path == group / "report.html"
    return Page(path.read_text(encoding="utf-8"))


def row(page: Page, name: str) -> list[str]:
    """The cells of a run's row in the first table that has one."""
    return next(cells for cells in page.rows if cells[0] == name)


def test_trained_runs_are_on_their_page(trained: Path) -> None:
    page, summary = page_of(trained), summarise(runs_of(trained))
    assert page.of("h1") == ["group"]
    assert page.of("b")[:2] == ["CartPole-v1", "ppo"]
    assert page.figures()["Runs"] == ("2", "2 finished")
    assert page.figures()["Steps"] == ("512", "of 512 planned")
    assert page.figures()["Best"][0] == score(summary["final_evaluation"]["best"])
    assert page.figures()["Interquartile mean"] == (
        score(summary["final_evaluation"]["iqm"]),
        "an interval needs 3 runs",
    )
    for name in ("seed-1", "seed-2"):
        assert ("href", f"{name}/report.html") in page.attributes
        assert row(page, name)[3:5] == ["finished", "256"]
        assert row(page, name)[6] == name.removeprefix("seed-")
    assert "The runs differ only in their seeds." in page.of("p", "note")


def test_figures_over_runs_match_their_evaluations(group: Path) -> None:
    figures = page_of(group).figures()
    low, high = bootstrap_interval(np.array(RETURNS))
    assert figures["Interquartile mean"] == ("140.00", f"95 % interval {score(low)} to {score(high)}")
    assert figures["Median"] == ("140.00", f"mean 140.00 ± {score(np.std(RETURNS, ddof=1))}")
    assert figures["Best"] == ("200.00", "seed-2")
    assert figures["Worst"] == ("80.00", "seed-1")
    assert figures["Wall time"][0] == "4.0 s"
    assert figures["Steps per second"][0] == "4k"


def test_runs_are_sorted_by_final_evaluation(group: Path) -> None:
    page = page_of(group)
    names = [cells[0] for cells in page.rows if cells[0].startswith("seed-")]
    assert names == ["seed-2", "seed-3", "seed-0", "seed-1"]
    assert row(page, "seed-2") == ["seed-2", "200.00", "200.00", "finished", "4,000", "4.0 s", "2"]


def test_all_curves_and_their_mean_are_plotted_over_steps_and_wall_time(group: Path) -> None:
    page = page_of(group)
    titles = page.of("text", "chart-title")
    assert titles == ["Evaluation return over steps", "Evaluation return over wall time"]
    for name in ("seed-0", "seed-1", "seed-2", "seed-3"):
        assert page.of("title").count(name) == 2  # the tooltips of its two curves
        assert name in page.of("text", "chart-name")
    tips = page.of("title")
    assert "environment steps of each run: 2,000\ninterquartile mean: 70" in tips
    assert "wall time (s): 4\ninterquartile mean: 140" in tips
    assert [value for _, value in page.attributes if value.startswith("band")] == ["band c0"] * 2


def test_finished_runs_count_with_their_last_return_until_the_longest_ends(tmp_path: Path) -> None:
    for i, seconds in enumerate((4, 4, 8)):
        run = make_run(tmp_path, f"seed-{i}", seconds=4)
        evaluations = [evaluation(s, wall=s * seconds / 4, **{"eval/return_mean": 10.0 * i}) for s in (1, 4)]
        write_lines(run / "metrics.jsonl", [*(iteration(s, wall=s * seconds / 4) for s in (1, 2, 3, 4)), *evaluations])
    assert "wall time (s): 8\ninterquartile mean: 10" in page_of(tmp_path).of("title")


def test_training_return_is_plotted_without_evaluations(group: Path) -> None:
    for run in runs_of(group):
        write_lines(run / "metrics.jsonl", [iteration(i) for i in (1, 2, 3)])
    page = page_of(group)
    assert page.of("text", "chart-title")[0] == "Training return over steps"
    assert "environment steps of each run: 3,000\ninterquartile mean: 23" in page.of("title")
    assert page.figures()["Interquartile mean"][0] == "23.00"
    assert row(page, "seed-0") == ["seed-0", "23.00", "stopped", "3,000", "3.0 s", "0"]


def test_runs_beyond_the_palette_share_a_colour_and_leave_the_legend(tmp_path: Path) -> None:
    for i in range(9):
        make_run(tmp_path, f"seed-{i}", seed=i)
    page = page_of(tmp_path)
    assert page.of("text", "chart-name") == ["interquartile mean"] * 2
    assert page.of("title").count("seed-8") == 2


def test_one_run_is_plotted_without_a_mean(group: Path) -> None:
    page = page_of(group, runs_of(group)[:1])
    assert "environment steps of each run: 4,000\nseed-0: 120" in page.of("title")
    assert "interquartile mean" not in page.of("text", "chart-name")
    assert page.figures()["Median"] == ("120.00", "mean 120.00")


def test_settings_that_differ_are_listed(group: Path) -> None:
    make_run(group, "seed-9", seed=9, learning_rate=0.01, target_return=50.0)
    page = page_of(group)
    heads = next(cells for cells in page.rows if "learning_rate" in cells)
    assert heads == ["run", "learning_rate", "target_return"]
    assert ["seed-9", "0.01", "50.0"] in page.rows
    assert ["seed-0", "0.0003", "none"] in page.rows
    assert "The runs differ only in their seeds." not in page.of("p", "note")


def test_failed_run_says_why_and_counts_with_what_it_reached(group: Path) -> None:
    page = page_of(group, failures={"seed-2": "The loss is NaN; lower the learning rate."})
    assert row(page, "seed-2")[3] == "failed"
    assert page.of("div", "problem") == ["The loss is NaN; lower the learning rate."]
    assert page.figures()["Runs"] == ("4", "3 finished, 1 failed")
    assert page.figures()["Best"] == ("200.00", "seed-2")


def test_run_that_is_training_is_running(group: Path) -> None:
    folder = RunFolder(group / "seed-1")
    folder.lock()
    try:
        assert row(page_of(group), "seed-1")[3] == "running"
    finally:
        folder.unlock()
    assert row(page_of(group), "seed-1")[3] == "finished"


def test_missing_empty_and_damaged_runs_have_rows(group: Path) -> None:
    (group / "seed-4").mkdir()
    make_run(group, "seed-5")
    (group / "seed-5" / "config.yaml").write_text("{")
    make_run(group, "seed-6")
    (group / "seed-6" / "metrics.jsonl").unlink()
    page = page_of(group, [*runs_of(group), group / "seed-7"])
    assert row(page, "seed-4")[3] == "not started"
    assert row(page, "seed-5")[3] == "unreadable"
    assert row(page, "seed-6")[1:5] == ["–", "–", "stopped", "0"]
    assert row(page, "seed-7")[3] == "missing"
    problems = page.of("div", "problem")
    assert [text.split(" ")[-1] for text in problems][-1] == "folder."
    assert len(problems) == 3
    assert page.figures()["Interquartile mean"][0] == "140.00"


@pytest.mark.parametrize("names", [[], ["seed-1"], ["seed-1", "seed-2"]])
def test_group_before_its_first_records_has_a_page(tmp_path: Path, names: list[str]) -> None:
    page = page_of(tmp_path, [tmp_path / name for name in names])
    assert page.figures()["Runs"][0] == str(len(names))
    assert page.of("p", "note") == ["No run has recorded an iteration yet."]


def test_names_and_settings_are_escaped(tmp_path: Path) -> None:
    run = make_run(tmp_path / MARKUP.replace("/", ""), f"{MARKUP} #?%", env=MARKUP, run_name=MARKUP)
    make_run(run.parent, "other", env='"><script>')
    (run / "report.html").write_text("")
    text = write_group_page(run.parent, [run, run.parent / "other"], {run.name: MARKUP}).read_text(encoding="utf-8")
    page = Page(text)
    assert "<img" not in text
    assert "<script" not in text
    assert ("href", "%3Cimg%20src%3Dx%20onerror%3Dalert%281%29%3E%20%23%3F%25/report.html") in page.attributes
    assert page.of("div", "problem") == [MARKUP]


def test_page_needs_nothing_but_itself(group: Path) -> None:
    text = write_group_page(group, runs_of(group)).read_text(encoding="utf-8")
    assert not re.search(r"<script|<link|<img|src=|url\((?!#)|https?://(?!www\.w3\.org/2000/svg)", text)
    assert "default-src 'none'" in text


@pytest.mark.parametrize("name", ["config.yaml", "metrics.jsonl"])
def test_page_of_fuzzed_run_is_written(trained: Path, tmp_path: Path, name: str) -> None:
    group = Path(shutil.copytree(trained, tmp_path / "group"))
    damaged = group / "seed-1" / name
    for what, content in mutations(damaged.read_bytes(), is_text=True):
        damaged.write_bytes(content)
        page = page_of(group, [group / "seed-1", group / "seed-2"])
        assert row(page, "seed-2")[3] == "finished", what
        assert "seed-1" in [cells[0] for cells in page.rows], what
