"""Environment objects instead of names and factories: created again from their spec, or refused in a sentence."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.wrappers import ClipReward, TimeLimit, TransformReward
from stable_baselines3.common.vec_env import DummyVecEnv
from toy_envs import Walk

import unidle
from unidle.envs import plugins
from unidle.envs.env_object import settings_of
from unidle.envs.make import env_maker
from unidle.errors import UsageError

SHORT_RUN: dict[str, Any] = {
    "preset": "classic",
    "n_envs": 2,
    "n_steps": 16,
    "batch_size": 16,
    "timesteps": 32,
    "eval_every": 0,
    "tensorboard": False,
    "device": "cpu",
    "quiet": True,
}


class Parallel:
    """The attributes of a parallel environment of PettingZoo."""

    possible_agents = ("a", "b")

    def step(self, actions: Any) -> Any: ...


def test_env_object_trains_as_its_id_arguments_and_wrappers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    env = ClipReward(gymnasium.make("Pendulum-v1", g=9.0, max_episode_steps=5, render_mode="rgb_array"), -1.0, 1.0)
    run = unidle.train(env, **SHORT_RUN)
    settings = run.config.run
    assert settings.env == "Pendulum-v1"
    assert settings.env_kwargs == {"g": 9.0, "max_episode_steps": 5}
    assert len(settings.wrappers) == 1
    again = unidle.load(run.path).maker()()
    assert isinstance(again, ClipReward)
    assert again.unwrapped.g == 9.0  # type: ignore[attr-defined]
    assert unidle.load(run.path).evaluate(2).lengths == [5, 5]


def test_removed_time_limit_stays_removed() -> None:
    settings = settings_of(gymnasium.make("CartPole-v1", max_episode_steps=-1))
    env: Any = env_maker(settings["env"], settings["env_kwargs"])()
    while env is not env.unwrapped:
        assert not isinstance(env, TimeLimit)
        env = env.env


@pytest.mark.parametrize(
    ("env", "message"),
    [
        (None, "No environment given; pass an id"),
        ("", "No environment given"),
        (3, "The environment is 3; pass an id"),
        (Walk(), r"more than one Walk, .*pass a function that creates one: unidle.train\(lambda: …\)"),
        (TransformReward(gymnasium.make("CartPole-v1"), np.sign), "cannot be .*copied|saved to config.yaml"),
        (gymnasium.make_vec("CartPole-v1", 2), "but got a .*VectorEnv; pass a function"),
        (DummyVecEnv([lambda: gymnasium.make("CartPole-v1")]), "but got a DummyVecEnv; pass a function"),
        (Parallel(), "Parallel is a multi-agent environment"),
    ],
    ids=["none", "empty", "int", "no spec", "unrecorded wrapper", "vector", "sb3 vector", "pettingzoo"],
)
def test_other_objects_are_refused_in_one_sentence(env: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        unidle.train(env, **SHORT_RUN)


def test_arguments_next_to_an_env_object_are_refused() -> None:
    with pytest.raises(UsageError, match="`env_kwargs` needs an environment's id"):
        unidle.train(gymnasium.make("Pendulum-v1"), env_kwargs={"g": 3}, **SHORT_RUN)


def test_factory_of_multi_agent_env_is_called_multi_agent() -> None:
    with pytest.raises(UsageError, match=r"is a multi-agent environment \(PettingZoo\)"):
        env_maker(Parallel)()


@pytest.mark.parametrize(
    ("env_id", "package"),
    [
        ("MiniGrid-Empty-5x5-v0", "minigrid"),
        ("BabyAI-GoToRedBall-v0", "minigrid"),
        ("ALE/Pong-v5", "ale_py"),
        ("FetchReach-v3", "gymnasium_robotics"),
        ("highway-v0", "highway_env"),
        ("mysim/Arm-v0", "mysim"),
    ],
)
def test_unknown_id_of_installed_package_suggests_importing_it(
    monkeypatch: pytest.MonkeyPatch, env_id: str, package: str
) -> None:
    monkeypatch.setattr(plugins, "find_spec", lambda name: object() if name == package else None)
    with pytest.raises(UsageError, match=f"There is no environment `{env_id}` yet; write `{package}:{env_id}`"):
        env_maker(env_id)


@pytest.mark.parametrize("env_id", ["Random-v0", "Test/Random-v0", "CartPol-v1"])
def test_unknown_id_without_package_gets_no_suggestion_to_import(env_id: str) -> None:
    with pytest.raises(UsageError, match=rf"There is no environment `{env_id}`: "):
        env_maker(env_id)
