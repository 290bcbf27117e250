"""benchmarks/side_by_side.py and run_queue.py: runs over seeds, of which none is lost, and what they show."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import seeded_runs
from gymnasium import spaces
from paths import BENCHMARKS
from seeded_runs import DIES, RAISES
from small_envs import Counting, counting_length, counting_reward

sys.path.append(str(BENCHMARKS))
import side_by_side
from run_queue import Job, Seconds, run_all

CORE = min(os.sched_getaffinity(0))
TASK = {"timesteps": 100, "lr": 0.1, "seeds": 3}
SIDES = {"unidle": seeded_runs.train, "sb3": seeded_runs.train_sb3}


class OneStep(gymnasium.Env):
    """A single step with a reward of 7."""

    observation_space = spaces.Box(0, 1, (1,), np.float32)
    action_space = spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[np.ndarray, dict]:
        return np.zeros(1, np.float32), {}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict]:
        return np.zeros(1, np.float32), 7.0, True, False, {}


def outcomes(jobs: list[Job], limit: float = float("inf"), seconds: Seconds | None = None, **sides: Any) -> Any:
    """(job, return) of each run that ended, on one core."""
    ended = run_all(jobs, sides or SIDES, "cpu", [CORE], limit, seconds or Seconds())
    return [(job, outcome and outcome["return"]) for job, outcome in ended]


def command(
    tasks: dict[str, Any], folder: Path, monkeypatch: pytest.MonkeyPatch, *flags: str, sides: Any = SIDES
) -> Any:
    """Run the command of a benchmark and return the JSON."""
    monkeypatch.setattr(sys, "argv", ["seeds.py", "--jobs", "1", "--out", str(folder), *flags])
    side_by_side.main("", tasks, sides, lambda _: OneStep())
    return json.loads((folder / "seeds.json").read_text())


# -- the queue ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("failing", [RAISES, DIES])
def test_failed_run_costs_no_other_run(failing: str) -> None:
    first, failed, last = Job("a", "unidle", 1), Job(failing, "unidle", 1), Job("a", "sb3", 1)
    assert outcomes([first, failed, last]) == [(first, 101.0), (failed, None), (last, 101.01)]


def test_run_is_pinned_to_its_core() -> None:
    [(_, outcome)] = run_all([Job("a", "unidle", 1)], SIDES, "cpu", [CORE], 60, Seconds())
    assert outcome is not None
    assert outcome["training"] == [CORE]


def test_run_that_would_end_late_is_not_started_and_shorter_one_is() -> None:
    long, short, seconds = Job("long", "unidle", 1), Job("short", "unidle", 1), Seconds()
    seconds.add("long", "unidle", 1000.0)
    seconds.add("short", "unidle", 1.0)
    waiting = [long, short]
    assert outcomes(waiting, 60, seconds) == [(short, 101.0)]
    assert waiting == [long]


def test_run_of_unknown_length_is_started_in_first_half_only() -> None:
    jobs = [Job("a", "unidle", 1), Job("b", "unidle", 1)]
    assert [job for job, _ in outcomes(jobs, 0.9, unidle=seeded_runs.slow)] == [Job("a", "unidle", 1)]


def test_longest_run_of_task_is_expected_for_side_without_run() -> None:
    seconds = Seconds()
    for took in (3.0, 9.0, 5.0):
        seconds.add("a", "sb3", took)
    seconds.add("a", "unidle", 2.0)
    assert seconds.expected(Job("a", "sb3", 9)) == 9.0
    assert seconds.expected(Job("a", "unidle", 9)) == 2.0
    assert seconds.expected(Job("b", "unidle", 9)) is None
    del seconds.longest["a", "unidle"]
    assert seconds.expected(Job("a", "unidle", 9)) == 9.0


# -- the command -------------------------------------------------------------------------------------------------------


def test_finished_runs_are_kept_and_missing_ones_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = command({"a": TASK}, tmp_path, monkeypatch, "--seeds", "1")["tasks"]["a"]
    first["unidle"]["1"] = 55.0
    (tmp_path / "seeds.json").write_text(json.dumps({"tasks": {"a": first}}))
    row = command({"a": TASK}, tmp_path, monkeypatch)["tasks"]["a"]
    assert row["unidle"] == {"1": 55.0, "2": 102.0, "3": 103.0}
    assert row["sb3"] == {"1": 101.01, "2": 102.02, "3": 103.03}
    assert row["seeds"] == 3
    assert row["random"] == 7.0
    assert (row["unidle_worst_decile"], row["sb3_mean"]) == (55.0, pytest.approx(102.02))
    [machine] = row["machines"]
    assert {"date", "cpu", "sources"} <= machine.keys()


def test_earlier_row_stays_until_all_seeds_of_new_one_are_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    earlier = command({"a": TASK}, tmp_path, monkeypatch)["tasks"]["a"]
    changed = {"a": {**TASK, "lr": 0.2}}
    late = {**SIDES, "sb3": seeded_runs.slow}
    result = command(changed, tmp_path, monkeypatch, "--seconds", "0.9", sides=late)
    assert result["tasks"]["a"] == earlier
    assert result["unfinished"]["a"]["settings"] == {"timesteps": 100, "lr": 0.2}
    result = command(changed, tmp_path, monkeypatch)
    assert result["tasks"]["a"]["settings"] == {"timesteps": 100, "lr": 0.2}
    assert result["unfinished"] == {}


def test_finished_row_stays_as_it_is_while_more_seeds_are_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = command({"a": TASK}, tmp_path, monkeypatch, "--seeds", "1")["tasks"]["a"]
    late = {**SIDES, "sb3": seeded_runs.slow}
    result = command({"a": TASK}, tmp_path, monkeypatch, "--seconds", "0.9", sides=late)
    assert result["tasks"]["a"] == first
    assert len(result["unfinished"]["a"]["unidle"]) > 1


def test_judge_judges_finished_rows_by_their_returns_without_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = command({"a": TASK}, tmp_path, monkeypatch)
    row, unfinished = result["tasks"]["a"], {"a": {"seeds": 9, "unidle": {"1": 5.0}, "sb3": {}}}
    stale = {**row, "margin": -50.0, "no_worse": not row["no_worse"], "unidle": {"1": 0.0, "2": 0.0, "3": 0.0}}
    (tmp_path / "seeds.json").write_text(json.dumps({"tasks": {"a": stale}, "unfinished": unfinished}))
    judged = command({"a": TASK}, tmp_path, monkeypatch, "--judge", sides={})
    assert judged["unfinished"] == unfinished
    judged = judged["tasks"]["a"]
    assert (judged["unidle_iqm"], judged["no_worse"]) == (0.0, False)
    assert judged["margin"] == pytest.approx(-0.02 * (judged["sb3_iqm"] - 7.0))
    assert {name: judged[name] for name in ("settings", "sb3", "machines")} == {
        name: row[name] for name in ("settings", "sb3", "machines")
    }


def test_prioritised_replay_is_compared_with_same_runs_of_sb3(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tasks = {"a": TASK, "a prioritised": {**TASK, "per": True}}
    rows = command(tasks, tmp_path, monkeypatch)["tasks"]
    assert rows["a prioritised"]["sb3"] == rows["a"]["sb3"]
    assert rows["a prioritised"]["seconds"]["sb3"] == rows["a"]["seconds"]["sb3"]
    assert set(rows["a prioritised"]["unidle"]) == {"1", "2", "3"}


def test_failed_runs_are_named_and_their_row_is_unfinished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SystemExit, match=r"2 runs failed: raises unidle seed 1, raises sb3 seed 1; the same command"):
        command({RAISES: TASK, "a": TASK}, tmp_path, monkeypatch, "--seeds", "1")
    result = json.loads((tmp_path / "seeds.json").read_text())
    assert set(result["tasks"]) == {"a"}


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--jobs", "1000"], r"each job needs a core, and there are \d+; choose --jobs from 1 to \d+\."),
        (["--seeds", "0"], r"--seeds must be at least 1\."),
    ],
)
def test_impossible_flags_are_refused(
    flags: list[str], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        command({"a": TASK}, tmp_path, monkeypatch, *flags)
    assert re.search(words, capsys.readouterr().err)


def test_row_is_not_continued_on_another_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command({"a": TASK}, tmp_path, monkeypatch, "--seeds", "1")
    with pytest.raises(SystemExit, match="were on cpu; give --device cpu"):
        command({"a": TASK}, tmp_path, monkeypatch, "--device", "cuda")


# -- returns -----------------------------------------------------------------------------------------------------------


def test_returns_of_training_are_means_of_episodes_that_ended_in_each_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(side_by_side.TrainingReturns, "ended", [])
    env, steps, expected = side_by_side.TrainingReturns(Counting()), 0, {}
    for seed in range(4):
        env.reset(seed=seed)
        ended = False
        while not ended:
            *_, terminated, truncated, _ = env.step(0)
            ended = terminated or truncated
        length = counting_length(seed)
        steps += length
        expected[steps] = sum(counting_reward(seed, step) for step in range(1, length + 1))
    parts = side_by_side.TrainingReturns.by_part(10 * steps)
    assert parts[0] == pytest.approx(np.mean(list(expected.values())), abs=0.01)
    assert parts[1:] == [None] * 9


@pytest.mark.parametrize(
    ("values", "iqm", "worst"),
    [([4.0, 1, 2, 3], 2.5, 1.0), ([1.0, 2, 3], 2.0, 1.0), (range(20), 9.5, 0.5), ([5.0] * 9 + [-100], 5.0, -100.0)],
)
def test_inter_quartile_mean_and_worst_decile(values: Any, iqm: float, worst: float) -> None:
    assert side_by_side.iqm(np.array(values, float)) == pytest.approx(iqm)
    assert side_by_side.worst_decile(np.array(values, float)) == worst


@pytest.mark.parametrize(("loss", "no_worse"), [(1.9, True), (2.1, False)])
def test_margin_is_two_percent_of_gain_over_random(loss: float, no_worse: bool) -> None:
    verdict = side_by_side.compare([300.0 - loss] * 5, [300.0] * 5, random=200.0)
    assert verdict["margin"] == pytest.approx(-2.0)
    assert verdict["no_worse"] is no_worse


def test_difference_beyond_margin_is_shown_and_smaller_one_is_not_worse() -> None:
    sb3 = [100.0 + 0.1 * seed for seed in range(10)]
    same, lower = (side_by_side.compare([value - loss for value in sb3], sb3, 0.0) for loss in (0.0, 20.0))
    assert same["no_worse"]
    assert same["lower_95"] < 0 < same["upper_95"]
    assert not lower["no_worse"]
    assert lower["difference"] == pytest.approx(-20)
