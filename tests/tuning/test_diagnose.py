"""`unidle diagnose`: real jobs with a planted cause, time tables of a run, and the report."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from job_facts import facts, profile
from paths import BENCHMARKS

from unidle.cli.main import run as command_line
from unidle.config import Config, PPORecipe, Run
from unidle.config.resolve import resolve_layers
from unidle.config.validate import validated
from unidle.engine.trainer import Trainer
from unidle.errors import TrainingError, UsageError
from unidle.meter.attribution.run_meter import RunMeter
from unidle.report.terminal.diagnose import lines, recipe_remark, result
from unidle.timeline import PHASES
from unidle.tuning import short_run
from unidle.tuning.advice.facts import Table
from unidle.tuning.advice.verdict import verdict_on
from unidle.tuning.diagnose import Diagnosis, _facts, shortened
from unidle.tuning.job import endless
from unidle.tuning.probes import training
from unidle.tuning.probes.probe_results import ProbeResults
from unidle.tuning.probes.profile import Pace
from unidle.tuning.short_run import ShortRun, gpu_table, run_for, thread_table

SMALL = "--preset classic --n-envs 4 --n-steps 32 --batch-size 32 --n-epochs 2 --net-arch 16,16 --seconds 1"


def diagnose_on_one_core(flags: str) -> dict[str, Any]:
    pin = f"import os; os.sched_setaffinity(0, {{{min(os.sched_getaffinity(0))}}}); "
    code = f"{pin}from unidle.cli.main import main; main({['diagnose', *flags.split(), '--json']!r})"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(BENCHMARKS)},
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
        (f"--env slow_envs:Sleeping {SMALL} --n-steps 16 --workers 1", "environment waits"),
        (f"--env slow_envs:Burning {SMALL} --workers 1", "environment computes"),
        (f"--env slow_envs:Cheap {SMALL} --batch-size 2", "small batches"),
    ],
)
def test_diagnose_names_a_planted_cause(job: str, cause: str, capsys: pytest.CaptureFixture[str]) -> None:
    # In this process: a new one would import torch again. Other tests use the same cores, so that a measurement of a
    # second may be wrong; three in a row are not by chance.
    for _ in range(3):
        assert command_line(["diagnose", *job.split(), "--json"]) == 0
        found = json.loads(capsys.readouterr().out)
        if found.get("cause") == cause:
            break
    assert found.get("cause") == cause, found.get("verdict", found)
    table = found["table"]
    assert table["busy"] + sum(table["idle"].values()) + table["unattributed"] == pytest.approx(1.0)


def test_healthy_job_has_no_faster_settings() -> None:
    # On one core nothing can speed up learning, and a batch of 512 is enough work.
    flags = "--env slow_envs:Cheap --preset classic --n-envs 8 --n-steps 256 --batch-size 512 --n-epochs 4"
    found = diagnose_on_one_core(f"{flags} --net-arch 512,512 --seconds 1")
    assert found.get("cause") == "no faster settings", found.get("verdict", found)


def test_diagnose_leaves_no_files(tmp_path: Path) -> None:
    before = set(Path.cwd().iterdir())
    assert command_line(["diagnose", "--env", "CartPole-v1", *SMALL.split(), "--runs-dir", str(tmp_path)]) == 0
    assert list(tmp_path.iterdir()) == []
    assert set(Path.cwd().iterdir()) == before


@pytest.mark.parametrize("seconds", ["0", "-5", "100000"])
def test_seconds_out_of_range_are_refused(seconds: str) -> None:
    from unidle.cli.diagnose import diagnose_command

    with pytest.raises(UsageError, match="between 1 and 3600"):
        diagnose_command(["--env", "CartPole-v1", "--preset", "classic", "--seconds", seconds])


# -- time tables of a run ----------------------------------------------------------------------------------------------


def record(wall: float, **spent: float) -> dict[str, Any]:
    return {"wall": wall, **{f"time/{name}": spent.get(name, 0.0) for name in PHASES}}


def test_thread_table_covers_the_time_between_two_records() -> None:
    first = record(100.0, environment=90.0, learn=10.0)
    table = thread_table(first, record(110.0, environment=96.0, learn=13.0))
    assert table == Table(False, 0.0, {"environment": 0.6, "learn": 0.3}, pytest.approx(0.1))


def segment(length: float, busy: float, **idle: float) -> dict[str, Any]:
    return {"length": length, "gpu": {"busy": busy, "idle": idle, "unattributed": 1 - busy - sum(idle.values())}}


def test_gpu_table_weights_segments_by_length() -> None:
    table = gpu_table([segment(1.0, 0.2, environment=0.7), segment(3.0, 0.6, sync=0.4)])
    assert table is not None
    assert table.busy == pytest.approx(0.5)
    assert table.idle == pytest.approx({"environment": 0.175, "sync": 0.3})
    assert table.busy + sum(table.idle.values()) + table.unattributed == pytest.approx(1.0)


def test_gpu_table_is_none_without_a_gpu() -> None:
    assert gpu_table([]) is None
    assert gpu_table([{"length": 1.0, "gpu": None}, {"length": 1.0}]) is None


def test_long_iterations_are_shortened_to_whole_minibatches() -> None:
    # An iteration of 40 + 20 s, of 16 × 100 steps in minibatches of 400: 100 steps can be halved twice.
    slow = profile(step_seconds=0.1, stepping=(dataclasses.replace(profile().stepping[0], seconds=40.0),))
    slow = dataclasses.replace(slow, collecting=40.0, pace=Pace(0.002, 20.0))
    config = Config(PPORecipe(n_envs=16, n_steps=100, batch_size=400), facts().config.engine, Run(env="any"))
    assert shortened(config, slow, 35.0).recipe.n_steps == 50
    assert shortened(config, slow, 1.0).recipe.n_steps == 25
    assert shortened(config, slow, 100.0).recipe.n_steps == 100
    whole = dataclasses.replace(config, recipe=dataclasses.replace(config.recipe, batch_size=1600))
    assert shortened(whole, slow, 1.0).recipe.n_steps == 100


def test_short_run_keeps_user_settings_and_leaves_no_run_folder(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    built: list[Trainer] = []
    meters: list[dict[str, Any]] = []

    class Meter(RunMeter):
        def __init__(self, say: Callable[[str], None], **options: Any) -> None:
            meters.append(options)
            super().__init__(say, **options)

    def recording_train(*arguments: Any) -> Path:
        built.append(arguments[0])
        return training.train(*arguments)

    monkeypatch.setattr(short_run, "train", recording_train)
    monkeypatch.setattr(short_run, "RunMeter", Meter)
    layers = resolve_layers("classic", None, False, "CartPole-v1")
    wanted = {"env": "CartPole-v1", "n_envs": 2, "n_steps": 16, "batch_size": 32, "trace": True, "tensorboard": True}
    config = endless(validated(layers.with_flags(wanted)))
    found = run_for(config, 0.1, print)
    run = built[0].config.run
    assert (run.tensorboard, run.trace, run.wandb, run.eval_every) == (True, False, False, 0)
    assert not Path(run.runs_dir).exists()
    assert meters[0]["own_share"] > 0.01
    assert found.iterations >= 2
    assert found.seconds > 0
    assert 0 < (found.readings.host_memory or 0.0) < 1
    off = dataclasses.replace(config, run=dataclasses.replace(config.run, tensorboard=False))
    run_for(off, 0.1, print)
    assert built[1].config.run.tensorboard is False


WATCH_SCRIPT = """
import dataclasses, json, pathlib, sys
from unidle.engine.callbacks import RunGpu
from unidle.meter.attribution.run_meter import RunMeter
from unidle.timeline import Timeline
from unidle.tuning.short_run import _SensorMeter

def readings_of(gpu):
    sensor_meter = _SensorMeter(RunMeter(print))
    sensor_meter.begin(pathlib.Path(sys.argv[1]), Timeline(), 0, gpu)
    sensor_meter.end()
    return dataclasses.asdict(sensor_meter.readings())

uuids = [f"{n * 8}-{n * 4}-{n * 4}-{n * 4}-{n * 12}" for n in "123"]
print(json.dumps([readings_of(RunGpu(uuid, lambda: 0)) for uuid in uuids] + [readings_of(None)]))
"""


def test_readings_are_of_the_gpu_trained_on(fake_driver: Callable[..., dict[str, str]], tmp_path: Path) -> None:
    argv = [sys.executable, "-c", WATCH_SCRIPT, str(tmp_path)]
    done = subprocess.run(argv, env=fake_driver(), capture_output=True, text=True, timeout=100, check=False)
    assert done.stdout, done.stderr
    first, second, unknown, none = json.loads(done.stdout)
    assert (first["gpu_memory"], second["gpu_memory"]) == (0.25, 0.25)
    assert set(first["throttled"].values()) == {1.0}
    assert second["throttled"] == {}  # the driver gives no throttle reasons for the second GPU
    for without_gpu in (unknown, none):
        assert (without_gpu["gpu_memory"], without_gpu["throttled"]) == (None, {})
        assert without_gpu["host_memory"] > 0


@pytest.mark.parametrize("iterations", [0, 1])
def test_run_stopped_before_two_iterations_raises(iterations: int, monkeypatch: pytest.MonkeyPatch) -> None:
    class Interrupted(RunMeter):
        """Ctrl-C after the first iteration."""

        def iteration(self, *arguments: Any, **options: Any) -> None:
            os.kill(os.getpid(), signal.SIGINT)

    def stopped(trainer: Trainer) -> Path:
        """Stops before the first iteration, when a signal cannot be timed."""
        trainer.stop()
        return training.train(trainer)

    if iterations:
        monkeypatch.setattr(short_run, "RunMeter", Interrupted)
    else:
        monkeypatch.setattr(short_run, "train", stopped)
    layers = resolve_layers("classic", None, False, "CartPole-v1")
    wanted = {"env": "CartPole-v1", "n_envs": 2, "n_steps": 16, "batch_size": 32, "tensorboard": False}
    with pytest.raises(TrainingError, match=r"^The job was stopped before its second iteration ended"):
        run_for(endless(validated(layers.with_flags(wanted))), 1.0, print)


def test_message_after_ctrl_c_in_a_probe_omits_checkpoints(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from unidle.cli.main import run

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("unidle.tuning.diagnose.probe_job", interrupted)
    assert run(["diagnose", "--env", "CartPole-v1", *SMALL.split()]) == 1
    last = capsys.readouterr().err.splitlines()[-1]
    assert last == "unidle: Stopped before the diagnosis was complete; nothing was saved."


# -- report ------------------------------------------------------------------------------------------------------------


def test_report_has_verdict_first_and_separates_engine_from_recipe() -> None:
    given = facts(table=Table(False, 0.0, {"environment": 0.6, "learn": 0.3}, 0.1))
    report_lines = list(lines(Diagnosis(given, verdict_on(given), 5, 50)))
    assert report_lines[0] == f"{verdict_on(given).sentence} (by probes)"
    assert next(line for line in report_lines if "share" in line).endswith("in training")
    assert not any("erving" in line for line in report_lines)
    ceilings = next(i for i, line in enumerate(report_lines) if line.startswith("upper limits"))
    assert (
        next(i for i, line in enumerate(report_lines) if line.startswith("training with these settings: ")) < ceilings
    )
    assert "100 %" in next(line for line in report_lines if line.strip().startswith("100"))
    engine = next(i for i, line in enumerate(report_lines) if line.startswith("Engine changes"))
    recipe = next(i for i, line in enumerate(report_lines) if line.startswith("Recipe changes"))
    assert recipe_remark(given) in report_lines[recipe]
    assert "GPU" not in report_lines[recipe]
    assert "GPU" in recipe_remark(facts(profile_changes={"on_gpu": True}))
    assert any("--overlap strict" in line for line in report_lines[recipe:])
    assert not any("--overlap strict" in line for line in report_lines[engine:recipe])
    assert any("5 iterations of 50 steps instead of 100" in line for line in report_lines)


WHOLE_ITERATION_ON_DEVICE = {
    "on_gpu": True,
    "on_device": True,
    "fixed_workers": True,
    "stepping": (),
    "collecting": 0.0,
}


@pytest.mark.parametrize("compiled", [True, False])
def test_whole_iterations_on_the_device_are_not_called_learning(compiled: bool) -> None:
    pace = Pace(0.0, 0.005)
    probed = ProbeResults(profile(**WHOLE_ITERATION_ON_DEVICE, pace=pace), None, False, None, None, False)
    config = facts(engine={"workers": None, "slices": None, "compile": compiled}, recipe={"precision": "tf32"}).config
    table = Table(False, 0.0, {"learn": 0.98, "logging": 0.02}, 0.0)
    real = ShortRun(100, 0.005, table, 0.0, facts().readings, {})
    given = _facts(config, probed, real, 1.0)
    found = Diagnosis(given, verdict_on(given), 100, 100)
    report = "\n".join(lines(found))
    assert "learning computes" not in report
    assert "learns for" not in report
    assert "learning alone" not in report
    assert "iterations on the device" in report.split("upper limits")[0].split("share")[1]
    assert result(found)["shares"] == {"iterations on the device": 1.0}
    assert (found.verdict.cause == "no faster settings") == compiled
    assert [one.flags for one in found.verdict.engine if one.flags] == ([] if compiled else ["--compile"])


def test_report_marks_uncertain_predictions() -> None:
    given = facts(seconds=20.0)  # the parts add up to 6 s
    report_lines = list(lines(Diagnosis(given, verdict_on(given), 5, 100)))
    assert any(line.startswith("note: the parts of an iteration") for line in report_lines)
    assert next(line for line in report_lines if "--overlap strict" in line).strip().startswith("about 1.5 ×  ")
    assert not any(line.strip().startswith("about") for line in lines(Diagnosis(facts(), verdict_on(facts()), 5, 100)))
    crowded = facts(readings={"others_cores": 2.0})
    assert any(
        line.startswith("note: other programs") for line in lines(Diagnosis(crowded, verdict_on(crowded), 5, 100))
    )
    assert not any(line.startswith("note:") for line in lines(Diagnosis(facts(), verdict_on(facts()), 5, 100)))


def test_result_is_json_serialisable_and_complete() -> None:
    found = json.loads(json.dumps(result(Diagnosis(facts(), verdict_on(facts()), 5, 100))))
    assert found["cause"] == "environment computes"
    assert found["profile"]["stepping"][0]["workers"] == 4
    assert {one["remark"] for one in found["recipe_changes"]} == {recipe_remark(facts())}
