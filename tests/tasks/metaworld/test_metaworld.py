"""Meta-World, the real package: accelerated tasks match it bit for bit, and episodes repeat from their seeds."""

from __future__ import annotations

import copy
import functools
import pickle
import sys
from types import SimpleNamespace
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env
from gymnasium.wrappers import TimeLimit
from hypothesis import given
from hypothesis import strategies as st

metaworld = pytest.importorskip("metaworld")
mujoco = pytest.importorskip("mujoco")

from metaworld.env_dict import ALL_V3_ENVIRONMENTS  # noqa: E402
from metaworld.policies import ENV_POLICY_MAP  # noqa: E402
from metaworld.utils import reward_utils  # noqa: E402
from scipy.spatial.transform import Rotation  # noqa: E402

from unidle.envs.make import env_maker  # noqa: E402
from unidle.errors import UsageError  # noqa: E402
from unidle.tasks.metaworld import env as metaworld_env  # noqa: E402
from unidle.tasks.metaworld import fast as metaworld_fast  # noqa: E402
from unidle.tasks.metaworld.env import MetaWorldTask, MultiTaskEnv, goals_of, task_names  # noqa: E402
from unidle.tasks.metaworld.fast import accelerate  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:Constant.s. may be too high")  # the package's scripted policies

STEPS = 60


@functools.lru_cache(maxsize=10)  # 20 MB each
def load_model(path: str) -> Any:
    return mujoco.MjModel.from_xml_path(path)


@pytest.fixture(autouse=True)
def _cache_models(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(env: Any) -> tuple[Any, Any]:
        model = copy.copy(load_model(env.fullpath))
        return model, mujoco.MjData(model)

    monkeypatch.setattr(gymnasium.envs.mujoco.MujocoEnv, "_initialize_simulation", start)


def bits(value: Any) -> Any:
    """Type, dtype, shape and bytes of a value; infos hold only numbers and booleans."""
    return type(value), np.asarray(value).dtype, np.asarray(value).shape, np.asarray(value).tobytes()


def outcome(step: tuple[Any, ...]) -> list[Any]:
    observation, reward, terminated, truncated, info = step
    return [bits(observation), bits(reward), terminated, truncated, {key: bits(value) for key, value in info.items()}]


def stock(name: str, goals: int = 2) -> tuple[Any, list[np.ndarray]]:
    """An environment of the package, and goals that it drew itself."""
    env = ALL_V3_ENVIRONMENTS[name]()
    env._partially_observable, env._freeze_rand_vec, env._set_task_called = False, False, True
    del env.sawyer_observation_space
    state = np.random.get_state()  # noqa: NPY002
    np.random.seed(5)  # noqa: NPY002
    drawn = []
    for _ in range(goals):
        env.reset()
        drawn.append(env._last_rand_vec.copy())
    np.random.set_state(state)  # noqa: NPY002
    env._freeze_rand_vec = True
    return env, drawn


def accelerated(name: str) -> Any:
    env = ALL_V3_ENVIRONMENTS[name]()
    assert accelerate(env)
    env._partially_observable, env._set_task_called = False, True
    del env.sawyer_observation_space
    return env


def reset_to(env: Any, goal: np.ndarray) -> np.ndarray:
    env._last_rand_vec = goal.copy()
    observation, info = env.reset()
    assert info == {}
    return observation


def touches(env: Any) -> list[bool]:
    return [bool(env.touching_object(geom)) for geom in range(env.model.ngeom)]


@pytest.mark.parametrize("name", list(ALL_V3_ENVIRONMENTS))
def test_accelerated_task_matches_the_package_bit_for_bit(name: str) -> None:
    stock_env, goals = stock(name)
    first, second = accelerated(name), accelerated(name)
    policy, noise = ENV_POLICY_MAP[name](), np.random.default_rng(1)
    # Goal 0 comes twice: `first` restores a start that it saw itself, `second` one that only `first` saw.
    for episode, goal in enumerate([0, 1, 0]):
        fast_env = second if episode == 2 else first
        observation = reset_to(stock_env, goals[goal])
        assert bits(observation) == bits(reset_to(fast_env, goals[goal]))
        for step in range(STEPS):
            # The scripted policy reaches objects and goals; random actions also exceed the bounds.
            intended = policy.get_action(observation) if episode else noise.uniform(-1.3, 1.3, 4)
            action = (intended + noise.normal(0, 0.05, 4)).astype(np.float32)
            expected_step = stock_env.step(action)
            assert outcome(expected_step) == outcome(fast_env.step(action)), (episode, step)
            observation = expected_step[0]
        assert touches(stock_env) == touches(fast_env)
    assert np.array_equal(reset_to(first, goals[0]), reset_to(stock_env, goals[0]))


@pytest.mark.parametrize("name", ["assembly-v3", "door-open-v3", "pick-place-v3"])
def test_hidden_goals_and_v1_rewards_match_the_package(name: str) -> None:
    stock_env, goals = stock(name)
    fast_env, noise = accelerated(name), np.random.default_rng(2)
    for version, hidden in [("v2", False), ("v2", True), ("v1", False), ("v1", True), ("v1", False), ("v2", True)]:
        for env in (stock_env, fast_env):
            env.reward_function_version, env._partially_observable = version, hidden
            env.__dict__.pop("sawyer_observation_space", None)
        assert bits(reset_to(stock_env, goals[0])) == bits(reset_to(fast_env, goals[0]))
        for _ in range(10):
            action = noise.uniform(-1, 1, 4).astype(np.float32)
            assert outcome(stock_env.step(action)) == outcome(fast_env.step(action))


def test_observations_are_clipped_copies() -> None:
    stock_env, goals = stock("hammer-v3")
    fast_env = accelerated("hammer-v3")
    for env in (stock_env, fast_env):
        env.sawyer_observation_space = gymnasium.spaces.Box(-0.1, 0.1, (39,), np.float64)
        reset_to(env, goals[0])
    for _ in range(3):
        (observation, *_), (ours, *_) = expected_step = [
            env.step(np.ones(4, np.float32)) for env in (stock_env, fast_env)
        ]
        assert outcome(expected_step[0]) == outcome(expected_step[1])
        assert observation.max() == 0.1
        observation[:], ours[:] = 9.0, 9.0
    assert bits(stock_env._last_stable_obs) == bits(fast_env._last_stable_obs)
    first = reset_to(fast_env, goals[0])
    first[:] = 9.0
    assert bits(reset_to(fast_env, goals[0])) == bits(reset_to(stock_env, goals[0]))


def test_goals_are_drawn_like_the_package() -> None:
    drawn = []
    for env in (stock("push-v3")[0], accelerated("push-v3")):
        env._freeze_rand_vec, env.seeded_rand_vec = False, True
        env.seed(4)
        drawn.append([(bits(env.reset()[0]), env._last_rand_vec) for _ in range(3)])
        env._freeze_rand_vec = True
        assert [bits(reset_to(env, goal)) for _, goal in drawn[-1]] == [first for first, _ in drawn[-1]]
    assert [first for first, _ in drawn[0]] == [first for first, _ in drawn[1]]
    assert drawn[0][0][0] != drawn[0][1][0]


@pytest.mark.parametrize("name", ["pick-place-v3", "door-lock-v3", "basketball-v3", "bin-picking-v3"])
def test_restored_start_has_the_same_state_and_attributes(name: str) -> None:
    stock_env, goals = stock(name)
    fast_env = accelerated(name)
    for goal in (0, 1, 0):
        for env in (stock_env, fast_env):
            reset_to(env, goals[goal])
            for _ in range(5):
                env.step(np.array([0.3, 1.0, -1.0, 1.0], np.float32))
    for field in ("qpos", "qvel", "qacc_warmstart", "mocap_pos", "mocap_quat", "ctrl", "xpos", "site_xpos", "cfrc_ext"):
        assert bits(getattr(stock_env.data, field)) == bits(getattr(fast_env.data, field)), field
    assert bits(stock_env.model.body_pos) == bits(fast_env.model.body_pos)
    assert bits(stock_env.model.site_pos) == bits(fast_env.model.site_pos)
    kept = {key: value for key, value in vars(stock_env).items() if isinstance(value, (int, float, np.ndarray))}
    assert {key: bits(value) for key, value in kept.items()} == {key: bits(getattr(fast_env, key)) for key in kept}


def test_gripper_contacts_match_the_package() -> None:
    stock_env, goals = stock("pick-place-v3")
    fast_env = accelerated("pick-place-v3")
    policy, observation = ENV_POLICY_MAP["pick-place-v3"](), reset_to(stock_env, goals[0])
    reset_to(fast_env, goals[0])
    held = []
    for _ in range(90):
        action = policy.get_action(observation).astype(np.float32)
        observation = stock_env.step(action)[0]
        fast_env.step(action)
        assert touches(stock_env) == touches(fast_env)
        held.append(stock_env.touching_main_object)
        assert held[-1] == fast_env.touching_main_object
    assert any(held)
    assert not all(held)


class Contacts(list[Any]):
    """Stands in for MuJoCo's contact list, which is read item by item and as arrays."""

    geom = property(lambda self: np.array([(one.geom1, one.geom2) for one in self], np.int32).reshape(-1, 2))
    efc_address = property(lambda self: np.array([one.efc_address for one in self], np.int32))


@functools.cache
def reach_envs() -> tuple[Any, Any]:
    return stock("reach-v3")[0], accelerated("reach-v3")


geom_names = st.sampled_from(["leftpad_geom", "rightpad_geom", "objGeom", "mocap"])
touch = st.tuples(geom_names, geom_names, st.sampled_from([-1.0, 0.0, 0.5, 1.0]))


@given(st.lists(touch, max_size=6), st.randoms())
def test_touching_uses_the_summed_force_on_each_pad(contacts: list[tuple[str, str, float]], rng: Any) -> None:
    stock_env, fast_env = reach_envs()
    ids = {name: stock_env.data.geom(name).id for name in ("leftpad_geom", "rightpad_geom", "objGeom")} | {"mocap": 0}
    addresses = rng.sample(range(len(contacts)), len(contacts))
    found = Contacts(
        SimpleNamespace(geom1=ids[one], geom2=ids[other], efc_address=address)
        for (one, other, _), address in zip(contacts, addresses)
    )
    forces = np.zeros(len(contacts))
    forces[addresses] = [force for *_, force in contacts]
    fake_data = SimpleNamespace(contact=found, efc_force=forces, geom=stock_env.data.geom)
    for geom in ids.values():
        answers = []
        for env in (stock_env, fast_env):
            real, env.data = env.data, fake_data
            try:
                answers.append(bool(env.touching_object(geom)))
            finally:
                env.data = real
        assert answers[0] == answers[1]


def test_accelerate_changes_only_the_given_environment() -> None:
    one, other = (ALL_V3_ENVIRONMENTS["reach-v3"]() for _ in range(2))
    assert accelerate(TimeLimit(one, 10))
    assert accelerate(one)
    assert type(other) is ALL_V3_ENVIRONMENTS["reach-v3"]
    assert isinstance(one, ALL_V3_ENVIRONMENTS["reach-v3"])
    assert reward_utils.tolerance.__module__ == "metaworld.utils.reward_utils"
    with pytest.raises(RuntimeError, match="set_task"):
        one.step(np.zeros(4, np.float32))
    one._set_task_called = True
    with pytest.raises(AssertionError, match="size 4"):
        one.step(np.zeros(3, np.float32))


# -- numeric helpers ---------------------------------------------------------------------------------------------------

numbers = st.floats(-3, 3).flatmap(lambda x: st.sampled_from([x, np.float64(x), np.float32(x), np.array([x])]))


@given(
    x=numbers,
    low=st.sampled_from([0, 0.0, 0.015, -0.5]),
    width=st.sampled_from([0, 0.0, 0.05, 1.0]),
    margin=st.floats(0, 2).flatmap(lambda m: st.sampled_from([m, np.float64(m), np.float32(m), 0, 0.4])),
    shape=st.sampled_from(["long_tail", "gaussian", "hyperbolic", "quadratic"]),
    at_margin=st.sampled_from([0.1, 0.3]),
)
def test_tolerance_matches_the_package(
    x: Any, low: float, width: float, margin: Any, shape: Any, at_margin: float
) -> None:
    args = (x, (low, low + width), margin, shape, at_margin)
    with np.errstate(all="ignore"):
        assert bits(metaworld_fast.tolerance(*args)) == bits(reward_utils.tolerance(*args))


@pytest.mark.parametrize("x", [0.3, np.float64("nan"), np.float64("inf"), 0.02, -0.0])
@pytest.mark.parametrize("margin", [0.0, 1e-300, np.float64("nan"), np.float32(0.1)])
def test_tolerance_of_extreme_values_matches_the_package(x: float, margin: Any) -> None:
    for shape in ("long_tail", "gaussian"):
        with np.errstate(all="ignore"):
            ours, theirs = (t(x, (0, 0.02), margin, shape) for t in (metaworld_fast.tolerance, reward_utils.tolerance))
        assert bits(ours) == bits(theirs)


def test_tolerance_raises_the_same_errors_as_the_package() -> None:
    for args in [(0.1, (1, 0), 0.1), (0.1, (0, 1), -0.1)]:
        with pytest.raises(ValueError, match=r"ound|margin") as theirs:
            reward_utils.tolerance(*args)
        with pytest.raises(ValueError, match=r"ound|margin") as ours:
            metaworld_fast.tolerance(*args)
        assert str(ours.value) == str(theirs.value)


@given(st.lists(st.floats(-1e3, 1e3), min_size=1, max_size=7))
def test_norm_matches_numpy(values: list[float]) -> None:
    vector = np.array(values)
    args = [
        vector,
        vector[0],
        vector[::2],
        vector[::-1],
        vector.astype(np.float32),
        vector[:, None],
        values,
        values[0],
    ]
    for x in args:
        assert bits(metaworld_fast.norm(x)) == bits(np.linalg.norm(x))
    assert bits(metaworld_fast.norm(vector, ord=2)) == bits(np.linalg.norm(vector, ord=2))
    assert bits(metaworld_fast.norm(vector, ord=1)) == bits(np.linalg.norm(vector, ord=1))
    assert bits(metaworld_fast.norm(vector, axis=0)) == bits(np.linalg.norm(vector, axis=0))


coordinates = st.one_of(st.floats(-1, 1), st.sampled_from([0.0, 1.0, -1.0, 1e-9]))


@given(st.tuples(coordinates, coordinates, coordinates, coordinates).filter(lambda q: sum(x * x for x in q) > 1e-3))
def test_quaternions_match_scipy(quat: tuple[float, ...]) -> None:
    for matrix in (Rotation.from_quat(quat).as_matrix(), Rotation.from_quat(quat).as_matrix() * (1 + 1e-5)):
        assert bits(metaworld_fast.Rotation.from_matrix(matrix).as_quat()) == bits(
            Rotation.from_matrix(matrix).as_quat()
        )


def test_invalid_rotation_is_left_to_scipy() -> None:
    rotation = Rotation.from_quat([0.1, -0.4, 0.3, 0.8]).as_matrix()
    sheared = [np.eye(3) + 1e-4 * np.outer(one, other) for one in np.eye(3) for other in np.eye(3)]
    for matrix in [change @ rotation for change in sheared]:
        assert bits(metaworld_fast.Rotation.from_matrix(matrix).as_quat()) == bits(
            Rotation.from_matrix(matrix).as_quat()
        )
    with pytest.raises(ValueError, match="left-handed"):
        metaworld_fast.Rotation.from_matrix(np.diag([1.0, 1.0, -1.0]))


# -- versions ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("package", ["metaworld", "mujoco"])
def test_unverified_version_uses_the_stock_package(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(metaworld_env.VERIFIED_VERSIONS, package, "0.9")
    env, messages = ALL_V3_ENVIRONMENTS["reach-v3"](), []
    assert not accelerate(env, messages.append)
    assert type(env) is ALL_V3_ENVIRONMENTS["reach-v3"]
    assert len(messages) == 1
    assert messages[0].startswith("Meta-World uses the stock package")
    assert f"{package} is 3" in messages[0]
    assert "verified with 0.9" in messages[0]


def test_task_reports_that_it_uses_the_stock_package(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = rollout(MetaWorldTask("MT10", "reach-v3"), 1)
    monkeypatch.setitem(metaworld_env.VERIFIED_VERSIONS, "metaworld", "0.9")
    messages: list[str] = []
    env = MetaWorldTask("MT10", "reach-v3", say=messages.append)
    monkeypatch.setattr(metaworld_env, "_idle", type(metaworld_env._idle)(list))
    monkeypatch.setitem(sys.modules, "unidle.tasks.metaworld.fast", None)
    assert rollout(env, 1) == expected
    assert ["stock package" in message for message in messages] == [True]


def test_user_defined_task_is_not_accelerated() -> None:
    class Own(ALL_V3_ENVIRONMENTS["reach-v3"]):  # type: ignore[misc]
        pass

    messages: list[str] = []
    assert not accelerate(Own(), messages.append)
    assert messages[0].startswith("Own is not accelerated")


def test_scipy_quaternions_are_used_if_results_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metaworld_fast, "_scipy_agrees", lambda: False)
    monkeypatch.setattr(metaworld_fast, "_fast_class", metaworld_fast._fast_class.__wrapped__)
    env, messages = ALL_V3_ENVIRONMENTS["reach-v3"](), []
    assert accelerate(env, messages.append)
    assert "uses SciPy" in messages[0]
    assert env._get_quat_objects.__globals__["Rotation"] is Rotation


def test_missing_package_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "metaworld"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "metaworld", None)
    with pytest.raises(UsageError, match=r"needs the package metaworld; run: pip install 'unidle\[metaworld\]'\."):
        MultiTaskEnv("MT10")


def test_other_mujoco_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metaworld_env, "version", {"metaworld": "3.1.1", "mujoco": "3.4.0"}.get)
    with pytest.raises(UsageError, match=r"dynamics need MuJoCo 3\.3\.0, but 3\.4\.0 is installed; run: pip install"):
        MetaWorldTask("MT10", 0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("MT11", 0), "no multi-task benchmark `MT11`; choose one of MT10, MT25, MT50"),
        (("MT10", "reach-v2"), "did you mean `reach-v3`"),
        (("MT10", "assembly-v3"), "MT10 has no task `assembly-v3`"),
        (("MT10", 10), "its tasks are 0 to 9"),
    ],
)
def test_unknown_task_raises_usage_error(arguments: tuple[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        MetaWorldTask(*arguments)


# -- goals, seeds, environments ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", list(ALL_V3_ENVIRONMENTS))
def test_task_goals_match_the_package(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metaworld, "_N_GOALS", 5)
    monkeypatch.setattr(metaworld_env, "_GOALS", 5)
    monkeypatch.setattr(metaworld_env, "_classes", lambda benchmark: {name: ALL_V3_ENVIRONMENTS[name]})
    assert goals_of.__wrapped__("MT50", 11) == {name: metaworld.MT1(name, seed=11).train_tasks}


def test_benchmark_goals_match_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metaworld, "_N_GOALS", 2)
    monkeypatch.setattr(metaworld_env, "_GOALS", 2)
    before = np.random.get_state()[1].copy()  # type: ignore[index] # noqa: NPY002
    goals = goals_of.__wrapped__("MT10", 4)
    assert np.array_equal(before, np.random.get_state()[1])  # type: ignore[index] # noqa: NPY002
    assert list(goals) == task_names("MT10")
    assert [goal for drawn in goals.values() for goal in drawn] == metaworld.MT10(seed=4).train_tasks
    # An unverified package draws them itself.
    monkeypatch.setitem(metaworld_env.VERIFIED_VERSIONS, "metaworld", "0.9")
    monkeypatch.setattr(metaworld_env, "_NoHandReset", None)
    assert goals_of.__wrapped__("MT10", 4) == goals


def rollout(env: Any, seed: int | None, options: dict[str, int] | None = None, steps: int = 12) -> list[Any]:
    first, info = env.reset(seed=seed, options=options)
    noise = np.random.default_rng(3)
    return [bits(first), info] + [outcome(env.step(noise.uniform(-1, 1, 4).astype(np.float32))) for _ in range(steps)]


def test_episode_depends_only_on_its_seed() -> None:
    used, stock_ = MetaWorldTask("MT10", "push-v3"), MetaWorldTask("MT10", "push-v3", accelerated=False)
    episodes = {seed: rollout(used, seed) for seed in (1, 2, 3, 4)}
    assert len({str(episode[:1]) for episode in episodes.values()}) == 4
    for seed in (3, 1):
        assert rollout(used, seed) == rollout(stock_, seed) == episodes[seed]
    assert rollout(MetaWorldTask("MT10", 1), 2) == episodes[2]
    used.reset(seed=9)
    later = [rollout(used, None) for _ in range(2)]
    used.reset(seed=9)
    assert [rollout(used, None) for _ in range(2)] == later
    assert later[0] != later[1]


def test_episode_truncates_after_500_steps_and_never_terminates() -> None:
    env = MetaWorldTask("MT10", "drawer-close-v3")
    env.reset(seed=0)
    policy, ends = ENV_POLICY_MAP["drawer-close-v3"](), []
    observation, info = env.reset(seed=0)
    assert info == {"task": 5}
    reached = 0.0
    for _ in range(500):
        observation, _, terminated, truncated, info = env.step(policy.get_action(observation[:39]).astype(np.float32))
        ends.append((terminated, truncated))
        reached = max(reached, info["success"])
    assert reached == 1.0
    assert ends == [(False, False)] * 499 + [(False, True)]
    with pytest.raises(ValueError, match="reset"):
        env.step(np.zeros(4, np.float32))
    env.reset()
    assert env.step(np.zeros(4, np.float32))[3] is False


def test_observation_ends_with_the_one_hot_task() -> None:
    env = MetaWorldTask("MT10", 3)
    observation, _ = env.reset(seed=6)
    inner = env._simulator
    assert inner.reward_function_version == "v2"
    goals = [pickle.loads(goal.data)["rand_vec"] for goal in goals_of("MT10", 0)["door-open-v3"]]
    assert sum(np.array_equal(inner._last_rand_vec, goal) for goal in goals) == 1
    assert np.array_equal(observation[36:39], inner._target_pos)
    assert np.array_equal(observation[39:], np.eye(10)[3])
    assert env.observation_space.contains(observation)
    assert env.step(np.zeros(4, np.float32))[4]["task"] == 3


@pytest.mark.parametrize(("env_index", "n_envs"), [(0, 1), (3, 4), (7, 10), (12, 20)])
def test_environment_cycles_through_the_tasks(env_index: int, n_envs: int) -> None:
    env = MultiTaskEnv("MT10", env_index, n_envs)
    for episode in range(11):
        observation, info = env.reset(seed=episode)
        task = (env_index + n_envs * episode) % 10
        assert env.task == info["task"] == observation[39:].argmax() == task
        assert observation[39:].sum() == 1.0
        alone = MetaWorldTask("MT10", task)
        assert np.array_equal(observation, alone.reset(seed=episode)[0])
        alone.close()
        assert env.step(np.zeros(4, np.float32))[4]["task"] == task
    env.close()


@pytest.mark.parametrize("n_envs", [1, 10, 16, 32, 48])
def test_tasks_are_balanced_for_any_number_of_environments(n_envs: int) -> None:
    env, counts = MultiTaskEnv("MT10", 0, n_envs), np.zeros(10, int)
    for episode in range(10):
        for env_index in range(n_envs):
            _, info = env.reset(seed=1, options={"env": env_index, "episode": episode})
            counts[info["task"]] += 1
        assert np.ptp(counts) <= 1  # also midway, as long as the environments stay in step
    assert counts.tolist() == [n_envs] * 10
    env.close()


def test_mt50_is_available_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    env, name = env_maker("metaworld:MT50").for_n_envs(48)(), "sweep-into-v3"
    assert env.observation_space.shape == (39 + 50,)
    monkeypatch.setattr(metaworld, "_N_GOALS", 1)
    monkeypatch.setattr(metaworld_env, "_GOALS", 1)
    only = {name: metaworld.MT1(name, seed=0).train_tasks}  # drawing the goals of all tasks takes seconds
    monkeypatch.setattr(metaworld_env, "goals_of", lambda benchmark, seed: only)
    task = task_names("MT50").index(name)
    observation, info = env.reset(seed=3, options={"env": (task - 48) % 50, "episode": 1})
    assert info["task"] == observation[39:].argmax() == task
    assert env.observation_space.contains(observation)
    env.close()


def test_reset_options_select_env_and_episode() -> None:
    continuous = MultiTaskEnv("MT10", 1, 4)
    episodes = [rollout(continuous, 50 + episode) for episode in range(7)]
    resumed = MultiTaskEnv("MT10", 0, 4)
    assert rollout(resumed, 55, {"env": 1, "episode": 5}) == episodes[5]
    assert rollout(resumed, 56) == episodes[6]
    assert rollout(resumed, 52, {"episode": 2}) == episodes[2]
    resumed.reset(seed=8)
    drawn = rollout(resumed, None)
    resumed.reset(seed=8, options={"episode": 3})
    assert rollout(resumed, None) == drawn


def test_environments_of_a_process_reuse_simulators(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []
    real = metaworld_env._simulator
    monkeypatch.setattr(metaworld_env, "_idle", type(metaworld_env._idle)(list))
    monkeypatch.setattr(metaworld_env, "_simulator", lambda name, *how: made.append(name) or real(name, *how))
    envs = [MultiTaskEnv("MT10", index, 3) for index in range(3)]
    for _ in range(20):
        for env in envs:
            env.reset(seed=1)
    assert sorted(set(made)) == sorted(task_names("MT10"))
    assert len(made) <= 12


def test_task_passes_gymnasium_check_env() -> None:
    with pytest.warns(UserWarning, match="infinity"):  # its bounds are infinite
        check_env(MetaWorldTask("MT10", 0), skip_render_check=True)
    env = env_maker("unidle.tasks.metaworld.env:MultiTaskEnv", {"benchmark": "MT10", "n_envs": 10})()
    assert env.observation_space.shape == (49,)
