"""Callbacks at start and end of a run, and the numbers that they log."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cli_envs import Choice
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import unidle
from unidle.engine import run_log, trainer

SMALL: dict[str, Any] = {
    "preset": "classic",
    "n_envs": 2,
    "n_steps": 16,
    "batch_size": 32,
    "n_epochs": 1,
    "net_arch": (8,),
    "timesteps": 64,
    "eval_every": 64,
    "eval_episodes": 1,
    "tensorboard": False,
    "device": "cpu",
    "run_name": "a",
    "quiet": True,
}


@pytest.fixture(autouse=True)
def run_in_tmp_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


class Calls:
    """Records when which callback was called."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, int]] = []

    def named(self, name: str) -> Any:
        return lambda context: self.calls.append((name, context.record["step"]))

    def all(self) -> dict[str, Any]:
        return {name: [self.named(name)] for name in ("on_start", "after_iteration", "after_evaluation", "on_end")}


def test_callbacks_are_called_at_start_and_end_of_new_and_resumed_runs(tmp_path: Path) -> None:
    calls = Calls()
    run = unidle.train(Choice, **SMALL, **calls.all())
    iterations = [("after_iteration", 32), ("after_iteration", 64)]
    assert calls.calls == [("on_start", 0), *iterations, ("after_evaluation", 64), ("on_end", 64)]
    calls.calls.clear()
    unidle.resume(run.path, timesteps=96, eval_every=0, quiet=True, **calls.all())
    assert calls.calls == [("on_start", 64), ("after_iteration", 96), ("on_end", 96)]


def test_context_at_start_has_folder_and_policy_and_can_stop(tmp_path: Path) -> None:
    contexts = []

    def stop(context: unidle.CallbackContext) -> None:
        contexts.append(context)
        context.stop()

    run = unidle.train(Choice, on_start=[stop], **SMALL)
    assert contexts[0].folder == tmp_path / "runs/a"
    assert isinstance(contexts[0].policy, torch.nn.Module)
    assert [r for r in run.records if r["kind"] == "iteration"] == []


def test_on_end_is_called_when_the_run_fails_and_the_original_error_is_raised() -> None:
    calls = Calls()

    def fail(context: unidle.CallbackContext) -> None:
        raise ValueError("of the user")

    with pytest.raises(ValueError, match="of the user"):
        unidle.train(Choice, after_iteration=[fail], on_end=[calls.named("on_end")], **SMALL)
    assert calls.calls == [("on_end", 32)]


def test_ctrl_c_during_on_end_does_not_cut_it_short() -> None:
    calls = Calls()

    def interrupt(context: unidle.CallbackContext) -> None:
        os.kill(os.getpid(), signal.SIGINT)

    run = unidle.train(Choice, on_end=[interrupt, calls.named("on_end")], **SMALL)
    assert calls.calls == [("on_end", 64)]
    assert run.stopped_by is None


class _Writer:
    def __init__(self) -> None:
        self.is_closed = False

    def write(self, step: int, metrics: dict[str, float]) -> None:
        pass

    def close(self) -> None:
        self.is_closed = True


def test_logs_are_closed_when_the_run_fails_before_its_first_step(monkeypatch: pytest.MonkeyPatch) -> None:
    writer = _Writer()
    monkeypatch.setattr(trainer, "start_notes", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        unidle.train(Choice, writers=[writer], **SMALL)
    assert writer.is_closed


def test_log_is_closed_when_another_one_cannot_be_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[str] = []
    monkeypatch.setattr(run_log.JsonlWriter, "close", lambda self: closed.append("metrics.jsonl"))
    monkeypatch.setattr(run_log.TensorBoardWriter, "__init__", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        unidle.train(Choice, **{**SMALL, "tensorboard": True})
    assert closed == ["metrics.jsonl"]


def test_error_in_on_end_leaves_a_complete_run() -> None:
    def fail(context: unidle.CallbackContext) -> None:
        raise ValueError("of the user")

    with pytest.raises(ValueError, match="of the user"):
        unidle.train(Choice, on_end=[fail], **SMALL)
    run = unidle.load("runs/a")
    assert run.records[-1]["step"] == 64
    assert run.report.exists()
    unidle.resume("runs/a", quiet=True)  # the lock is free


class Collected:
    """A metric writer that keeps what it gets."""

    def __init__(self) -> None:
        self.metrics: list[tuple[int, dict[str, float]]] = []

    def write(self, step: int, metrics: dict[str, float]) -> None:
        self.metrics.append((step, metrics))

    def close(self) -> None:
        """Nothing to close."""


def logs(name: str, value: Any) -> Any:
    return [lambda context: context.log({name: value})]


def test_logged_numbers_are_in_records_tensorboard_and_writers() -> None:
    writer = Collected()
    run = unidle.train(
        Choice,
        on_start=logs("my/start", 1),
        after_iteration=logs("my/tensor", torch.tensor(2.5, requires_grad=True)),
        after_evaluation=logs("my/array", np.float32(3.5)),
        on_end=logs("my/end", True),
        writers=[writer],
        **{**SMALL, "tensorboard": True},
    )
    logged = [{name: v for name, v in r.items() if name != "kind"} for r in run.records if r["kind"] == "user"]
    assert logged == [
        {"step": 0, "my/start": 1.0},
        {"step": 32, "my/tensor": 2.5},
        {"step": 64, "my/tensor": 2.5},
        {"step": 64, "my/array": 3.5},
        {"step": 64, "my/end": 1.0},
    ]
    assert [(step, metrics) for step, metrics in writer.metrics if any("my/" in name for name in metrics)] == [
        (record.pop("step"), record) for record in logged
    ]
    tags = EventAccumulator(str(run.path / "tensorboard")).Reload()
    assert [(event.step, event.value) for event in tags.Scalars("my/tensor")] == [(32, 2.5), (64, 2.5)]
    assert len(tags.Scalars("time/total_timesteps")) == 3, "two iterations and an evaluation"


def test_numbers_logged_after_the_checkpoint_are_dropped_on_resume() -> None:
    def crash_at_64(context: unidle.CallbackContext) -> None:
        context.log({"n": context.record["step"]})
        if context.record["step"] == 64:
            raise ValueError("crash")

    settings = {**SMALL, "timesteps": 96, "eval_every": 0, "checkpoint_every": 32}
    with pytest.raises(ValueError, match="crash"):
        unidle.train(Choice, after_iteration=[crash_at_64], **settings)
    run = unidle.resume("runs/a", quiet=True, after_iteration=[lambda context: context.log({"n": -1})])
    assert [(r["step"], r["n"]) for r in run.records if r["kind"] == "user"] == [(32, 32.0), (64, -1.0), (96, -1.0)]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"a": "x"}, "context.log: `a` must be a number, not 'x'."),
        ({"a": [1, 2]}, "context.log: `a` must be a number"),
        ({"a": torch.zeros(2)}, "context.log: `a` must be a number"),
        ({"step": 1}, "context.log needs names such as 'my/metric', not 'step'"),
        ({3: 1}, "context.log needs names such as 'my/metric', not 3"),
    ],
)
def test_logging_something_else_is_an_error(values: dict[Any, Any], message: str) -> None:
    with pytest.raises(unidle.UsageError) as error:
        unidle.train(Choice, on_start=[lambda context: context.log(values)], **SMALL)
    assert str(error.value).startswith(message)


def test_after_iteration_callbacks_get_the_rollout_and_others_none(tmp_path: Path) -> None:
    rewards: list[Any] = []

    def keep(context: unidle.CallbackContext) -> None:
        rewards.append(context.rollout and context.rollout.rewards.clone())

    unidle.train(Choice, **SMALL, on_start=[keep], after_iteration=[keep], after_evaluation=[keep], on_end=[keep])
    assert [None if each is None else each.shape for each in rewards] == [None, (16, 2), (16, 2), None, None]


def test_state_is_the_content_of_the_checkpoint_at_that_step(tmp_path: Path) -> None:
    states: list[dict[str, Any]] = []
    run = unidle.train(Choice, **SMALL, on_end=[lambda context: states.append(context.state())])
    saved = torch.load(run.folder.saved()[-1], weights_only=True)
    assert states[0].keys() == saved.keys() - {"format"}
    assert states[0]["step"] == saved["step"] == 64
    weights = saved["algo"]["policy"]
    assert all(torch.equal(value, weights[name]) for name, value in states[0]["algo"]["policy"].items())
