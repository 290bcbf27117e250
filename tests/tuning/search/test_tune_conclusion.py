"""The closing lines of `unidle tune` and its command to train with."""

from __future__ import annotations

import shlex
from dataclasses import replace

from tuned_jobs import JOB, SITUATION

from unidle.cli.job import job_of
from unidle.cli.tune import _train_command, _TuneFlags
from unidle.report.terminal.tune import conclusion, outcome_row
from unidle.tuning.search.changes import Change
from unidle.tuning.search.interval import Interval
from unidle.tuning.search.outcomes import Outcome, Tuned


def test_train_command_keeps_flags_that_the_engine_file_does_not_replace() -> None:
    kept_flags = ["--env", "CartPole-v1", "--preset", "classic", "--env-kwargs", "{render_mode: null}", "--seed=3"]
    dropped_flags = [
        "--workers",
        "2",
        "--threads=2",
        "--subproc",
        "--json",
        "--budget",
        "20s",
        "--no-graphs",
        "--allow-recipe-change",
        "--out",
        "my file",
    ]
    argv = [*kept_flags[:2], *dropped_flags, *kept_flags[2:]]
    job = job_of(_TuneFlags, argv, "tune")
    tuned = Tuned(job.config)
    assert shlex.split(_train_command(argv, job, tuned)) == ["unidle", "train", *kept_flags, "--engine", "my file"]
    tuned.config = replace(job.config, recipe=replace(job.config.recipe, n_steps=4096))
    assert shlex.split(_train_command([*argv, "--n-steps", "2048"], job, tuned))[len(kept_flags) + 2 :] == [
        "--n-steps",
        "4096",
        "--engine",
        "my file",
    ]


def test_train_command_for_a_fixed_preset_allows_recipe_changes() -> None:
    argv = ["--env", "CartPole-v1", "--preset", "classic"]
    job = job_of(_TuneFlags, argv, "tune")
    fixed = job.config.with_values({"preset": "mt10-2m"}, "test")
    assert "--allow-recipe-change" in _train_command(argv, job, Tuned(fixed))
    assert "--allow-recipe-change" not in _train_command(argv, job, Tuned(job.config))


def test_conclusion_reports_the_measured_speedup() -> None:
    tuned = Tuned(JOB, [], SITUATION, first_rate=1000.0, rate=1000.0, ended_by="budget", seconds=20.0)
    for ended_by, why in {
        "budget": "No change could be measured in that time; give more --budget.",
        "Ctrl-C": "No change had been measured yet.",
        "": "No change was promising, or none could be measured.",
    }.items():
        printed = conclusion(replace(tuned, ended_by=ended_by), "e.yaml", "unidle train")
        assert printed[1:] == [f"{why} The settings stay the same, and e.yaml was not written."]
    change = Change((("workers", 2),), "workers 1 → 2")
    tuned.outcomes.append(Outcome(change, None, Interval(1.1, 0.9, 1.3), False))
    assert conclusion(tuned, "e.yaml", "unidle train")[1:] == [
        "No change was measurably faster: train as before. The unchanged settings are in e.yaml."
    ]
    tuned.outcomes.append(Outcome(change, 1.8, Interval(2.0, 1.9, 2.1), True))
    tuned.outcomes.append(Outcome(change, 1.8, Interval(1.5, 1.4, 1.6), True))
    tuned.rate = 9000.0  # measured later, on a less busy machine
    assert conclusion(tuned, "e.yaml", "unidle train") == [
        "The budget is used up after 20 seconds.",
        "3.00 times as fast as before with the same recipe (the product of all kept speed-ups).",
        "Wrote the settings to e.yaml; train with:",
        "  unidle train",
    ]
    assert outcome_row(tuned.outcomes[1]).split("  ")[-1] == "kept"
    assert "× 1.80" in outcome_row(tuned.outcomes[1])
    assert "× 2.00 (1.90 … 2.10)" in outcome_row(tuned.outcomes[1])
