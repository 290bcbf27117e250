"""`unidle diagnose` on real jobs with a planted cause, and its account of a run."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hand_made import facts, profile

from unidle.config import Config, Recipe, Run
from unidle.errors import UsageError
from unidle.report.diagnosis import RECIPE_REMARK, lines, result
from unidle.timeline import PHASES
from unidle.tuning.advice_verdict import judge
from unidle.tuning.diagnose import Diagnosis, shortened
from unidle.tuning.diagnose_run import gpu_table, thread_table
from unidle.tuning.facts import Table
from unidle.tuning.profile import Pace

TESTS = Path(__file__).parent.parent
SMALL = "--preset classic --n-envs 4 --n-steps 32 --batch-size 32 --n-epochs 2 --network-arch 16,16 --seconds 1"


def diagnose(words: str, *, one_core: bool = False) -> dict[str, Any]:
    pin = f"import os; os.sched_setaffinity(0, {{{min(os.sched_getaffinity(0))}}}); " if one_core else ""
    code = f"{pin}from unidle.cli.main import main; main({['diagnose', *words.split(), '--json']!r})"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(TESTS)},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.stdout, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize(
    ("job", "cause"),
    [
        (f"--env planted_envs:Sleeping {SMALL} --workers 1", "environment waits"),
        (f"--env planted_envs:Burning {SMALL} --workers 1", "environment computes"),
        (f"--env planted_envs:Cheap {SMALL} --batch-size 2", "small pieces"),
    ],
)
def test_a_planted_cause_is_named(job: str, cause: str) -> None:
    found = diagnose(job)
    assert found.get("cause") == cause, found.get("verdict", found)
    table = found["table"]
    assert table["busy"] + sum(table["idle"].values()) + table["unattributed"] == pytest.approx(1.0)


def test_a_healthy_job_has_nothing_to_gain() -> None:
    # On one core nobody can help learning, and a batch of 512 is work enough.
    words = "--env planted_envs:Cheap --preset classic --n-envs 8 --n-steps 128 --batch-size 512 --n-epochs 4"
    found = diagnose(f"{words} --network-arch 512,512 --seconds 1", one_core=True)
    assert found.get("cause") == "nothing to gain", found.get("verdict", found)


def test_nothing_is_left_of_the_run(tmp_path: Path) -> None:
    from unidle.cli.main import run

    before = set(Path.cwd().iterdir())
    assert run(["diagnose", "--env", "CartPole-v1", *SMALL.split(), "--seconds", "1", "--runs-dir", str(tmp_path)]) == 0
    assert list(tmp_path.iterdir()) == []
    assert set(Path.cwd().iterdir()) == before


@pytest.mark.parametrize("seconds", ["0", "-5", "100000"])
def test_a_senseless_time_is_refused(seconds: str) -> None:
    from unidle.cli.commands import diagnose_command

    with pytest.raises(UsageError, match="between 1 and 3600"):
        diagnose_command(["--env", "CartPole-v1", "--preset", "classic", "--seconds", seconds])


# -- the account of a run -------------------------------------------------------------------------------------------


def record(wall: float, **spent: float) -> dict[str, Any]:
    return {"wall": wall, **{f"time/{name}": spent.get(name, 0.0) for name in PHASES}}


def test_the_trainers_table_is_of_what_lies_between_two_records() -> None:
    first = record(100.0, environment=90.0, learn=10.0)
    table = thread_table(first, record(110.0, environment=96.0, learn=13.0))
    assert table == Table(False, 0.0, {"environment": 0.6, "learn": 0.3}, pytest.approx(0.1))


def stretch(length: float, busy: float, **idle: float) -> dict[str, Any]:
    return {"length": length, "gpu": {"busy": busy, "idle": idle, "unattributed": 1 - busy - sum(idle.values())}}


def test_the_gpus_table_weighs_stretches_by_their_length_and_leaves_out_the_first() -> None:
    table = gpu_table([stretch(5.0, 0.0), stretch(1.0, 0.2, environment=0.7), stretch(3.0, 0.6, sync=0.4)])
    assert table is not None
    assert table.busy == pytest.approx(0.5)
    assert table.idle == pytest.approx({"environment": 0.175, "sync": 0.3})
    assert table.busy + sum(table.idle.values()) + table.unattributed == pytest.approx(1.0)


def test_without_a_gpu_the_meter_has_no_table_of_it() -> None:
    assert gpu_table([]) is None
    assert gpu_table([{"length": 1.0, "gpu": None}, {"length": 1.0}]) is None


def test_long_iterations_are_shortened_and_minibatches_stay_whole() -> None:
    # An iteration of 40 + 20 s, of 16 × 100 steps in minibatches of 400: 100 steps can be halved twice.
    slow = profile(step_seconds=0.1, stepping=(dataclasses.replace(profile().stepping[0], seconds=40.0),))
    slow = dataclasses.replace(slow, collecting=40.0, pace=Pace(0.002, 20.0))
    config = Config(Recipe(n_envs=16, n_steps=100, batch_size=400), facts().config.engine, Run(env="any"))
    assert shortened(config, slow, 35.0).recipe.n_steps == 50
    assert shortened(config, slow, 1.0).recipe.n_steps == 25
    assert shortened(config, slow, 100.0).recipe.n_steps == 100
    whole = dataclasses.replace(config, recipe=dataclasses.replace(config.recipe, batch_size=1600))
    assert shortened(whole, slow, 1.0).recipe.n_steps == 100


# -- how it is said -------------------------------------------------------------------------------------------------


def test_the_report_has_the_verdict_first_and_the_two_lists_apart() -> None:
    given = facts(table=Table(False, 0.0, {"environment": 0.6, "learn": 0.3}, 0.1))
    said = list(lines(Diagnosis(given, judge(given), 5, 50)))
    assert said[0] == judge(given).sentence
    assert "100 %" in next(line for line in said if line.strip().startswith("100"))
    engine = next(i for i, line in enumerate(said) if line.startswith("Engine changes"))
    recipe = next(i for i, line in enumerate(said) if line.startswith("Recipe changes"))
    assert RECIPE_REMARK in said[recipe]
    assert any("--overlap strict" in line for line in said[recipe:])
    assert not any("--overlap strict" in line for line in said[engine:recipe])
    assert any("5 iterations of 50 steps instead of 100" in line for line in said)


def test_what_is_doubtful_is_called_so() -> None:
    given = facts(seconds=20.0)  # its parts make 6
    assert any(line.startswith("note: by its parts") for line in lines(Diagnosis(given, judge(given), 5, 100)))
    crowded = facts(readings={"others_cores": 2.0})
    assert any(line.startswith("note: other programs") for line in lines(Diagnosis(crowded, judge(crowded), 5, 100)))
    assert not any(line.startswith("note:") for line in lines(Diagnosis(facts(), judge(facts()), 5, 100)))


def test_the_result_is_plain_data_with_everything_in_it() -> None:
    found = json.loads(json.dumps(result(Diagnosis(facts(), judge(facts()), 5, 100))))
    assert found["cause"] == "environment computes"
    assert found["profile"]["stepping"][0]["workers"] == 4
    assert {one["remark"] for one in found["recipe_changes"]} == {RECIPE_REMARK}
