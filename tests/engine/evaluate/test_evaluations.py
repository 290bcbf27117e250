"""When results of evaluations take effect, and where evaluations run: neither depends on timing."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import psutil
import pytest
from resumed_runs import assert_same, final_state
from small_envs import Drift

import unidle
from unidle.config import Config, PPORecipe
from unidle.engine.checkpoint.checkpoint_file import load_checkpoint
from unidle.engine.evaluate.evaluations import Evaluations
from unidle.engine.evaluate.schedule import effect_delay
from unidle.envs.make import env_maker
from unidle.envs.probe import probe
from unidle.errors import UsageError

# An evaluation every 8 iterations, so results take effect 2 iterations later.
SMALL: dict[str, Any] = {
    "preset": "classic",
    "n_envs": 2,
    "n_steps": 16,
    "batch_size": 32,
    "n_epochs": 1,
    "net_arch": (8,),
    "timesteps": 1024,
    "eval_every": 256,
    "eval_episodes": 3,
    "tensorboard": False,
    "device": "cpu",
    "quiet": True,
}
BLOCKING, IN_A_PROCESS = {"eval_workers": 0}, {"eval_workers": 1}


class SlowDrift(Drift):
    """Takes `step_seconds` a step."""

    def __init__(self, step_seconds: float) -> None:
        super().__init__()
        self._step_seconds = step_seconds

    def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool, bool, dict]:
        time.sleep(self._step_seconds)
        return super().step(action)


def evaluations_of(run: unidle.TrainedRun) -> list[tuple[int, float, bool]]:
    """Step, return and whether it was the best, of each evaluation."""
    records = [record for record in run.records if record["kind"] == "evaluation"]
    return [(record["step"], record["eval/return_mean"], record["eval/best"]) for record in records]


class Interrupt:
    """Presses Ctrl-C after some iterations."""

    def __init__(self, iterations: int) -> None:
        self._left = iterations

    def __call__(self, context: unidle.CallbackContext) -> None:
        self._left -= 1
        if self._left == 0:
            os.kill(os.getpid(), signal.SIGINT)


class Recorder:
    """Records the iteration at which the result of each step's evaluation arrives, and the evaluated weights."""

    def __init__(self) -> None:
        self.iteration, self.arrived, self.weights = 0, dict[int, int](), dict[int, Any]()

    def after_iteration(self, context: unidle.CallbackContext) -> None:
        self.iteration = context.record["iteration"]

    def after_evaluation(self, context: unidle.CallbackContext) -> None:
        self.arrived[context.record["step"]] = self.iteration
        self.weights[context.record["step"]] = context.policy.state_dict()


def recorded_run(path: Path, name: str, env: Any = Drift, **settings: Any) -> tuple[unidle.TrainedRun, Recorder]:
    recorder = Recorder()
    callbacks: Any = {"after_iteration": [recorder.after_iteration], "after_evaluation": [recorder.after_evaluation]}
    return unidle.train(env, run_name=name, runs_dir=str(path), **{**SMALL, **settings}, **callbacks), recorder


# -- effects -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "has_callbacks", "delay"),
    [
        ({}, False, 0),
        ({}, True, 2),
        ({"target_return": 1.0}, False, 2),
        ({"target_return": 1.0, "eval_every": 33}, False, 1),
        ({"target_return": 1.0, "eval_every": None, "timesteps": 12_800}, False, 10),
    ],
)
def test_delay_is_quarter_of_interval_in_iterations(settings: dict[str, Any], has_callbacks: bool, delay: int) -> None:
    recipe = PPORecipe(n_envs=2, n_steps=16, batch_size=32)
    config = Config(recipe=recipe).with_values({"eval_every": 256, **settings}, "test")
    maker = env_maker(Drift)
    assert effect_delay(config, maker, probe(maker), has_callbacks=has_callbacks) == delay
    on_device = env_maker("unidle/CartPole-v1")  # always evaluated in the trainer
    assert effect_delay(config, on_device, probe(on_device), has_callbacks=has_callbacks) == 0


def test_callbacks_get_results_at_same_iterations_wherever_evaluations_run(tmp_path: Path) -> None:
    recorders = [recorded_run(tmp_path, str(number), **where)[1] for number, where in enumerate((BLOCKING, {}))]
    recorders.append(recorded_run(tmp_path, "slow", SlowDrift, env_kwargs={"step_seconds": 1e-3}, **IN_A_PROCESS)[1])
    for recorder in recorders:
        assert recorder.arrived == {256: 10, 512: 18, 768: 26, 1024: 32}  # the last one at the end of the run
        assert_same(recorder.weights, recorders[0].weights)


@pytest.mark.parametrize("where", [BLOCKING, {}, IN_A_PROCESS])
def test_target_return_ends_run_at_same_step_wherever_evaluations_run(where: dict[str, Any], tmp_path: Path) -> None:
    settings = {**SMALL, "runs_dir": str(tmp_path)}
    whole = unidle.train(Drift, run_name="whole", **settings, **BLOCKING)
    target = evaluations_of(whole)[1][1]
    first = next(step for step, value, _ in evaluations_of(whole) if value >= target)
    run = unidle.train(Drift, run_name="run", target_return=target, **settings, **where)
    assert final_state(run.path)["step"] == first + 2 * 32
    assert evaluations_of(run) == [each for each in evaluations_of(whole) if each[0] <= first]


@pytest.mark.parametrize(
    ("iterations", "where"),  # at the evaluation, before its result takes effect, and then
    [(8, {}), (9, BLOCKING), (9, IN_A_PROCESS), (10, {}), (10, IN_A_PROCESS)],
)
def test_interrupted_run_stops_at_target_as_if_it_was_not_interrupted(
    iterations: int, where: dict[str, Any], tmp_path: Path
) -> None:
    settings = {**SMALL, "runs_dir": str(tmp_path), "target_return": -1e9, **where}
    whole = unidle.train(Drift, run_name="whole", **settings)
    run = unidle.train(Drift, run_name="run", after_iteration=[Interrupt(iterations)], **settings)
    assert run.stopped_by == signal.SIGINT
    run = unidle.resume(run.path, env=Drift, quiet=True)
    assert final_state(run.path)["step"] == 10 * 32
    assert_same(final_state(run.path), final_state(whole.path))
    assert evaluations_of(run) == evaluations_of(whole)


def test_result_recorded_before_kill_still_takes_effect(tmp_path: Path) -> None:
    """As if the run was killed after the record was written, and the latest checkpoint was written before."""
    run, whole = recorded_run(tmp_path, "run", timesteps=320)
    stopped = unidle.train(
        Drift, run_name="stopped", runs_dir=str(tmp_path), after_iteration=[Interrupt(9)], target_return=1e9, **SMALL
    )
    record = next(record for record in run.records if record["kind"] == "evaluation")
    with (stopped.path / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(record) + "\n")
    latest = stopped.folder.latest()
    assert latest is not None
    assert [(each["step"], each["due"]) for each in load_checkpoint(latest)["evaluations"]] == [(256, 10)]
    recorder = Recorder()
    resumed = unidle.resume(
        stopped.path,
        env=Drift,
        quiet=True,
        timesteps=320,
        after_iteration=[recorder.after_iteration],
        after_evaluation=[recorder.after_evaluation],
    )
    assert recorder.arrived == {256: 10, 320: 10}
    assert_same(recorder.weights[256], whole.weights[256])
    assert [step for step, _, _ in evaluations_of(resumed)].count(256) == 1


def test_target_recorded_before_kill_ends_run_at_same_step(tmp_path: Path) -> None:
    """As above: the run must neither end when it is resumed nor train past the target."""
    settings = {**SMALL, "runs_dir": str(tmp_path), "target_return": -1e9}
    whole = unidle.train(Drift, run_name="whole", **settings)
    stopped = unidle.train(Drift, run_name="stopped", after_iteration=[Interrupt(9)], **settings)
    record = next(record for record in whole.records if record["kind"] == "evaluation")
    with (stopped.path / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(record) + "\n")
    resumed = unidle.resume(stopped.path, env=Drift, quiet=True)
    assert_same(final_state(resumed.path), final_state(whole.path))
    assert evaluations_of(resumed) == evaluations_of(whole)


# -- where -------------------------------------------------------------------------------------------------------------


class ForksForbidden(Drift):
    """Cannot be created in another process than the one it names."""

    def __init__(self, pid: int = 0, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        if os.getpid() != pid:
            raise UsageError("The simulator's licence is for one process.")


def counted_starts(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A list to which every start of evaluation processes adds their number."""
    started: list[int] = []
    start = Evaluations._start_processes

    def counted(self: Evaluations) -> None:
        started.append(self.processes)
        start(self)

    monkeypatch.setattr(Evaluations, "_start_processes", counted)
    monkeypatch.setattr("unidle.engine.evaluate.schedule.available_cores", lambda: 2)
    return started


@pytest.mark.parametrize(("patience", "processes"), [(60.0, []), (0.0, [1]), (0.02, [1])])
def test_first_evaluations_run_in_trainer_until_they_take_too_long(
    patience: float, processes: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {**SMALL, "runs_dir": str(tmp_path), "env_kwargs": {"step_seconds": 1e-3}}
    blocking = unidle.train(SlowDrift, run_name="blocking", **settings, **BLOCKING)
    monkeypatch.setattr("unidle.engine.evaluate.evaluations._PATIENCE_SECONDS", patience)
    started = counted_starts(monkeypatch)
    run = unidle.train(SlowDrift, run_name="run", **settings)
    assert started == processes
    assert evaluations_of(run) == evaluations_of(blocking)
    assert len(evaluations_of(run)) == 4
    assert_same(load_checkpoint(run.folder.best), load_checkpoint(blocking.folder.best))
    assert not [child for child in psutil.Process().children() if "worker_main" in " ".join(child.cmdline())]


@pytest.mark.parametrize("settings", [{"workers": 1}, {"subproc": True}, {"eval_workers": 1}])
def test_user_who_asks_for_processes_gets_no_evaluation_env_in_trainer(
    settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = counted_starts(monkeypatch)
    monkeypatch.setattr(Evaluations, "_play", None)
    run = unidle.train(Drift, runs_dir=str(tmp_path), **{**SMALL, "timesteps": 64, "eval_every": 32}, **settings)
    assert started == [1]
    assert len(evaluations_of(run)) == 2


def test_env_that_keeps_state_between_episodes_is_evaluated_in_one_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its wrapper's statistics would differ after a move from the trainer to another process."""
    started = counted_starts(monkeypatch)
    unidle.train(
        lambda: gymnasium.wrappers.NormalizeObservation(Drift()),
        runs_dir=str(tmp_path),
        **{**SMALL, "timesteps": 64, "eval_every": 32},
    )
    assert started == [1]


def test_trainer_evaluates_if_processes_that_it_chose_cannot_create_env(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = {**SMALL, "runs_dir": str(tmp_path), "env_kwargs": {"pid": os.getpid()}}
    monkeypatch.setattr("unidle.engine.evaluate.evaluations._PATIENCE_SECONDS", 0.0)
    counted_starts(monkeypatch)
    run, recorder = recorded_run(tmp_path, "run", ForksForbidden, env_kwargs=settings["env_kwargs"])
    error = capsys.readouterr().err
    assert "licence is for one process. Evaluations run in the trainer from now on." in " ".join(error.split())
    assert [step for step, _, _ in evaluations_of(run)] == [256, 512, 768, 1024]
    assert recorder.arrived == {256: 10, 512: 18, 768: 26, 1024: 32}
    with pytest.raises(unidle.TrainingError, match="licence is for one process"):
        unidle.train(ForksForbidden, run_name="asked", **settings, **IN_A_PROCESS)
