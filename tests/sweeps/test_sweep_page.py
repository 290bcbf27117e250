"""The page of a sweep."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from unidle.config import Config, recipe_for
from unidle.sweeps.folder import SweepFolder
from unidle.sweeps.objectives import Objective
from unidle.sweeps.page import write_sweep_page
from unidle.sweeps.parallel import parallel_coordinates
from unidle.sweeps.pareto import pareto_chart
from unidle.sweeps.plan import Plan
from unidle.sweeps.records import TrialRecord, best_of, front_of
from unidle.sweeps.space import read_space

SPACE: dict[str, Any] = {
    "gamma": {"low": 0.9, "high": 0.999, "log": True, "one_minus": True},
    "n_steps": {"low": 16, "high": 64, "power_of_2": True},
    "net_arch": [[64], [64, 64], [256, 256]],
}


@pytest.fixture
def folder(tmp_path: Path) -> SweepFolder:
    config = Config(recipe_for("ppo", n_envs=4)).with_run(env="<b>CartPole</b>")
    return SweepFolder(tmp_path, Plan(trials=9), read_space(SPACE, config), config)


def trial(folder: SweepFolder, number: int, value: float | None, state: Any = "finished") -> TrialRecord:
    settings = {"gamma": 0.99, "n_steps": 32, "net_arch": [64, 64]}
    parameters = {"one_minus_gamma": 0.01, "log2_n_steps": 5, "net_arch": "64,64"}
    error = "no <licence>" if state == "failed" else None
    values = () if value is None else (value,)
    return TrialRecord(number, state, values, settings, folder.trial(number), 61.0, {}, parameters, error)


def test_page_lists_the_trials_best_first_with_links(folder: SweepFolder) -> None:
    folder.trial(1).mkdir()
    (folder.trial(1) / "report.html").touch()
    trials = [trial(folder, 0, 10.0), trial(folder, 1, 30.0), trial(folder, 2, 40.0, "pruned")]
    trials.append(trial(folder, 3, None, "failed"))
    page = write_sweep_page(folder, trials, {"one_minus_gamma": 0.75, "net_arch": 0.25}).read_text()
    rows = re.findall(r'<th scope="row">(.*?)</th><td>(.*?)</td><td>(.*?)</td>', page)
    assert rows == [
        ('<a href="trial-1/report.html">1</a>', "30.00", "finished"),
        ("0", "10.00", "finished"),
        ("2", "40.00", "pruned"),
        ("3", "–", "failed"),
    ]
    assert "<td>0.99</td><td>32</td><td>64,64</td>" in page
    assert re.search(r">gamma</text><rect .*?>75 %</text>", page)
    assert "<b>CartPole</b>" not in page
    assert "no &lt;licence&gt;" in page


def of_two(folder: SweepFolder, number: int, mean_return: float, seconds: float) -> TrialRecord:
    objectives: tuple[Objective, ...] = ("return", "time-to-target")
    return replace(trial(folder, number, 0.0), values=(mean_return, seconds), objectives=objectives)


def test_front_are_the_trials_that_none_is_better_than(folder: SweepFolder) -> None:
    values = [(10.0, 60.0), (20.0, 90.0), (9.0, 60.0), (20.0, 95.0), (5.0, 30.0), (20.0, 90.0)]
    trials = [of_two(folder, number, *each) for number, each in enumerate(values)]
    assert [each.number for each in front_of(trials)] == [1, 5, 0, 4]
    assert front_of([trial(folder, 0, 3.0), trial(folder, 1, 4.0)])[0].number == 1
    assert front_of([trial(folder, 0, None, "failed")]) == []


def test_page_of_two_objectives_shows_the_trade_off(folder: SweepFolder) -> None:
    folder.plan = Plan(trials=9, objectives=("return", "time-to-target"))
    values = [(10.0, 60.0), (9.0, 75.0), (5.0, 30.0), (4.0, 1e9 + 1)]
    trials = [of_two(folder, number, *each) for number, each in enumerate(values)]
    page = write_sweep_page(folder, trials, {}).read_text()
    rows = re.findall(r'<th scope="row">(.*?)</th><td>(.*?)</td><td>(.*?)</td><td>(.*?)</td>', page)
    assert rows == [
        ("0", "10.00", "1 min 00 s", "finished, Pareto front"),
        ("1", "9.00", "1 min 15 s", "finished"),
        ("2", "5.00", "30.0 s", "finished, Pareto front"),
        ("3", "4.00", "not reached", "finished"),
    ]
    chart = ElementTree.fromstring(pareto_chart(trials))
    dots = chart.findall("{*}circle")
    assert [dot.get("class") for dot in dots] == ["fill c0", "fill c5", "fill c0"]  # one did not reach the target
    assert float(dots[0].get("cy", "")) < float(dots[1].get("cy", "")) < float(dots[2].get("cy", ""))
    assert float(dots[2].get("cx", "")) < float(dots[0].get("cx", "")) < float(dots[1].get("cx", ""))
    assert "Return over time to the target" not in page
    assert "return over time to the target" in page


def test_page_without_a_finished_trial_says_so(folder: SweepFolder) -> None:
    page = write_sweep_page(folder, [trial(folder, 0, None, "running")], {}).read_text()
    assert "No trial has finished yet." in page


def test_lines_of_parallel_coordinates_are_on_the_scale_that_is_searched(folder: SweepFolder) -> None:
    trials = [trial(folder, 0, 10.0), trial(folder, 1, 30.0), trial(folder, 2, 20.0), trial(folder, 3, None, "failed")]
    svg = ElementTree.fromstring(parallel_coordinates(folder.space, trials))
    lines = svg.findall("{*}polyline")
    heights = [[float(point.split(",")[1]) for point in line.get("points", "").split()] for line in lines]
    low, high = 310, 62
    middle = (low + high) / 2
    assert heights[0] == [middle, middle, middle, low]  # 0.99 is in the middle of 0.9 and 0.999
    assert [line[-1] for line in heights] == [low, middle, high]
    assert [line.get("class") for line in lines] == ["line faint c5", "line faint c5", "line c1"]


def test_best_trial_is_the_finished_one_with_the_highest_value(folder: SweepFolder) -> None:
    trials = [trial(folder, 0, -5.0), trial(folder, 1, -5.0), trial(folder, 2, 9.0, "pruned")]
    best = best_of(trials)
    assert best is not None
    assert best.number == 0
    assert best_of([trials[2]]) is None


def test_of_equally_good_trials_the_one_that_learned_sooner_is_best(folder: SweepFolder) -> None:
    curves = {0: [20.0, 90.0, 500.0], 1: [200.0, 500.0, 500.0], 2: [30.0, 500.0, 500.0]}
    trials = [
        replace(trial(folder, number, 500.0), evaluations=dict(enumerate(curve))) for number, curve in curves.items()
    ]
    best = best_of(trials)
    assert best is not None
    assert best.number == 1
