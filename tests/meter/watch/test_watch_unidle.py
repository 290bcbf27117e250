"""`unidle watch` with a run of unidle: its own phases, with the time that the run itself measured."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from unidle import timeline
from unidle.engine.evaluate import play
from unidle.meter.watch import samples
from unidle.metrics.jsonl import read_records
from unidle.timeline import LEARN, OTHER, PHASES, STORAGE, Timeline

ENVS = """
import time
import gymnasium, numpy

class Fast(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(-1, 1, (4,), numpy.float32)
    action_space = gymnasium.spaces.Discrete(2)
    def reset(self, *, seed=None, options=None):
        self.steps = 0
        return numpy.zeros(4, numpy.float32), {}

    def step(self, action):
        self.steps += 1
        self.work()
        return numpy.zeros(4, numpy.float32), 0.0, self.steps >= 50, False, {}

    def work(self):
        pass

class Slow(Fast):
    def work(self):
        end = time.thread_time() + 4e-3
        while time.thread_time() < end:
            pass
"""
# Does not count CPU use by other programs: other tests run at the same time.
PROGRAM = [
    sys.executable,
    "-c",
    "from unidle.meter.watch.command import WatchedCommand\n"
    "from unidle.cli.main import main\n"
    "WatchedCommand.others_cores = 0.0\n"
    "main()\n",
]
TRAIN = "-m unidle train --runs-dir runs --run-name a --quiet --no-tensorboard --eval-every 0"
IN_PROCESS = "--env envs:Fast --no-subproc"


def watch_training(folder: Path, flags: str) -> tuple[dict[str, Any], str]:
    """Watch `unidle train` with `flags`; returns watch.json and the printed report."""
    (folder / "envs.py").write_text(ENVS)
    command = [*PROGRAM, "watch", "--out", "found", "--", sys.executable, *TRAIN.split(), *flags.split()]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return json.loads((folder / "found" / "watch.json").read_text()), done.stderr


def seconds_of_run(folder: Path) -> dict[str, float]:
    """Seconds of each phase in the last record of the run."""
    [*_, last] = [r for r in read_records(folder / "runs" / "a" / "metrics.jsonl") if r["kind"] == "iteration"]
    return {phase: last[f"time/{phase}"] for phase in PHASES}


LEARNS = f"{IN_PROCESS} --n-envs 8 --n-steps 128 --n-epochs 30 --timesteps 16384"
INFERS = f"{IN_PROCESS} --n-envs 1 --n-steps 4096 --batch-size 4096 --n-epochs 1 --timesteps 40960"


@pytest.mark.parametrize(("flags", "activity"), [(LEARNS, "learning"), (INFERS, "inference")], ids=["learns", "infers"])
def test_learning_and_inference_are_named_with_the_time_of_the_run(tmp_path: Path, flags: str, activity: str) -> None:
    found, report = watch_training(tmp_path, flags)
    assert f"% of the main process's time in {activity}" in found["verdict"], report
    assert found["cause"] in ("small batches", "compute-bound")
    assert "unidle diagnose" in found["next_step"]
    measured, rows = seconds_of_run(tmp_path), {row["activity"]: row for row in found["rows"]}
    for name, row in (("learn", "learning"), ("inference", "inference"), ("storage", "storage")):
        assert rows[row]["share"] * found["seconds"] == pytest.approx(measured[name], rel=0.02, abs=0.05), report
        assert rows[row]["place"] is None, "unidle's own functions are not named"


def test_waiting_for_workers_is_named_with_the_function_of_the_env(tmp_path: Path) -> None:
    flags = "--env envs:Slow --workers 2 --n-envs 2 --n-steps 64 --batch-size 64 --n-epochs 1 --timesteps 1024"
    found, report = watch_training(tmp_path, flags)
    assert found["cause"] == "environment computes", report
    assert "% of the main process's time waiting for workers while 2 worker processes used" in found["verdict"]
    assert "`Slow.work` (envs.py:2" in found["verdict"]
    assert "--workers" in found["next_step"]
    waiting = next(row for row in found["rows"] if row["activity"] == "waiting for workers")
    measured = seconds_of_run(tmp_path)["environment"]
    assert waiting["share"] * found["seconds"] == pytest.approx(measured, rel=0.1, abs=0.1), report


def test_evaluation_is_a_row_of_its_own_and_its_workers_do_not_count(tmp_path: Path) -> None:
    flags = "--env envs:Slow --workers 2 --n-envs 2 --n-steps 16 --batch-size 32 --n-epochs 1 --timesteps 64"
    found, report = watch_training(tmp_path, f"{flags} --eval-every 32 --eval-workers 0")
    assert found["cause"] == "evaluations", report
    assert found["workers"]["count"] == 2
    shares = {row["activity"]: row["share"] for row in found["rows"]}
    assert shares["evaluation"] > 4 * shares["waiting for workers"]


def test_evaluation_processes_are_recognised_by_their_first_env() -> None:
    assert samples.FIRST_EVALUATION_ENV == play.FIRST_EVALUATION_ENV


def test_timeline_is_known_by_thread_while_its_run_lasts() -> None:
    line = Timeline()
    assert line not in timeline.running.values()
    line.begin()
    assert timeline.running[threading.get_ident()] is line
    line.end()
    assert threading.get_ident() not in timeline.running


def test_totals_include_open_phase_once() -> None:
    line = Timeline()
    line.begin()
    line.enter(LEARN)
    totals = line.totals_now_ns()
    assert totals[LEARN] > line.totals_ns[LEARN] == 0
    line.enter(STORAGE)
    line.totals_ns[STORAGE] += 10  # as if `enter` were interrupted before it changed the phase
    assert line.totals_now_ns()[STORAGE] == 10
    line.end()
    assert line.totals_now_ns()[OTHER] >= line.totals_ns[OTHER]
