"""Runs that train together in one process: each is exactly what it would be alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from resumed_runs import assert_same, final_state

import unidle

SMALL: dict[str, Any] = {
    "n_envs": 4,
    "n_steps": 16,
    "batch_size": 32,
    "net_arch": (8,),
    "timesteps": 256,
    "eval_every": 0,
    "tensorboard": False,
    "quiet": True,
}
SETTINGS: dict[str, tuple[str, dict[str, Any]]] = {
    "ppo": ("CartPole-v1", {"preset": "classic", "n_epochs": 2}),
    "overlap, workers": ("CartPole-v1", {"preset": "classic", "n_epochs": 2, "overlap": "strict", "workers": 2}),
    "recurrent": ("CartPole-v1", {"preset": "classic", "n_epochs": 1, "recurrent": "gru", "recurrent_size": 8}),
    "normalised": ("Pendulum-v1", {"preset": "classic", "normalize_obs": True, "normalize_reward": True}),
    "sac": ("Pendulum-v1", {"algo": "sac", "learning_starts": 64, "buffer_size": 1000}),
    "td3": ("Pendulum-v1", {"algo": "td3", "learning_starts": 64, "buffer_size": 1000}),
    "dqn": ("CartPole-v1", {"algo": "dqn", "learning_starts": 64, "buffer_size": 1000}),
    "on the device": ("unidle/Trading-v0", {"preset": "classic"}),
}
ON_CPU = {"device": "cpu"}


@pytest.fixture(autouse=True)
def run_in_tmp_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def settings_of(name: str, **changes: Any) -> tuple[str, dict[str, Any]]:
    env, own = SETTINGS[name]
    return env, {**SMALL, **own, **changes}


def assert_members_equal_runs_alone(name: str, **changes: Any) -> None:
    env, settings = settings_of(name, **changes)
    group = unidle.train(env, seeds=[3, 5, 4], **settings)
    assert [run.config.run.seed for run in group.runs] == [3, 5, 4]
    for run in group.runs:
        alone = unidle.train(env, seed=run.config.run.seed, **settings)
        ours, theirs = final_state(run.path), final_state(alone.path)
        # Python's, NumPy's and torch's own generators belong to the process; nothing here draws from them.
        del ours["random"], theirs["random"]
        assert_same(ours, theirs)


@pytest.mark.parametrize("name", SETTINGS)
def test_each_run_of_a_group_equals_the_run_alone(name: str) -> None:
    assert_members_equal_runs_alone(name, **ON_CPU)


@pytest.mark.gpu
@pytest.mark.parametrize("name", SETTINGS)
def test_each_run_of_a_group_equals_the_run_alone_on_a_gpu(name: str) -> None:
    assert_members_equal_runs_alone(name, device="cuda")
