"""A run that was stopped, however it was stopped, ends with the same weights as one that never was."""

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
from unidle.engine.checkpoint.run_folder import load_checkpoint
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


def test_a_run_with_more_steps_than_are_asked_for_is_done_and_counts_no_iterations(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    starts: list[tuple[int, int]] = []
    show = Display.on_start

    def overhear(display: Display, facts: dict[str, str], total: int, step: int, best: Any) -> None:
        starts.append((step, total))
        show(display, facts, total, step, best)

    monkeypatch.setattr(Display, "on_start", overhear)
    settings = {**SMALL, "timesteps": 100, "runs_dir": str(tmp_path), "quiet": False}
    folder = unidle.train("CartPole-v1", **settings).path
    assert re.search(r"^ *steps +100, rounded up to whole iterations: 192$", capsys.readouterr().err, re.MULTILINE)
    for timesteps in (100, 50):  # the latter would be one iteration of 96
        unidle.resume(folder, timesteps=timesteps)
        said = capsys.readouterr().err
        assert f"All {timesteps} steps are done" in said
        assert "whole iterations" not in said
        assert read_history(folder).progress == "100 % of 192"
    assert starts == [(0, 192), (192, 192), (192, 192)]


@pytest.mark.parametrize(
    ("env", "extra"),
    [
        ("CartPole-v1", {}),
        ("Pendulum-v1", {"share_trunk": True}),
        ("CartPole-v1", {"recurrent": "lstm", "recurrent_size": 8}),
        ("CartPole-v1", {"subproc": True, "workers": 2}),
        ("CartPole-v1", {"overlap": "strict"}),
        ("Pendulum-v1", {"overlap": "strict", "subproc": True, "workers": 2}),
        ("CartPole-v1", {"overlap": "strict", "subproc": True, "recurrent": "gru", "recurrent_size": 8}),
    ],
    ids=["discrete", "continuous", "lstm", "worker processes", "overlap", "overlap, workers", "overlap, workers, gru"],
)
def test_a_run_stopped_twice_and_resumed_equals_one_that_was_not(env: str, extra: dict, tmp_path: Path) -> None:
    settings = {**SMALL, **extra, "timesteps": 2880, "runs_dir": str(tmp_path)}
    whole = unidle.train(env=env, run_name="whole", **settings)
    unidle.train(env=env, run_name="parts", after_iteration=[StopAfter(7)], **settings)
    unidle.resume(tmp_path / "parts", quiet=True, after_iteration=[StopAfter(10)])
    parts = unidle.resume(tmp_path / "parts", quiet=True)
    assert_same(final_state(parts.path), final_state(whole.path))
    timeless = [
        {k: v for k, v in r.items() if "time/" not in k and "second" not in k and k != "wall"} for r in parts.records
    ]
    expected = [
        {k: v for k, v in r.items() if "time/" not in k and "second" not in k and k != "wall"} for r in whole.records
    ]
    assert timeless == expected


def test_sigkill_at_20_random_moments_never_breaks_a_checkpoint_and_changes_no_weight(tmp_path: Path) -> None:
    settings = {**SMALL, "timesteps": 96 * 400, "checkpoint_every": 96, "eval_every": 9600, "runs_dir": str(tmp_path)}
    whole = unidle.train(env="CartPole-v1", run_name="whole", **settings)
    unidle.train(env="CartPole-v1", run_name="killed", after_iteration=[StopAfter(1)], **settings)
    driver = Path(__file__).with_name("kill_driver.py")
    command = [sys.executable, str(driver), str(tmp_path / "killed"), "20", "1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    outcome = json.loads(done.stdout)
    assert outcome["killed"] == 20
    assert outcome["whole"] >= 20
    assert_same(final_state(tmp_path / "killed"), final_state(whole.path))
    assert_same(load_checkpoint(tmp_path / "killed/checkpoints/best.pt"), load_checkpoint(whole.folder.best))
    assert not list((tmp_path / "killed/checkpoints").glob("*.tmp"))
    steps = [r["step"] for r in read_records(tmp_path / "killed" / "metrics.jsonl") if r["kind"] == "iteration"]
    assert steps == list(range(96, 96 * 400 + 1, 96))  # none lost, none twice


def test_a_run_killed_before_its_first_checkpoint_starts_from_the_beginning(tmp_path: Path) -> None:
    settings = {**SMALL, "timesteps": 960, "runs_dir": str(tmp_path)}
    whole = unidle.train(env="CartPole-v1", run_name="whole", **settings)
    early = unidle.train(env="CartPole-v1", run_name="early", after_iteration=[StopAfter(3)], **settings)
    for checkpoint in early.folder.checkpoints.glob("*.pt"):
        checkpoint.unlink()
    resumed = unidle.resume(early.path, quiet=True)
    assert_same(final_state(resumed.path), final_state(whole.path))


@pytest.mark.parametrize("overlap", ["off", "strict"])
def test_extending_a_finished_run_equals_a_longer_one(overlap: str, tmp_path: Path) -> None:
    settings = {**SMALL, "lr_schedule": "constant", "eval_every": 0, "overlap": overlap, "runs_dir": str(tmp_path)}
    longer = unidle.train(env="CartPole-v1", run_name="longer", timesteps=1920, **settings)
    short = unidle.train(env="CartPole-v1", run_name="short", timesteps=960, **settings)
    extended = unidle.resume(short.path, quiet=True, timesteps=1920)
    assert_same(final_state(extended.path), final_state(longer.path))


class Unseeded(gymnasium.Env):
    """Draws from a stream that no seed resets."""

    observation_space = spaces.Box(-np.inf, np.inf, (1,), np.float32)
    action_space = spaces.Discrete(2)

    def __init__(self) -> None:
        self._stream = np.random.default_rng()

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[np.ndarray, dict]:
        return self._draw(), {}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict]:
        return self._draw(), 0.0, False, False, {}

    def _draw(self) -> np.ndarray:
        return self._stream.normal(size=1).astype(np.float32)


def test_an_environment_that_does_not_repeat_itself_is_said_and_its_episode_starts_anew(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = {**SMALL, "timesteps": 960, "runs_dir": str(tmp_path), "eval_every": 0}
    first = unidle.train(env=Unseeded, run_name="r", after_iteration=[StopAfter(3)], **settings)
    unidle.resume(first.path, env=Unseeded, quiet=False)
    assert "3 of 3 environments are not deterministic" in capsys.readouterr().err
    assert final_state(first.path)["step"] == 960


def test_a_run_that_reached_its_target_is_not_trained_on_by_a_resume(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = {**SMALL, "timesteps": 9600, "runs_dir": str(tmp_path), "target_return": 1.0}
    first = unidle.train(env="CartPole-v1", run_name="r", **settings)
    step = final_state(first.path)["step"]
    assert step == 960
    unidle.resume(first.path)
    assert "target return is already reached" in capsys.readouterr().err
    assert final_state(first.path)["step"] == step
    assert final_state(unidle.resume(first.path, quiet=True, target_return=1e9, timesteps=1920).path)["step"] == 1920


class Odd(gymnasium.Env):
    """Offers a state that a checkpoint cannot hold; its episodes can be replayed all the same."""

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
        return {"what": {1, 2, 3}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise AssertionError("nothing was saved")


def test_a_state_that_a_checkpoint_cannot_hold_is_replaced_by_a_replay(tmp_path: Path) -> None:
    settings = {**SMALL, "timesteps": 960, "runs_dir": str(tmp_path), "eval_every": 0}
    whole = unidle.train(env=Odd, run_name="whole", **settings)
    parts = unidle.train(env=Odd, run_name="parts", after_iteration=[StopAfter(3)], **settings)
    unidle.resume(parts.path, env=Odd, quiet=True)
    assert_same(final_state(parts.path), final_state(whole.path))
