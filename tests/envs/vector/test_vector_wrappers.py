"""Wrappers of Gymnasium and Stable-Baselines3 around vector environments can be trained on."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import SyncVectorEnv
from gymnasium.wrappers.utils import RunningMeanStd
from gymnasium.wrappers.vector import NormalizeObservation, NormalizeReward
from toy_envs import Walk

import unidle
from unidle.engine.checkpoint.checkpoint_file import load_checkpoint
from unidle.envs.make import EnvMaker
from unidle.envs.probe import probe
from unidle.envs.vector.adapters import GymnasiumVector
from unidle.envs.vector.host_envs import VectorHostEnvs, make_vector_envs
from unidle.envs.vector.vector_wrappers import load_statistics, sb3_observation_space, statistics

N = 4


def cartpole() -> gymnasium.Env:
    return gymnasium.make("CartPole-v1", max_episode_steps=20)


def sb3(wrap: Callable[[Any, Any], Any]) -> Callable[[], Any]:
    def make() -> Any:
        vec_env = pytest.importorskip("stable_baselines3.common.vec_env")
        return wrap(vec_env, vec_env.DummyVecEnv([cartpole] * N))

    return make


WRAPPED: dict[str, Callable[[], Any]] = {
    "VecNormalize": sb3(lambda kinds, env: kinds.VecNormalize(env)),
    "VecFrameStack": sb3(lambda kinds, env: kinds.VecFrameStack(env, 3)),
    "VecNormalize, VecFrameStack": sb3(lambda kinds, env: kinds.VecNormalize(kinds.VecFrameStack(env, 3))),
    "NormalizeObservation": lambda: NormalizeObservation(SyncVectorEnv([cartpole] * N)),
    "NormalizeReward": lambda: NormalizeReward(NormalizeObservation(SyncVectorEnv([cartpole] * N))),
}
NORMALISING = [name for name in WRAPPED if "Normal" in name]


def small_run(tmp_path: Path) -> dict[str, Any]:
    sizes = {"n_steps": 16, "batch_size": 32, "n_epochs": 1, "net_arch": (8,), "timesteps": 256, "eval_episodes": 3}
    return {"preset": "classic", "tensorboard": False, "quiet": True, "runs_dir": str(tmp_path), **sizes}


@pytest.mark.parametrize("kind", WRAPPED)
def test_wrapped_vector_env_trains_resumes_and_evaluates(kind: str, tmp_path: Path) -> None:
    created = []

    def make() -> Any:
        created.append(WRAPPED[kind]())
        return created[-1]

    run = unidle.train(make, eval_every=128, **small_run(tmp_path))
    returns = [record["eval/return_mean"] for record in run.records if record["kind"] == "evaluation"]
    assert all(8 <= value <= 20 and value == round(value * 3) / 3 for value in returns)  # rewards as they are
    saved = load_checkpoint(run.folder.latest())
    assert ("env_statistics" in saved) == (kind in NORMALISING)
    created.clear()
    resumed = unidle.resume(run.path, env=make, timesteps=320, eval_every=0, quiet=True)
    assert resumed.summary()["step"] == 320
    if kind in NORMALISING:
        counts = [entry["count"] for entry in saved["env_statistics"].values()]
        trained = [[entry["count"] for entry in statistics(env).values()] for env in created]
        assert any(all(now > before > 256 for now, before in zip(each, counts)) for each in trained)
    assert 8 <= resumed.evaluate(3).mean_return <= 20


def open_envs(make: Callable[[], Any]) -> VectorHostEnvs:
    maker = EnvMaker("mine:make", make)
    return make_vector_envs(maker, probe(maker), N, 0)


def step_at_random(envs: VectorHostEnvs, steps: int) -> None:
    rng = np.random.default_rng(0)
    envs.start(np.zeros(N, np.int64))
    for _ in range(steps):
        envs.block.actions[:] = rng.integers(0, 2, envs.block.actions.shape)
        envs.send([0])
        envs.recv(1)


@pytest.mark.parametrize("kind", NORMALISING)
def test_evaluation_normalises_with_the_statistics_of_training(kind: str) -> None:
    with closing(open_envs(WRAPPED[kind])) as trained, closing(open_envs(WRAPPED[kind])) as evaluated:
        step_at_random(trained, 50)
        state = trained.statistics()
        assert state
        evaluated.load_statistics(state, freeze=True)
        step_at_random(evaluated, 10)
        assert (evaluated.block.reward == 1).all()
        after = evaluated.statistics()
        for name in state.keys() - {"0.return_rms"}:
            assert all(np.array_equal(after[name][field], state[name][field]) for field in ("mean", "var", "count"))


def test_normalise_observation_counts_each_observation_once_and_normalises_final_ones() -> None:
    raw: list[np.ndarray] = []

    class Recorded(Walk):
        def _observation(self) -> np.ndarray:
            raw.append(super()._observation())
            return raw[-1]

    def make() -> Any:
        raw.clear()
        return NormalizeObservation(SyncVectorEnv([lambda n=n: Recorded(length=2 + n) for n in range(N)]))

    with closing(open_envs(make)) as envs:
        raw.clear()
        step_at_random(envs, 9)
        expected = RunningMeanStd(shape=(2,), dtype=np.float32)
        expected.update(np.stack(raw))
        found = envs.statistics()["0.obs_rms"]
        assert found["count"] == pytest.approx(expected.count)
        np.testing.assert_allclose(found["mean"], expected.mean, rtol=1e-4)
        np.testing.assert_allclose(found["var"], expected.var, rtol=1e-4)
        # The longest episode has length N + 1; the final observation has been normalised, so it is small.
        finals = envs.block.final_obs.view(np.float32).reshape(N, -1)
        assert finals[:, 1].max() < 3 < N + 1


def test_normalise_reward_keeps_the_returns_of_running_episodes() -> None:
    walks = [lambda length=length: Walk(length=length) for length in (2, 50)]
    env = NormalizeReward(SyncVectorEnv(walks), gamma=1.0)
    with closing(GymnasiumVector(env, "mine:make")) as vector:
        vector.reset([0, 1])
        rewards = []
        for _ in range(2):
            vector.send(np.zeros(2, np.int64))
            rewards.append(vector.recv().rewards * np.sqrt(env.return_rms.var + env.epsilon))
        assert env.accumulated_reward[0] == 0
        assert env.accumulated_reward[1] == pytest.approx(sum(reward[1] for reward in rewards), rel=1e-5)


def test_statistics_of_dict_observations_are_saved_per_key() -> None:
    vec_env = pytest.importorskip("stable_baselines3.common.vec_env")

    class DictWalk(gymnasium.ObservationWrapper):
        observation_space = spaces.Dict({"a": Walk.observation_space, "b": Walk.observation_space})

        def observation(self, observation: np.ndarray) -> dict[str, np.ndarray]:
            return {"a": observation, "b": -observation}

    def make() -> Any:
        return vec_env.VecNormalize(vec_env.DummyVecEnv([lambda: DictWalk(Walk())] * 2), norm_obs_keys=["b"])

    first, second = make(), make()
    first.seed(0)
    first.reset()
    assert statistics(first).keys() == {"0.obs_rms.b", "0.ret_rms"}
    load_statistics(second, statistics(first), freeze=False)
    assert np.array_equal(second.obs_rms["b"].mean, first.obs_rms["b"].mean)
    assert second.training


def test_bounds_that_sb3_wrappers_declare_wrongly_are_removed() -> None:
    vec_env = pytest.importorskip("stable_baselines3.common.vec_env")

    class Picture(Walk):
        observation_space = spaces.Box(0, 255, (36, 36, 1), np.uint8)

    base = vec_env.DummyVecEnv([cartpole])
    picture = vec_env.VecFrameStack(vec_env.DummyVecEnv([Picture]), 2)
    assert sb3_observation_space(base) == base.observation_space
    assert sb3_observation_space(vec_env.VecMonitor(base)) == base.observation_space
    assert sb3_observation_space(vec_env.VecFrameStack(base, 2)) == spaces.Box(-np.inf, np.inf, (8,), np.float32)
    assert sb3_observation_space(vec_env.VecNormalize(base)) == spaces.Box(-np.inf, np.inf, (4,), np.float32)
    assert sb3_observation_space(picture) == spaces.Box(0, 255, (36, 36, 2), np.uint8)
    assert sb3_observation_space(vec_env.VecNormalize(base, norm_obs=False)) == base.observation_space
