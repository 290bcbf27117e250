"""Environments with state that survives an episode: a resumed run is exact, or says what differs."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.wrappers import NormalizeObservation, NormalizeReward, RecordEpisodeStatistics
from resumed_runs import StopAfter, assert_same, final_state

import unidle

SMALL: dict[str, Any] = {
    "preset": "classic",
    "n_envs": 4,
    "n_steps": 32,
    "batch_size": 64,
    "n_epochs": 1,
    "net_arch": (16,),
    "eval_every": 0,
    "tensorboard": False,
    "seed": 5,
    "timesteps": 4 * 32 * 6,
}


def normalised() -> gymnasium.Env:
    env = gymnasium.make("CartPole-v1")
    return NormalizeReward(NormalizeObservation(RecordEpisodeStatistics(env)))


class Curriculum(gymnasium.Wrapper):
    """The reward grows with the number of episodes so far."""

    def __init__(self, env: gymnasium.Env) -> None:
        super().__init__(env)
        self.episodes = 0

    def reset(self, **kwargs: Any) -> tuple[Any, dict]:
        self.episodes += 1
        return super().reset(**kwargs)

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict]:
        observation, reward, terminated, truncated, info = super().step(action)
        return observation, float(reward) * self.episodes, terminated, truncated, info


class SavedCurriculum(Curriculum):
    def state_dict(self) -> dict[str, Any]:
        return {"episodes": self.episodes}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.episodes = state["episodes"]


def curriculum() -> gymnasium.Env:
    return Curriculum(gymnasium.make("CartPole-v1"))


def saved_curriculum() -> gymnasium.Env:
    return SavedCurriculum(gymnasium.make("CartPole-v1"))


class LateCurriculum(Curriculum):
    """Has no effect in the episodes that these tests play."""

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict]:
        return self.env.step(action)


def late_curriculum() -> gymnasium.Env:
    return LateCurriculum(gymnasium.make("CartPole-v1"))


class RandomReward(gymnasium.Wrapper):
    """Adds noise from the global generator to the reward."""

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict]:
        observation, reward, terminated, truncated, info = super().step(action)
        return observation, float(reward) + random.random(), terminated, truncated, info


def random_reward() -> gymnasium.Env:
    return RandomReward(gymnasium.make("CartPole-v1"))


MODES: dict[str, dict[str, Any]] = {
    "in this process": {"subproc": False},
    "workers": {"subproc": True, "workers": 2},
    "overlap": {"overlap": "strict", "subproc": True, "workers": 2, "slices": 2},
}


def stopped_and_resumed(env: Callable[[], gymnasium.Env], tmp_path: Path, mode: str) -> unidle.TrainedRun:
    """A run that was stopped and resumed."""
    settings = {**SMALL, **MODES[mode], "runs_dir": str(tmp_path)}
    unidle.train(env, run_name="parts", quiet=True, after_iteration=[StopAfter(4)], **settings)
    return unidle.resume(tmp_path / "parts", env=env)


@pytest.mark.parametrize(
    ("env", "mode"),
    [*((normalised, mode) for mode in MODES), (saved_curriculum, "in this process"), (saved_curriculum, "overlap")],
)
def test_resume_restores_state_of_wrappers(
    env: Callable[[], gymnasium.Env], mode: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = unidle.train(env, run_name="whole", quiet=True, **SMALL, **MODES[mode], runs_dir=str(tmp_path))
    resumed = stopped_and_resumed(env, tmp_path, mode)
    assert_same(final_state(resumed.path), final_state(whole.path))
    assert "uninterrupted" not in capsys.readouterr().err


@pytest.mark.parametrize(("env", "mode"), [(curriculum, "overlap"), (random_reward, "workers")])
def test_resume_reports_reward_that_differs(
    env: Callable[[], gymnasium.Env], mode: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stopped_and_resumed(env, tmp_path, mode)
    output = capsys.readouterr().err
    assert "environments did not repeat their open episode (environment " in output
    assert ": the reward of step 1 was " in output
    assert ": this run will differ from an uninterrupted one." in output


def test_resume_names_unsaved_state_even_if_nothing_differs_yet(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stopped_and_resumed(late_curriculum, tmp_path, "in this process")
    output = capsys.readouterr().err
    assert "did not repeat" not in output
    assert (
        "The environment keeps state from one episode to the next that is not saved (LateCurriculum.episodes): if its "
        "observations or rewards depend on that, this run will differ from an uninterrupted one; give its class "
        "state_dict() and load_state_dict()." in output
    )


@pytest.mark.parametrize(
    ("wrapper", "flag"), [(NormalizeObservation, "--normalize-obs"), (NormalizeReward, "--normalize-reward")]
)
def test_start_advises_against_statistics_of_wrappers(
    wrapper: type[gymnasium.Wrapper], flag: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = {**SMALL, "timesteps": 128, "runs_dir": str(tmp_path)}
    unidle.train(lambda: wrapper(gymnasium.make("CartPole-v1")), **settings)
    assert (
        f"{wrapper.__name__} keeps separate statistics in each environment, and others in evaluation; use {flag} "
        "instead, whose statistics they share." in capsys.readouterr().err
    )


def test_states_of_wrappers_do_not_accumulate(tmp_path: Path) -> None:
    run = unidle.train(normalised, quiet=True, run_name="r", runs_dir=str(tmp_path), **SMALL)
    states = final_state(run.path)["collector"]["env_states"]
    assert [list(state) for state in states] == [["carried"]] * 4
    statistics = states[0]["carried"][0]
    assert statistics["count"] > 100
    assert statistics["var"].numpy().dtype == np.float64
