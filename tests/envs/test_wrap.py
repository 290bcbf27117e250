"""`--wrapper` and `wrappers=[…]`: environments are wrapped wherever they are created."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.wrappers import TimeLimit

import unidle
from unidle.config import Config
from unidle.envs.make import env_maker
from unidle.envs.probe import probe
from unidle.envs.wrap import wrapper_entries
from unidle.errors import UsageError

TIME_LIMIT = {"gymnasium.wrappers:TimeLimit": {"max_episode_steps": 3}}
SHORT_RUN: dict[str, Any] = {
    "preset": "classic",
    "n_envs": 2,
    "n_steps": 16,
    "batch_size": 16,
    "timesteps": 32,
    "eval_every": 32,
    "tensorboard": False,
    "device": "cpu",
    "quiet": True,
}


class Doubled(gymnasium.RewardWrapper):
    """Doubles the reward."""

    def reward(self, reward: Any) -> float:
        return 2 * float(reward)


class Speaking(gymnasium.Env):
    """Observes a text."""

    observation_space, action_space = spaces.Text(8), spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[str, dict]:
        return "hello", {}

    def step(self, action: Any) -> tuple[str, float, bool, bool, dict]:
        return "again", 1.0, False, True, {}


class Measured(gymnasium.ObservationWrapper):
    """Observes the length of a text."""

    def __init__(self, env: gymnasium.Env, scale: float = 1.0) -> None:
        super().__init__(env)
        self.observation_space = spaces.Box(0, np.inf, (1,), np.float32)
        self._scale = scale

    def observation(self, observation: Any) -> np.ndarray:
        return np.array([self._scale * len(observation)], np.float32)


def unwrapping(env: gymnasium.Env) -> Any:
    return 3


def test_wrappers_are_applied_from_the_inside_out() -> None:
    env = env_maker("CartPole-v1", wrappers=[TIME_LIMIT, "test_wrap:Doubled"])()
    assert isinstance(env, Doubled)
    assert isinstance(env.env, TimeLimit)
    assert env.env._max_episode_steps == 3


@pytest.mark.parametrize("subproc", [False, True])
def test_training_and_evaluation_use_the_wrapped_env(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, subproc: bool
) -> None:
    monkeypatch.chdir(tmp_path)
    run = unidle.train("CartPole-v1", wrappers=[TIME_LIMIT, Doubled], subproc=subproc, **SHORT_RUN)
    assert run.config.run.wrappers == (TIME_LIMIT, "test_wrap:Doubled")
    assert run.summary()["final_evaluation"] == 6.0
    assert max(record["rollout/return_mean"] for record in run.records if "rollout/return_mean" in record) == 6.0
    loaded = unidle.load(run.path)
    assert set(loaded.evaluate(2).returns) == {6.0}
    assert unidle.resume(run.path, timesteps=64, quiet=True).summary()["final_evaluation"] == 6.0


def test_wrapper_makes_text_observations_trainable() -> None:
    flatten = "gymnasium.wrappers:FlattenObservation"
    with pytest.raises(UsageError) as error:
        probe(env_maker(Speaking))
    assert str(error.value) == (
        f"observation is a Text space; add --wrapper {flatten}, which turns its characters into numbers, or a wrapper "
        "of your own."
    )
    assert isinstance(probe(env_maker(Speaking, wrappers=[flatten])).obs_layout.space, spaces.Box)
    assert probe(env_maker(Speaking, wrappers=[{"test_wrap:Measured": {"scale": 2.0}}])).obs_layout.space.shape == (1,)


def test_device_env_with_wrapper_becomes_single_env() -> None:
    maker = env_maker("unidle/CartPole-v1", wrappers=[TIME_LIMIT])
    assert maker.kind == "gymnasium"
    assert isinstance(maker(), TimeLimit)


@pytest.mark.parametrize(
    ("wrapper", "message"),
    [
        ("Doubled", "`Doubled` is not of the form module:callable"),
        ("nowhere_at_all:Doubled", "Module `nowhere_at_all` cannot be found"),
        ("test_wrap:Tripled", "`test_wrap` has no callable `Tripled`"),
        ({"test_wrap:Measured": {"size": 3}}, "test_wrap:Measured does not accept these arguments"),
        ({"a:b": {}, "c:d": {}}, "write one entry per wrapper"),
        ({"test_wrap:Measured": 3}, "write module:callable, or"),
        ("test_wrap:unwrapping", "returned int; it must return a gymnasium.Env"),
    ],
)
def test_wrong_wrapper_is_one_sentence(wrapper: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        env_maker(Speaking, wrappers=[wrapper])()


def test_vector_env_is_not_wrapped() -> None:
    maker = env_maker(lambda: gymnasium.make_vec("CartPole-v1", 2), wrappers=["test_wrap:Doubled"])
    with pytest.raises(UsageError, match="creates a vector environment; wrap it there"):
        probe(maker)


def test_lambda_as_wrapper_is_refused() -> None:
    with pytest.raises(UsageError, match="cannot be imported by name"):
        wrapper_entries([lambda env: env])


def test_wrappers_are_kept_in_config_file() -> None:
    config = Config().with_values({"wrappers": [TIME_LIMIT, "test_wrap:Doubled"]}, "test")
    assert config.run.wrappers == (TIME_LIMIT, "test_wrap:Doubled")
    with pytest.raises(UsageError, match="`wrappers` must be a list of module:callable"):
        Config().with_values({"wrappers": [3]}, "test")
