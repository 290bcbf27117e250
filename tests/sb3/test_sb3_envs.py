"""Environments: what a model may train on, and where it is stepped."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from cli_envs import Choice
from toy_envs import Walk

from unidle.errors import TrainingError, UsageError
from unidle.metrics.jsonl import read_records
from unidle.sb3 import PPO, DummyVecEnv, Monitor, SubprocVecEnv, evaluate_policy, make_vec_env
from unidle.sb3.envs import resolve_envs

TESTS = str(Path(__file__).parents[1])
PATH = {**os.environ, "PYTHONPATH": os.pathsep.join([TESTS, *filter(None, [os.environ.get("PYTHONPATH")])])}
SMALL: dict[str, Any] = {"n_steps": 16, "batch_size": 16, "n_epochs": 1, "seed": 3, "device": "cpu"}


SHARED = Choice()


class Counted(Choice):
    """Counts its steps, and whether it was closed."""

    steps = closed = 0

    def step(self, action: Any) -> Any:
        self.steps += 1
        return super().step(action)

    def close(self) -> None:
        self.closed += 1


def test_environment_object_itself_is_stepped_and_stays_open() -> None:
    env = Counted()
    PPO("MlpPolicy", env, **SMALL).learn(32)
    assert env.steps >= 32
    assert env.closed == 0


def test_object_that_a_function_returns_is_stepped_and_stays_open() -> None:
    env = Counted()
    PPO("MlpPolicy", DummyVecEnv([lambda: env]), **SMALL).learn(32)
    assert env.steps >= 32
    assert env.closed == 0


def test_failure_of_an_environment_says_how_to_go_on_with_the_same_model() -> None:
    class Breaks(Counted):
        is_broken = True

        def step(self, action: Any) -> Any:
            if self.steps >= 200 and self.is_broken:
                raise ValueError("broken")
            return super().step(action)

    env = Breaks()
    model = PPO("MlpPolicy", env, **SMALL)
    with pytest.raises(TrainingError, match=r"(?s)ValueError: broken.*call learn again with reset") as caught:
        model.learn(640)
    assert "--" not in str(caught.value)
    learned, env.is_broken = model.num_timesteps, False
    model.learn(32, reset_num_timesteps=False)
    assert model.num_timesteps == learned + 32 > 32


@pytest.mark.parametrize("kind", [DummyVecEnv, SubprocVecEnv])
def test_vector_environment_is_only_a_list_of_functions_for_the_pool(kind: Any) -> None:
    vec_env = kind([Choice, partial(Choice, answer=1)])
    PPO("MlpPolicy", vec_env, **SMALL).learn(32)
    assert {"envs", "_group"}.isdisjoint(vars(vec_env))  # it has created nothing itself
    vec_env.close()


def test_each_function_creates_its_own_environment() -> None:
    maker = resolve_envs(DummyVecEnv([partial(Walk, length=2), partial(Walk, length=3)])).maker
    assert [maker.of_env(index)()._last for index in range(2)] == [2, 3]


@pytest.mark.parametrize("kind", [DummyVecEnv, SubprocVecEnv])
def test_vector_environments_step_as_those_of_stable_baselines3(kind: Any) -> None:
    theirs = pytest.importorskip("stable_baselines3.common.vec_env").DummyVecEnv([Walk] * 3)
    ours = kind([Walk] * 3)
    assert (ours.num_envs, ours.observation_space, ours.action_space) == (
        3,
        theirs.observation_space,
        Walk.action_space,
    )
    for each in (ours, theirs):
        each.seed(7)
    assert np.array_equal(ours.reset(), theirs.reset())
    for _ in range(8):
        left, right = (each.step(np.array([0, 1, -1])) for each in (ours, theirs))
        assert np.array_equal(left[0], right[0])
        assert np.allclose(left[1], right[1])
        assert np.array_equal(left[2], right[2])
        # The episodes after the first are seeded by chance.
        assert [info["TimeLimit.truncated"] for info in left[3]] == [info["TimeLimit.truncated"] for info in right[3]]
        if left[2].any():
            assert np.array_equal(*(result[3][0]["terminal_observation"] for result in (left, right)))
            break
    ours.close()


def test_attributes_and_methods_of_environments_are_reached() -> None:
    vec_env = make_vec_env("CartPole-v1", 2, env_kwargs={"render_mode": "rgb_array"})
    assert vec_env.get_attr("gravity") == [9.8, 9.8]
    vec_env.set_attr("gravity", 1.0, indices=1)
    assert vec_env.get_attr("gravity") == [9.8, 1.0]
    assert vec_env.env_is_wrapped(Monitor) == [True, True]
    assert not vec_env.has_attr("levity")
    assert vec_env.render_mode == "rgb_array"


def test_monitor_reports_the_episode() -> None:
    env = Monitor(gymnasium.wrappers.TimeLimit(Choice(), 3))
    env.reset(seed=0)
    results = [env.step(0) for _ in range(3)]
    total = sum(float(reward) for _, reward, *_ in results)
    assert "episode" not in results[0][4]
    assert (results[2][4]["episode"]["r"], results[2][4]["episode"]["l"]) == (total, 3)


def test_policy_is_evaluated_over_exactly_so_many_episodes() -> None:
    class Always:
        def predict(self, observations: Any, **_: Any) -> Any:
            return np.zeros(len(observations), np.int64), None

    returns, lengths = evaluate_policy(Always(), make_vec_env(Choice, 3), 7, return_episode_rewards=True)
    assert len(returns) == len(lengths) == 7
    assert set(lengths) == {10}
    mean, std = evaluate_policy(Always(), Choice(), 4)
    assert 0 <= mean <= 10
    assert std >= 0


class Lives(gymnasium.Wrapper):
    """Ends an episode every 3 steps, as a lost life of an Atari game does; the game goes on at the next reset."""

    def reset(self, **kwargs: Any) -> Any:
        self._steps = 0
        if not getattr(self, "_goes_on", False):
            self._latest = self.env.reset(**kwargs)[0]
        return self._latest, {}

    def step(self, action: Any) -> Any:
        self._latest, reward, terminated, truncated, info = self.env.step(action)
        self._steps += 1
        self._goes_on = not (terminated or truncated)
        return self._latest, reward, terminated or self._steps == 3, truncated, info


@pytest.mark.parametrize("kind", [DummyVecEnv, SubprocVecEnv])
def test_lost_life_is_no_episode_under_a_monitor(kind: Any) -> None:
    class Always:
        def predict(self, observations: Any, **_: Any) -> Any:
            return np.zeros(len(observations), np.int64), None

    vec_env = make_vec_env(Choice, 2, wrapper_class=Lives, vec_env_cls=kind)
    assert evaluate_policy(Always(), vec_env, 4, return_episode_rewards=True)[1] == [10] * 4
    vec_env.close()
    unmonitored = DummyVecEnv([lambda: Lives(Choice())])
    assert evaluate_policy(Always(), unmonitored, 4, return_episode_rewards=True)[1] == [3, 3, 3, 1]


@pytest.mark.parametrize(
    "create",
    [
        lambda env: env,
        lambda env: DummyVecEnv([lambda: env]),
        lambda env: pytest.importorskip("stable_baselines3.common.vec_env").VecNormalize(DummyVecEnv([lambda: env])),
    ],
    ids=["env", "function", "normalised"],
)
def test_evaluations_of_unidle_need_environments_of_their_own(create: Any) -> None:
    env = create(Counted())
    with pytest.raises(UsageError, match="`eval_every` needs environments of its own"):
        PPO("MlpPolicy", env, **SMALL, settings={"eval_every": 32})
    model = PPO("MlpPolicy", make_vec_env(Choice, 1), **SMALL, settings={"eval_every": 16, "eval_episodes": 2})
    model.learn(32)
    records = read_records(Path(model.logger.dir) / "metrics.jsonl")
    assert [record["step"] for record in records if "eval/return_mean" in record] == [16, 32]
    model.set_env(env)
    with pytest.raises(UsageError, match="`eval_every` needs environments of its own"):
        model.learn(32)


# -- of Stable-Baselines3 ----------------------------------------------------------------------------------------------


def test_registered_environments_of_its_vector_environments_are_created_again_in_the_pool() -> None:
    env_util = pytest.importorskip("stable_baselines3.common.env_util")
    vec_env = env_util.make_vec_env("CartPole-v1", 2, env_kwargs={"max_episode_steps": 7})
    envs = resolve_envs(vec_env)
    made = envs.maker.of_env(1)()
    assert (envs.n_envs, envs.maker.name) == (2, "<CartPole-v1>")
    assert made.spec.max_episode_steps == 7
    assert made is not vec_env.envs[1]
    PPO("MlpPolicy", vec_env, **SMALL).learn(32)


def test_other_vector_environments_of_it_are_stepped_themselves() -> None:
    theirs = pytest.importorskip("stable_baselines3.common.vec_env")
    inner = [Counted(), Counted()]
    vec_env = theirs.VecFrameStack(theirs.DummyVecEnv([lambda: inner[0], lambda: inner[1]]), 3)
    model = PPO("MlpPolicy", vec_env, **SMALL).learn(32)
    assert inner[0].steps == inner[1].steps >= 16
    assert inner[0].closed == 0
    assert model.observation_space.shape == vec_env.observation_space.shape
    model.predict(vec_env.reset())


def test_normaliser_has_the_statistics_of_training_and_not_of_the_test_steps() -> None:
    theirs = pytest.importorskip("stable_baselines3.common.vec_env")
    vec_env = theirs.VecNormalize(make_vec_env(Choice, 2, vec_env_cls=DummyVecEnv))
    model = PPO("MlpPolicy", vec_env, **SMALL)
    assert model.get_vec_normalize_env() is vec_env
    model.learn(64)
    # Every step and the first reset of two environments.
    assert vec_env.obs_rms.count == pytest.approx(64 + 2, abs=0.01)
    model.learn(64, reset_num_timesteps=False)
    assert vec_env.obs_rms.count > 128


@pytest.mark.parametrize("monitored", [True, False])
def test_vec_monitor_does_not_keep_environments_out_of_the_pool(monitored: bool, tmp_path: Any) -> None:
    theirs = pytest.importorskip("stable_baselines3.common.vec_env")
    inner = make_vec_env(Choice, 2)
    vec_env = theirs.VecMonitor(inner, None if monitored else str(tmp_path / "log"))
    assert (resolve_envs(vec_env).maker.name == "<Choice>") is monitored  # its file needs its own steps


def test_its_functions_accept_our_vector_environments_and_models() -> None:
    evaluation = pytest.importorskip("stable_baselines3.common.evaluation")
    model = PPO("MlpPolicy", make_vec_env(Choice, 2), **SMALL)
    mean, _ = evaluation.evaluate_policy(model, make_vec_env(Choice, 2), 4, warn=False)
    assert 0 <= mean <= 10


@pytest.mark.parametrize(
    ("env", "message"),
    [
        (lambda: gymnasium.make_vec("CartPole-v1", 2, vectorization_mode="sync"), "use unidle.train"),
        (lambda: DummyVecEnv([lambda: SHARED, lambda: SHARED]), "Two of env_fns return the same environment"),
        (lambda: DummyVecEnv([]), "env_fns is empty"),
        (lambda: Choice, "pass an id"),
    ],
)
def test_unsupported_environments_are_refused_with_the_way_out(env: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        PPO("MlpPolicy", env(), **SMALL)


def test_number_of_environments_is_that_of_the_environment() -> None:
    with pytest.raises(UsageError, match="follows from the environment"):
        PPO("MlpPolicy", Choice(), **SMALL, settings={"n_envs": 4})


WITHOUT_SB3 = """
import sys
sys.modules["stable_baselines3"] = None  # importing it fails
from cli_envs import Choice
from unidle.errors import TrainingError, UsageError
from unidle.metrics.jsonl import read_records
from unidle.sb3 import PPO, EvalCallback, evaluate_policy, make_vec_env
env = make_vec_env(Choice, 2)
model = PPO("MlpPolicy", env, n_steps=16, batch_size=16, n_epochs=1, device="cpu")
model.learn(32, callback=EvalCallback(env, eval_freq=8, n_eval_episodes=1, verbose=0))
print(evaluate_policy(model, env, 2)[0] >= 0)
try:
    from unidle.sb3 import VecNormalize
except UsageError as error:
    print(error)
"""


def test_only_wrappers_of_vector_environments_need_stable_baselines3() -> None:
    done = subprocess.run([sys.executable, "-c", WITHOUT_SB3], env=PATH, text=True, capture_output=True, check=False)
    first, second = done.stdout.splitlines() or [done.stderr, ""]
    assert first == "True"
    assert second == "VecNormalize is Stable-Baselines3's own; run: pip install stable-baselines3"


def test_function_keeps_the_environment_that_its_variable_had() -> None:
    env: Any = Counted()
    first = env
    env = DummyVecEnv([lambda: env])
    PPO("MlpPolicy", env, **SMALL).learn(16)
    assert env.envs == [first]
    assert first.steps >= 16


def test_reset_of_an_environment_object_may_have_no_options() -> None:
    class Old(Choice):
        def reset(self, seed: int | None = None) -> Any:  # type: ignore[override]
            return super().reset(seed=seed)

    assert PPO("MlpPolicy", Old(), **SMALL).learn(16).num_timesteps == 16


def test_unknown_name_is_refused_where_it_is_written() -> None:
    with pytest.raises(gymnasium.error.NameNotFound):
        make_vec_env("NoSuchEnv-v1")


def test_seed_decides_what_a_script_sees_after_training() -> None:
    models = [PPO("MlpPolicy", make_vec_env(Walk, 2), **SMALL).learn(32) for _ in range(2)]
    first, second = (model.get_env().reset() for model in models)
    assert np.array_equal(first, second)
