"""A run that was stopped, in whatever way, and resumed ends with the same state as an uninterrupted one."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from resumed_runs import StopAfter, assert_same, final_state

import unidle
from unidle.engine.checkpoint.checkpoint_file import load_checkpoint
from unidle.metrics.jsonl import read_records
from unidle.report.history import read_history
from unidle.report.terminal.progress import Display

SMALL: dict[str, Any] = {
    "preset": "classic",
    "n_envs": 3,
    "n_steps": 32,
    "batch_size": 48,
    "n_epochs": 2,
    "net_arch": (16,),
    "normalize_obs": True,
    "normalize_reward": True,
    "lr_schedule": "linear",
    "eval_every": 960,
    "eval_episodes": 2,
    "tensorboard": False,
    "seed": 5,
    "quiet": True,
}


def test_resume_of_completed_run_reports_that_all_steps_are_done(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    starts: list[tuple[int, int]] = []
    original = Display.on_start

    def record_start(display: Display, facts: dict[str, str], total: int, step: int, best: Any) -> None:
        starts.append((step, total))
        original(display, facts, total, step, best)

    monkeypatch.setattr(Display, "on_start", record_start)
    settings = {**SMALL, "timesteps": 100, "runs_dir": str(tmp_path), "quiet": False}
    folder = unidle.train("CartPole-v1", **settings).path
    assert re.search(r"^ *steps +100, rounded up to whole iterations: 192$", capsys.readouterr().err, re.MULTILINE)
    for timesteps in (100, 50):  # 50 steps would be one iteration of 96
        unidle.resume(folder, timesteps=timesteps)
        output = capsys.readouterr().err
        assert f"All {timesteps} steps are done" in output
        assert "whole iterations" not in output
        assert read_history(folder).progress == "100 % of 192"
    assert starts == [(0, 192), (192, 192), (192, 192)]


@pytest.mark.parametrize(
    ("env", "extra"),
    [
        ("CartPole-v1", {}),
        ("Pendulum-v1", {"share_trunk": True}),
        ("CartPole-v1", {"recurrent": "lstm", "recurrent_size": 8}),
        ("CartPole-v1", {"recurrent": "gru", "recurrent_size": 8, "critic_arch": (24, 8)}),
        ("Pendulum-v1", {"net_arch": (), "critic_arch": (24, 8), "overlap": "strict"}),
        ("CartPole-v1", {"optimizer": "rmsprop", "momentum": 0.5, "weight_decay": 0.01, "target_kl": 0.001}),
        ("CartPole-v1", {"subproc": True, "workers": 2}),
        ("CartPole-v1", {"overlap": "strict"}),
        ("Pendulum-v1", {"overlap": "strict", "subproc": True, "workers": 2}),
        ("CartPole-v1", {"overlap": "strict", "subproc": True, "recurrent": "gru", "recurrent_size": 8}),
    ],
    ids=[
        *("discrete", "continuous", "lstm", "gru, larger critic", "linear actor, overlap", "rmsprop"),
        *("worker processes", "overlap", "overlap, workers", "overlap, workers, gru"),
    ],
)
def test_run_resumed_twice_equals_uninterrupted_run(env: str, extra: dict, tmp_path: Path) -> None:
    settings = {**SMALL, **extra, "timesteps": 2880, "runs_dir": str(tmp_path)}
    uninterrupted = unidle.train(env=env, run_name="uninterrupted", **settings)
    unidle.train(env=env, run_name="resumed", after_iteration=[StopAfter(7)], **settings)
    unidle.resume(tmp_path / "resumed", quiet=True, after_iteration=[StopAfter(10)])
    resumed = unidle.resume(tmp_path / "resumed", quiet=True)
    assert_same(final_state(resumed.path), final_state(uninterrupted.path))
    actual, expected = [
        [
            {k: v for k, v in r.items() if "time/" not in k and "second" not in k and k != "wall"}
            for r in sorted(run.records, key=lambda r: (r["step"], r["kind"]))  # evaluations may be written later
        ]
        for run in (resumed, uninterrupted)
    ]
    assert actual == expected


def test_run_survives_20_random_sigkills_with_same_final_state(tmp_path: Path) -> None:
    settings = {**SMALL, "timesteps": 96 * 400, "checkpoint_every": 96, "eval_every": 9600, "runs_dir": str(tmp_path)}
    uninterrupted = unidle.train(env="CartPole-v1", run_name="uninterrupted", **settings)
    unidle.train(env="CartPole-v1", run_name="killed", after_iteration=[StopAfter(1)], **settings)
    driver = Path(__file__).with_name("kill_driver.py")
    command = [sys.executable, str(driver), str(tmp_path / "killed"), "20", "1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    outcome = json.loads(done.stdout)
    assert outcome["killed"] == 20
    assert outcome["intact"] >= 20
    assert_same(final_state(tmp_path / "killed"), final_state(uninterrupted.path))
    assert_same(load_checkpoint(tmp_path / "killed/checkpoints/best.pt"), load_checkpoint(uninterrupted.folder.best))
    assert not list((tmp_path / "killed/checkpoints").glob("*.tmp"))
    steps = [r["step"] for r in read_records(tmp_path / "killed" / "metrics.jsonl") if r["kind"] == "iteration"]
    assert steps == list(range(96, 96 * 400 + 1, 96))  # none lost or repeated


def test_resume_without_checkpoint_starts_from_beginning(tmp_path: Path) -> None:
    settings = {**SMALL, "timesteps": 960, "runs_dir": str(tmp_path)}
    uninterrupted = unidle.train(env="CartPole-v1", run_name="uninterrupted", **settings)
    early = unidle.train(env="CartPole-v1", run_name="early", after_iteration=[StopAfter(3)], **settings)
    for checkpoint in early.folder.checkpoints.glob("*.pt"):
        checkpoint.unlink()
    resumed = unidle.resume(early.path, quiet=True)
    assert_same(final_state(resumed.path), final_state(uninterrupted.path))


@pytest.mark.parametrize("overlap", ["off", "strict"])
def test_extended_run_equals_longer_run(overlap: str, tmp_path: Path) -> None:
    settings = {**SMALL, "lr_schedule": "constant", "eval_every": 0, "overlap": overlap, "runs_dir": str(tmp_path)}
    longer = unidle.train(env="CartPole-v1", run_name="longer", timesteps=1920, **settings)
    short = unidle.train(env="CartPole-v1", run_name="short", timesteps=960, **settings)
    extended = unidle.resume(short.path, quiet=True, timesteps=1920)
    assert_same(final_state(extended.path), final_state(longer.path))


class Unseeded(gymnasium.Env):
    """Random observations that ignore the seed."""

    observation_space = spaces.Box(-np.inf, np.inf, (1,), np.float32)
    action_space = spaces.Discrete(2)

    def __init__(self) -> None:
        self._generator = np.random.default_rng()

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[np.ndarray, dict]:
        return self._draw(), {}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict]:
        return self._draw(), 0.0, False, False, {}

    def _draw(self) -> np.ndarray:
        return self._generator.normal(size=1).astype(np.float32)


def test_resume_reports_nondeterministic_envs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = {**SMALL, "timesteps": 960, "runs_dir": str(tmp_path), "eval_every": 0}
    first = unidle.train(env=Unseeded, run_name="r", after_iteration=[StopAfter(3)], **settings)
    unidle.resume(first.path, env=Unseeded, quiet=False)
    assert "3 of 3 environments did not repeat their open episode" in capsys.readouterr().err
    assert final_state(first.path)["step"] == 960


def test_resume_does_not_train_after_target_return_is_reached(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = {**SMALL, "timesteps": 9600, "runs_dir": str(tmp_path), "target_return": 1.0}
    first = unidle.train(env="CartPole-v1", run_name="r", **settings)
    step = final_state(first.path)["step"]
    assert step == 960 + 2 * 96  # in effect a quarter of the interval after the evaluation
    unidle.resume(first.path)
    assert "target return is already reached" in capsys.readouterr().err
    assert final_state(first.path)["step"] == step
    assert final_state(unidle.resume(first.path, quiet=True, target_return=1e9, timesteps=1920).path)["step"] == 1920


class UnsupportedState(gymnasium.Env):
    """Deterministic, with a state_dict that a checkpoint cannot store."""

    observation_space = spaces.Box(-np.inf, np.inf, (1,), np.float32)
    action_space = spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[np.ndarray, dict]:
        super().reset(seed=seed)
        return self._draw(), {}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict]:
        return self._draw(), float(action), False, bool(self.np_random.random() < 0.05), {}

    def _draw(self) -> np.ndarray:
        return self.np_random.normal(size=1).astype(np.float32)

    def state_dict(self) -> dict[str, Any]:
        return {"unsupported": {1, 2, 3}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise AssertionError("nothing was saved")


def test_resume_replays_episode_if_env_state_cannot_be_saved(tmp_path: Path) -> None:
    settings = {**SMALL, "timesteps": 960, "runs_dir": str(tmp_path), "eval_every": 0}
    uninterrupted = unidle.train(env=UnsupportedState, run_name="uninterrupted", **settings)
    interrupted = unidle.train(env=UnsupportedState, run_name="interrupted", after_iteration=[StopAfter(3)], **settings)
    unidle.resume(interrupted.path, env=UnsupportedState, quiet=True)
    assert_same(final_state(interrupted.path), final_state(uninterrupted.path))
