"""Vector environments write the same values to the shared block as the same environments stepped one by one."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv, VectorEnv
from hypothesis import given
from hypothesis import strategies as st
from space_strategies import leaf_spaces, nested
from toy_envs import Failing, Walk
from vector_envs import DISABLED, NEXT, SAME, TASKS, VECTOR_ENVS, N, RandomEpisodes, gymnasium_factory

import unidle
from unidle.envs.check_env import check_env
from unidle.envs.make import EnvMaker, env_maker
from unidle.envs.open_episode import Difference, OpenEpisode
from unidle.envs.pool.slot import episode_seed
from unidle.envs.probe import probe
from unidle.envs.spec import EnvSpec, mask_from, random_flat_action
from unidle.envs.vector.decode import decode_batch
from unidle.envs.vector.host_envs import VectorHostEnvs, make_vector_envs, vector_size, write_random_actions
from unidle.errors import TrainingError, UsageError
from unidle.report.video import record_video
from unidle.spaces.actions import ActionLayout

RUN_SEED = 5


PAIRS = [(kind, task) for kind in VECTOR_ENVS for task in TASKS]
PAIRS.remove(("sb3, one process", "nested Dict, Dict action"))  # SB3 does not support nested observations
PAIRS.remove(("sb3, processes", "nested Dict, Dict action"))


def open_vector_envs(kind: str, task: str, seed: int = RUN_SEED, first_index: int = 0) -> VectorHostEnvs:
    maker = env_maker(lambda: VECTOR_ENVS[kind](TASKS[task]))
    return make_vector_envs(maker, probe(maker), N, seed, first_index)


def step(envs: VectorHostEnvs) -> None:
    envs.send(range(len(envs.bounds)))
    assert envs.recv(len(envs.bounds)) == list(range(len(envs.bounds)))


def reference_env(env: gymnasium.Env, seed: int, env_spec: EnvSpec) -> Iterator[dict[str, Any]]:
    """What the block must hold for one environment: first after its reset, then after each action sent in."""

    def packed(observation: Any, info: dict[str, Any]) -> bytes:
        obs = env_spec.obs_layout.pack(observation)
        if env_spec.obs_layout.mask_width:
            mask = mask_from(observation, info, env_spec.obs_layout.space)
            env_spec.obs_layout.mask_view(obs[None])[0] = env_spec.action_layout.flatten_mask(mask)
        return obs.tobytes()

    expected = {"obs": packed(*env.reset(seed=seed))}
    total, length, episode = 0.0, 0, 0
    while True:
        action = yield expected
        observation, reward, terminated, truncated, info = env.step(env_spec.action_layout.decode(action))
        total, length = total + reward, length + 1
        expected = {"reward": np.float32(reward), "terminated": terminated, "truncated": truncated and not terminated}
        if terminated or truncated:
            if not terminated:
                expected["final"] = env_spec.obs_layout.pack(observation).tobytes()
            expected |= {"return": total, "length": length}
            total, length, episode = 0.0, 0, episode + 1
            observation, info = env.reset()
        expected |= {"obs": packed(observation, info), "episode": episode}


def block_values(envs: VectorHostEnvs, env_id: int) -> dict[str, Any]:
    block = envs.block
    values = {name: getattr(block, name)[env_id] for name in ("reward", "terminated", "truncated", "episode")}
    values["obs"] = block.obs[env_id].tobytes()
    if values["truncated"]:
        values["final"] = block.final_obs[env_id].tobytes()
    if values["truncated"] or values["terminated"]:
        approximate_return = pytest.approx(
            block.episode_return[env_id], rel=1e-5, abs=1e-5
        )  # SB3 keeps rewards as float32
        values |= {"return": approximate_return, "length": block.episode_length[env_id]}
    return values


@pytest.mark.parametrize(("kind", "task"), PAIRS)
def test_block_equals_envs_stepped_one_by_one(kind: str, task: str) -> None:
    rng = np.random.default_rng(0)
    with closing(open_vector_envs(kind, task, first_index=40)) as envs:
        env_spec = envs.env_spec
        assert env_spec.vectorised
        seed = episode_seed(RUN_SEED, 40, 0)
        references = [reference_env(TASKS[task](), seed + env_id, env_spec) for env_id in range(N)]
        envs.start(np.zeros(N, np.int64))
        assert [next(reference)["obs"] for reference in references] == [obs.tobytes() for obs in envs.block.obs]
        ends = {"terminated": 0, "truncated": 0}
        for _ in range(80):
            write_random_actions(envs, rng)
            step(envs)
            for env_id, reference in enumerate(references):
                assert reference.send(envs.block.actions[env_id].copy()) == block_values(envs, env_id)
            for name in ends:
                ends[name] += int(getattr(envs.block, name).sum())
        assert ends["truncated"] > 10  # episode ends are covered
        assert envs.faults == envs.restarted == []
        assert not envs.block.retry.any()


@given(nested(leaf_spaces()), st.integers(0, 2**31 - 1), st.sampled_from([None, 3]))
def test_decode_batch_equals_decoding_each_action(space: spaces.Space, seed: int, discretize: int | None) -> None:
    with contextlib.suppress(UsageError):  # no bins between infinite bounds
        layout = ActionLayout.of(space, discretize)
        rng = np.random.default_rng(seed)
        obs = np.stack([random_flat_action(layout, rng) for _ in range(3)])
        batched_space = gymnasium.vector.utils.batch_space(space, 3)
        for index, single in enumerate(gymnasium.vector.utils.iterate(batched_space, decode_batch(layout, obs))):
            assert layout.encode(single).tolist() == layout.encode(layout.decode(obs[index])).tolist()
            assert space.contains(single)


# -- start and resume --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["sync, same step", "sync, next step", "sb3, one process"])
def test_start_repeats_episodes_of_the_same_seed_only(kind: str) -> None:
    with (
        closing(open_vector_envs(kind, "Dict")) as envs,
        closing(open_vector_envs(kind, "Dict", first_index=7)) as others,
    ):
        seen = []
        for _ in range(2):
            envs.start(np.zeros(N, np.int64))
            for _ in range(20):
                envs.block.actions[:] = 1
                step(envs)
            seen.append(envs.block.obs.copy())
        assert np.array_equal(*seen)
        others.start(np.zeros(N, np.int64))
        envs.start(np.zeros(N, np.int64))
        assert not np.array_equal(others.block.obs, envs.block.obs)


def test_resume_starts_new_episodes() -> None:
    with closing(open_vector_envs("sync, same step", "Dict")) as envs:
        envs.start(np.zeros(N, np.int64))
        first = envs.block.obs.copy()
        assert envs.states() == [None] * N
        actions, rewards = np.zeros((2, 2), np.float32), np.zeros(2, np.float32)
        points = [OpenEpisode(3 + env_id, actions, rewards, first[env_id]) for env_id in range(N)]
        lost = Difference("the state of a vector environment cannot be restored", is_lost=True)
        assert envs.resume(points) == [lost] * N
        assert envs.block.episode.tolist() == [4, 5, 6, 7]
        assert not np.array_equal(envs.block.obs, first)


def test_recv_without_send_returns_nothing() -> None:
    with closing(open_vector_envs("sync, same step", "Dict")) as envs:
        envs.start(np.zeros(N, np.int64))
        assert envs.recv(1) == envs.recv(1, 0.0) == []


# -- errors ------------------------------------------------------------------------------------------------------------


def probe_error(factory: Callable[[], Any]) -> str:
    with pytest.raises(UsageError) as error:
        probe(EnvMaker("mine:make", factory))
    assert "\n" not in str(error.value)
    return str(error.value)


def test_unavoidable_next_step_autoreset_is_rejected() -> None:
    message = (
        r"mine:make resets by an extra step (CartPoleVectorEnv with autoreset_mode NEXT_STEP), "
        "which does not fit into a rollout; "
        r"use SAME_STEP, or gymnasium.make_vec(…, vectorization_mode='sync')."
    )
    assert probe_error(lambda: gymnasium.make_vec("CartPole-v1", num_envs=2)) == message
    without_shared_memory = gymnasium_factory(AsyncVectorEnv, NEXT, shared_memory=False)
    assert probe_error(lambda: without_shared_memory(Walk)).startswith("mine:make resets by an extra step (AsyncV")


class CustomVectorEnv(VectorEnv):
    """Two environments with scalar observations, truncated after 3 steps; `violation` says how to break the API."""

    num_envs = 2
    single_observation_space = spaces.Box(-np.inf, np.inf, (1,), np.float32)
    single_action_space = spaces.Discrete(2)

    def __init__(self, mode: AutoresetMode | None, violation: str = "") -> None:
        self.metadata = {"autoreset_mode": mode} if mode else {}
        self._mode, self._violation = mode, violation

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[np.ndarray, dict]:
        if self._violation == "reset_mask" or not options:
            self._at = np.array([[0.0], [1.0]], np.float32)
        else:
            self._at[options["reset_mask"]] = 0.0
        return self._at.copy(), {}

    def step(self, actions: Any) -> Any:
        self._at += 1
        ended = self._at[:, 0] >= 3
        infos: dict[str, Any] = {}
        if self._mode is SAME and ended.any():
            if self._violation != "final_obs":
                infos["final_obs"] = np.array([list(at) if end else None for at, end in zip(self._at, ended)], object)
            self._at[ended] = 0
        if self._violation == "late action_mask":
            infos["action_mask"] = np.ones((2, 2), np.int8)
        rewards = np.ones((2, 1) if self._violation == "rewards" else 2)
        return self._at.copy(), rewards, np.zeros(2, int if self._violation == "flags" else bool), ended, infos


@pytest.mark.parametrize(
    ("mode", "violation", "message"),
    [
        (None, "", "mine:make does not declare its autoreset mode; set metadata['autoreset_mode']"),
        (
            DISABLED,
            "reset_mask",
            "The vector environment's autoreset_mode is DISABLED, but reset(options={'reset_mask'",
        ),
        (SAME, "rewards", "step() of the vector environment must return rewards as one number per environment (2)"),
        (SAME, "flags", "step() of the vector environment must return terminated as one bool per environment (2)"),
        (SAME, "final_obs", "The vector environment truncated an episode of environment 1, but"),
        (SAME, "late action_mask", "info['action_mask'] is set by step() but not by reset(); set it in both."),
    ],
)
def test_vector_env_api_violation_is_reported(mode: AutoresetMode | None, violation: str, message: str) -> None:
    assert probe_error(lambda: CustomVectorEnv(mode, violation)).startswith(message)


def test_valid_custom_vector_env_is_accepted() -> None:
    for mode in (SAME, DISABLED):
        maker = env_maker(lambda mode=mode: CustomVectorEnv(mode))
        with closing(make_vector_envs(maker, probe(maker), 2, 0)) as envs:
            envs.start(np.zeros(2, np.int64))
            seen = []
            for _ in range(4):
                step(envs)
                seen.append([*envs.block.obs.view(np.float32)[:, 0].tolist(), *envs.block.truncated.tolist()])
            assert seen == [[1, 2, 0, 0], [2, 0, 0, 1], [0, 1, 1, 0], [1, 2, 0, 0]]
            assert envs.block.final_obs.view(np.float32)[:, 0].tolist() == [3, 3]


def start_and_step(envs: VectorHostEnvs) -> None:
    envs.start(np.zeros(envs.n_envs, np.int64))
    for _ in range(5):
        step(envs)


def test_exception_in_vector_env_ends_training_with_traceback() -> None:
    maker = env_maker(lambda: VECTOR_ENVS["sync, same step"](Failing))
    env_spec = probe(env_maker(lambda: VECTOR_ENVS["sync, same step"](Walk)))
    with closing(make_vector_envs(maker, env_spec, N, 0)) as envs, pytest.raises(TrainingError) as error:
        start_and_step(envs)
    first, *rest = str(error.value).splitlines()
    assert first == "The vector environment failed in step 2: ZeroDivisionError: the robot fell over"
    assert any("toy_envs.py" in line for line in rest)


def test_video_of_vector_env_is_rejected(tmp_path: Path) -> None:
    maker = EnvMaker("mine:make", lambda: VECTOR_ENVS["sync, same step"](Walk))
    message = r"^mine:make is a batched environment; this command needs a factory of one gymnasium.Env\.$"
    with pytest.raises(UsageError, match=message):
        record_video(None, maker, tmp_path / "film.mp4", 0)  # type: ignore[arg-type]


def test_vector_size_calls_only_unknown_factories() -> None:
    calls = []

    def make(vectorised: bool) -> Any:
        calls.append(vectorised)
        return VECTOR_ENVS["sync, same step"](Walk) if vectorised else Walk()

    assert vector_size(env_maker(make, {"vectorised": True})) == N
    assert vector_size(env_maker(make, {"vectorised": False})) is None
    assert calls == [True, False]
    for single in (Walk, "CartPole-v1"):
        assert env_maker(single).kind == "gymnasium"
        assert vector_size(env_maker(single)) is None


def test_check_env_checks_all_steps_of_all_envs() -> None:
    found = check_env(EnvMaker("mine:make", lambda: VECTOR_ENVS["sync, next step"](RandomEpisodes)), steps=30)
    assert found.steps == 32  # N at a time
    assert found.episodes > 3
    assert found.facts["action mask"] == "yes"
    assert not any("same seed" in remark for remark in found.remarks)

    class LateNan(Walk):
        def step(self, action: Any) -> Any:
            observation, *rest = super().step(action)
            return observation.astype(np.float32) * (np.nan if self._steps > 40 else 1), *rest

    make_late = lambda: SyncVectorEnv([lambda: LateNan(length=99)] * 2, autoreset_mode=SAME)  # noqa: E731
    probe(env_maker(make_late))
    with pytest.raises(UsageError, match=r"^observation from step\(\) holds nan at index \(0,\)"):
        check_env(env_maker(make_late), steps=100)


# -- training ----------------------------------------------------------------------------------------------------------

SMALL: dict[str, Any] = {
    "preset": "classic",
    "n_steps": 16,
    "batch_size": 32,
    "n_epochs": 2,
    "net_arch": (8,),
    "timesteps": 256,
    "eval_every": 128,
    "eval_episodes": 3,
    "tensorboard": False,
    "device": "cpu",
    "quiet": True,
    "runs_dir": "runs",
}


@pytest.fixture(autouse=True)
def run_in_tmp_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def train_metrics(run: unidle.TrainedRun) -> list[dict[str, Any]]:
    """The metrics of each update."""
    return [{k: v for k, v in record.items() if k.startswith("train/")} for record in run.records]


def cartpole_factory(kind: str) -> Callable[[], Any]:
    return lambda: VECTOR_ENVS[kind](lambda: gymnasium.make("CartPole-v1", max_episode_steps=20))


@pytest.mark.parametrize("kind", ["sync, next step", "async, same step", "sb3, one process"])
def test_vector_envs_train_resume_and_evaluate(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    env = cartpole_factory(kind)
    run = unidle.train(env, run_name="first", **{**SMALL, "quiet": False})
    stderr = capsys.readouterr().err
    assert re.search(r"n_envs is 4, the number of environments that \S*<lambda> creates\.", stderr), stderr
    assert (run.config.recipe.n_envs, run.config.recipe.batch_size) == (4, 32)
    returns = [record["eval/return_mean"] for record in run.records if record["kind"] == "evaluation"]
    assert len(returns) == 2
    assert all(8 <= value <= 20 for value in returns)
    again = unidle.train(env, run_name="again", **SMALL)
    assert train_metrics(run) == train_metrics(again)
    capsys.readouterr()
    more = unidle.resume(run.path, env=env, timesteps=320, quiet=True)
    assert "this run will differ from an uninterrupted one" in capsys.readouterr().err
    assert more.summary()["step"] == 320
    assert more.evaluate(5).episodes == 5
    assert more.evaluate(5).returns == more.evaluate(5).returns


def test_factory_sets_number_of_envs() -> None:
    env = cartpole_factory("sync, same step")
    message = r"<lambda> creates 4 environments, not 3; leave out `n_envs`, or set it to 4\.$"
    with pytest.raises(UsageError, match=message):
        unidle.train(env, **SMALL, n_envs=3)
    run = unidle.train(env, **SMALL, n_envs=4)
    fewer = lambda: SyncVectorEnv([lambda: gymnasium.make("CartPole-v1")] * 2, autoreset_mode=SAME)  # noqa: E731
    with pytest.raises(UsageError, match=r"<lambda> creates 2 environments, but the run has 4"):
        unidle.resume(run.path, env=fewer, timesteps=512)


def test_preset_batch_size_is_adjusted_to_number_of_envs() -> None:
    env = lambda: SyncVectorEnv([lambda: gymnasium.make("CartPole-v1")] * 3, autoreset_mode=SAME)  # noqa: E731
    settings = {**SMALL, "n_steps": 10, "timesteps": 30, "eval_every": 0}
    del settings["batch_size"]
    assert unidle.train(env, **settings).config.recipe.batch_size == 30  # the largest divisor not above 64


def test_gymnasium_make_vec_is_a_valid_factory() -> None:
    kwargs = {"num_envs": 4, "vectorization_mode": "sync", "vector_kwargs": {"autoreset_mode": SAME}}
    run = unidle.train(lambda: gymnasium.make_vec("Acrobot-v1", **kwargs), **{**SMALL, "eval_every": 0})
    assert run.config.recipe.n_envs == 4


# -- EnvPool -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def envpool() -> Any:
    return pytest.importorskip("envpool")


def envpool_reference(envpool: Any, seed: int, kwargs: dict[str, Any]) -> Iterator[tuple[np.ndarray, Any]]:
    """One EnvPool environment, without the extra step with which EnvPool starts an episode."""
    pool = envpool.make("CartPole-v1", env_type="gymnasium", num_envs=1, seed=[seed], **kwargs)
    observation, _ = pool.reset()
    action = yield observation[0], None
    while True:
        last, reward, terminated, truncated, _ = pool.step(action.astype(np.int32))
        ended = bool(terminated[0] or truncated[0])
        observation = pool.step(action.astype(np.int32))[0] if ended else last
        outcome = (float(reward[0]), bool(terminated[0]), bool(truncated[0]), last[0] if truncated[0] else None)
        action = yield observation[0], outcome


@pytest.mark.parametrize("slices", [1, 3])
def test_envpool_equals_its_envs_stepped_one_by_one(envpool: Any, slices: int) -> None:
    kwargs = {"max_episode_steps": 12}
    maker = env_maker("envpool:CartPole-v1", kwargs)
    rng = np.random.default_rng(0)
    with closing(make_vector_envs(maker, probe(maker), 5, RUN_SEED, 40, slices)) as envs:
        assert len(envs.bounds) == slices
        for _ in range(2):  # a second start repeats the episodes
            references = [
                envpool_reference(envpool, episode_seed(RUN_SEED, 40 + env_id, 0), kwargs) for env_id in range(5)
            ]
            envs.start(np.zeros(5, np.int64))
            obs = envs.block.obs.view(np.float32)
            assert [next(reference)[0].tolist() for reference in references] == obs.tolist()
            truncations = 0
            for _ in range(60):
                write_random_actions(envs, rng)
                step(envs)
                for env_id, reference in enumerate(references):
                    observation, (reward, terminated, truncated, final) = reference.send(envs.block.actions[env_id])
                    assert obs[env_id].tolist() == observation.tolist()
                    assert envs.block.reward[env_id] == reward
                    assert (envs.block.terminated[env_id], envs.block.truncated[env_id]) == (terminated, truncated)
                    if truncated:
                        truncations += 1
                        assert envs.block.final_obs[env_id].view(np.float32).tolist() == final.tolist()
            assert truncations > 5


def test_envpool_slices_are_received_in_send_order(envpool: Any) -> None:
    maker = env_maker("envpool:CartPole-v1")
    with closing(make_vector_envs(maker, probe(maker), 6, 0, slices=3)) as envs:
        envs.start(np.zeros(6, np.int64))
        envs.send([2])
        envs.send([0, 1])
        assert [envs.recv(1), envs.recv(1, 0.0), envs.recv(1), envs.recv(1)] == [[2], [0], [1], []]


def test_envpool_run_is_reproducible_with_any_slices(envpool: Any) -> None:
    run, again = (
        unidle.train("envpool:CartPole-v1", **SMALL, n_envs=6, slices=slices, run_name=str(slices)) for slices in (1, 3)
    )
    assert train_metrics(run) == train_metrics(again)
    assert unidle.load(run.path).evaluate(5).episodes == 5


def test_envpool_trains_with_continuous_actions(envpool: Any) -> None:
    run = unidle.train("envpool:Pendulum-v1", **{**SMALL, "eval_every": 0}, n_envs=4)
    assert run.agent.action_layout.reals == 1


@pytest.mark.parametrize(
    ("name", "kwargs", "message"),
    [
        ("envpool:CartPool-v1", {}, r"^EnvPool has no environment `CartPool-v1`; did you mean `CartPole-v1`\?$"),
        ("envpool:CartPole-v1", {"num_envs": 4}, r"^EnvPool's `num_envs` is set by n_envs; leave"),
        ("envpool:CartPole-v1", {"gravity": 4}, r"^envpool:CartPole-v1 does not accept these env_kwargs: .*gravity"),
    ],
)
def test_envpool_mistake_is_one_line_error(envpool: Any, name: str, kwargs: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        probe(env_maker(name, kwargs))


def test_user_created_envpool_is_rejected(envpool: Any) -> None:
    message = r"^unidle creates EnvPool environments itself; use --env envpool:CartPole-v1 and --env-kwargs\.$"
    with pytest.raises(UsageError, match=message):
        probe(env_maker(lambda: envpool.make("CartPole-v1", env_type="gymnasium", num_envs=2)))


def test_missing_envpool_error_names_install_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "envpool", None)
    with pytest.raises(UsageError, match=r"^`envpool:CartPole-v1` needs the package envpool; run: pip install"):
        env_maker("envpool:CartPole-v1")
