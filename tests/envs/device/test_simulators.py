"""Simulators that keep their state themselves, tested with stand-ins that have the real interfaces.

Of Isaac Lab's ManagerBasedRLEnv and DirectRLEnv, and mjlab's ManagerBasedRlEnv: `num_envs`, `device`, `unwrapped`,
`single_observation_space` (a Dict of groups) and `single_action_space`; `reset(seed=…) -> (groups, extras)`;
`step(actions) -> (groups, reward, terminated, time_outs, extras)`. An environment that ended returns the first
observation of its next episode; it may terminate and time out at once. With `compute_final_obs`, a step that resets an
environment puts the groups of all environments before the reset in `extras["final_obs"]`. Isaac Lab's classes derive
from gymnasium.Env, mjlab's from nothing. The returned tensors are the simulator's own buffers, overwritten by the next
step.

Of Isaac Gym's VecTask: `observation_space` and `action_space` of one environment, `reset() -> {"obs": …}`,
`step -> ({"obs": …}, reward, reset_buf, extras)` with integers in `reset_buf` and `extras["time_outs"]`; no `close`.
"""

from __future__ import annotations

import random
import time
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode

import unidle
from unidle.buffers.rollout import Rollout
from unidle.config import PPORecipe
from unidle.engine.checkpoint.checkpoint_file import load_checkpoint
from unidle.engine.collect.device import DeviceCollector
from unidle.envs.device.device_env import Step, Traits, traits_of
from unidle.envs.device.host_view import TensorEnvs
from unidle.envs.device.simulators import IsaacEnv, TensorVectorEnv
from unidle.envs.make import env_maker
from unidle.envs.probe import probe
from unidle.envs.vector.host_envs import vector_size
from unidle.errors import UsageError
from unidle.nn.actor_critic import ActorCritic
from unidle.nn.encoder import leaf_tensor, pack_obs
from unidle.spaces.observations import ObservationLayout
from unidle.timeline import Timeline

CPU = torch.device("cpu")
N, LIMIT = 4, 5


class FakeSimulator:
    """Observes [steps so far, a sign]; rewards an action of that sign; a large action terminates the episode."""

    def __init__(self, num_envs: int = N, limit: int = LIMIT) -> None:
        self.num_envs, self.device, self._limit = num_envs, "cpu", limit
        self.obs_buf = torch.zeros(num_envs, 2)
        self.lengths = torch.zeros(num_envs, dtype=torch.long)
        self.seeds: list[int | None] = []
        self.closed = False
        self._random = torch.Generator()

    def reset_envs(self, ids: torch.Tensor) -> None:
        self.lengths[ids] = 0
        self.obs_buf[ids, 0] = 0.0
        self.obs_buf[ids, 1] = torch.randint(0, 2, (len(ids),), generator=self._random) * 2.0 - 1.0

    def reset_all(self, seed: int | None) -> None:
        self.seeds.append(seed)
        if seed is not None:
            self._random.manual_seed(seed)
        self.reset_envs(torch.arange(self.num_envs))

    def simulate(self, actions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        assert actions.shape == (self.num_envs, 1)
        self.lengths = self.lengths + 1  # a new tensor in the caller's grad mode; `reset_envs` changes it in place
        self.obs_buf[:, 0] = self.lengths
        reward = (actions[:, 0] * self.obs_buf[:, 1]).clamp(-1, 1)
        terminated, time_outs = actions[:, 0].abs() > 50, self.lengths >= self._limit
        before = self.obs_buf.clone()
        self.reset_envs((terminated | time_outs).nonzero().squeeze(1))
        return reward, terminated, time_outs, before


class FakeIsaacLab(FakeSimulator, gymnasium.Env):
    is_vector_env = True

    def __init__(self, compute_final_obs: bool = False, group: str = "policy", **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._computes_final, self._group = compute_final_obs, group
        policy_space = spaces.Box(-np.inf, np.inf, (2,))
        self.single_observation_space = spaces.Dict({"critic": spaces.Box(-np.inf, np.inf, (7,)), group: policy_space})
        self.single_action_space = spaces.Box(-np.inf, np.inf, (1,))
        self.extras: dict[str, Any] = {}

    def groups(self, policy: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"critic": torch.full((self.num_envs, 7), 99.0), self._group: policy}

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[dict, dict]:
        self.reset_all(seed)
        return self.groups(self.obs_buf), self.extras

    def step(self, actions: torch.Tensor) -> tuple[dict, torch.Tensor, torch.Tensor, torch.Tensor, dict]:
        reward, terminated, time_outs, before = self.simulate(actions)
        self.extras = {"log": {}}
        if self._computes_final and (terminated | time_outs).any():
            self.extras["final_obs"] = self.groups(before)
        return self.groups(self.obs_buf), reward, terminated, time_outs, self.extras

    def close(self) -> None:
        self.closed = True


class FakeMjlab:
    """The observation group is `actor`; it has its own space classes and no base class."""

    class Space:
        def __init__(self, **given: Any) -> None:
            self.__dict__.update(given)

    def __init__(self) -> None:
        self._lab = FakeIsaacLab(group="actor")
        self.num_envs, self.device, self.unwrapped = N, "cpu", self
        groups = {"actor": self.Space(shape=(2,), low=-np.inf, high=np.inf)}
        self.single_observation_space = self.Space(spaces=groups)
        self.single_action_space = self.Space(shape=(1,), low=-np.inf, high=np.inf)
        self.step, self.close = self._lab.step, self._lab.close

    def reset(self, *, seed: int | None = None, env_ids: Any = None, options: Any = None) -> tuple[dict, dict]:
        return self._lab.reset(seed=seed)


class FakeIsaacGym(FakeSimulator):
    def __init__(self, reports_time_outs: bool = True) -> None:
        super().__init__()
        self._reports_time_outs = reports_time_outs
        self.observation_space, self.action_space = spaces.Box(-np.inf, np.inf, (2,)), spaces.Box(-1.0, 1.0, (1,))

    def reset(self) -> dict[str, torch.Tensor]:
        self.reset_all(None)
        return {"obs": self.obs_buf}

    def step(self, actions: torch.Tensor) -> tuple[dict, torch.Tensor, torch.Tensor, dict]:
        reward, terminated, time_outs, _ = self.simulate(actions)
        ended = terminated | time_outs
        # Old tasks may set it for environments whose episode continues.
        extras = {"time_outs": (time_outs & ~terminated) | ~ended} if self._reports_time_outs else {}
        return {"obs": self.obs_buf}, reward, ended.long(), extras


class FakeTensorVectorEnv(FakeSimulator, gymnasium.vector.VectorEnv):
    """A gymnasium.vector.VectorEnv on tensors."""

    def __init__(self, mode: AutoresetMode = AutoresetMode.SAME_STEP, key: str = "final_obs", **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.metadata = {"autoreset_mode": mode}
        self._disabled, self._key = mode == AutoresetMode.DISABLED, key
        self.single_observation_space = spaces.Box(-np.inf, np.inf, (2,), np.float32)
        self.single_action_space = spaces.Box(-100.0, 100.0, (1,), np.float32)

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[torch.Tensor, dict]:
        if options is None:
            self.reset_all(seed)
        else:
            FakeSimulator.reset_envs(self, options["reset_mask"].nonzero().squeeze(1))
        return self.obs_buf, {}

    def reset_envs(self, ids: torch.Tensor) -> None:
        if not (self._disabled and self.lengths.any()):
            super().reset_envs(ids)

    def step(self, actions: torch.Tensor) -> tuple[Any, ...]:
        reward, terminated, time_outs, before = self.simulate(actions)
        infos = {self._key: before} if (terminated | time_outs).any() and not self._disabled else {}
        return self.obs_buf, reward, terminated, time_outs, infos

    def close_extras(self, **kwargs: Any) -> None:
        self.closed = True


def step_through(env: Any, actions: list[list[float]]) -> list[Step]:
    """One step per list of actions, with its tensors copied."""
    state, _ = env.begin()
    steps = []
    for action in actions:
        state, step = env.step(state, torch.tensor(action).unsqueeze(1))
        steps.append(Step(*(part.clone() for part in step)))
    return steps


# Environment 1 terminates in the third step, environment 2 in the same step in which it times out.
ACTIONS = [[1.0, 1.0, 1.0, 1.0], [1.0] * N, [1.0, 99.0, 1.0, 1.0], [1.0] * N, [1.0, 1.0, 99.0, 1.0], [1.0] * N]
TERMINATED = [[], [], [1], [], [2], []]
TRUNCATED = [[], [], [], [], [0, 3], []]


def env_ids(flags: torch.Tensor) -> list[int]:
    assert flags.dtype == torch.bool
    return flags.nonzero().squeeze(1).tolist()


@pytest.mark.parametrize(
    "make",
    [
        lambda: IsaacEnv(FakeIsaacLab(), "lab", 0),
        lambda: IsaacEnv(FakeIsaacLab(compute_final_obs=True), "lab", 0),
        lambda: IsaacEnv(gymnasium.Wrapper(FakeIsaacLab()), "wrapped", 0),
        lambda: IsaacEnv(FakeMjlab(), "mjlab", 0),
        lambda: IsaacEnv(FakeIsaacGym(), "gym", 0),
        lambda: TensorVectorEnv(FakeTensorVectorEnv(), "tensors", 0),
        lambda: TensorVectorEnv(FakeTensorVectorEnv(key="final_observation"), "tensors", 0),
        lambda: TensorVectorEnv(FakeTensorVectorEnv(AutoresetMode.DISABLED), "tensors", 0),
    ],
    ids=["lab", "lab, final obs", "lab, wrapped", "mjlab", "gym", "tensors", "tensors, old key", "tensors, disabled"],
)
def test_steps_equal_the_simulators(make: Any) -> None:
    env = make()
    assert (env.n_envs, env.observation_space.shape, env.action_space.shape) == (N, (2,), (1,))
    state, observation = env.begin()
    assert (state, observation[:, 0].tolist()) == ({}, [0] * N)
    first = observation.clone()
    steps = step_through(env, ACTIONS)
    assert [env_ids(s.terminated) for s in steps] == TERMINATED
    assert [env_ids(s.truncated) for s in steps] == TRUNCATED
    lengths = [0] * N
    for step, ended in zip(steps, map(set.union, map(set, TERMINATED), map(set, TRUNCATED))):
        assert step.reward.dtype == torch.float32
        lengths = [length + 1 for length in lengths]
        lengths = [0 if i in ended else length for i, length in enumerate(lengths)]
        assert step.observation[:, 0].tolist() == lengths
        if not ended:
            # The sign is constant within an episode, and an action of 1 is rewarded with it.
            assert torch.equal(step.reward, step.observation[:, 1])
    assert set(first[:, 1].tolist()) <= {-1.0, 1.0}


@pytest.mark.parametrize(
    ("make", "exact"),
    [
        (lambda: IsaacEnv(FakeIsaacLab(), "lab", 0), False),
        (lambda: IsaacEnv(FakeIsaacGym(), "gym", 0), False),
        (lambda: IsaacEnv(FakeIsaacLab(compute_final_obs=True), "lab", 0), True),
        (lambda: TensorVectorEnv(FakeTensorVectorEnv(), "tensors", 0), True),
        (lambda: TensorVectorEnv(FakeTensorVectorEnv(key="final_observation"), "tensors", 0), True),
        (lambda: TensorVectorEnv(FakeTensorVectorEnv(AutoresetMode.DISABLED), "tensors", 0), True),
    ],
    ids=["lab", "gym", "lab, final obs", "tensors", "tensors, old key", "tensors, disabled"],
)
def test_final_observation_is_exact_or_the_previous_one(make: Any, exact: bool) -> None:
    env = make()
    steps = step_through(env, ACTIONS)
    truncated, before = steps[4], steps[3]
    for i in (0, 3):
        last = [float(LIMIT), before.observation[i, 1].item()]
        assert truncated.final_observation[i].tolist() == (last if exact else before.observation[i].tolist())
    assert traits_of(env) == Traits(capture_safe=False, resumable=False, exact_final_observation=exact)


def test_without_time_outs_every_end_is_a_termination() -> None:
    steps = step_through(IsaacEnv(FakeIsaacGym(reports_time_outs=False), "gym", 0), ACTIONS)
    assert [env_ids(s.terminated) for s in steps] == [[], [], [1], [], [0, 2, 3], []]
    assert not any(s.truncated.any() for s in steps)


def test_simulator_stepped_in_inference_mode_can_be_reset_outside() -> None:
    env = IsaacEnv(FakeIsaacLab(), "lab", 0)
    state, _ = env.begin()
    with torch.inference_mode():
        env.step(state, torch.zeros(N, 1))
    _, observation = env.begin()
    assert observation[:, 0].tolist() == [0] * N


def test_seeds_differ_between_training_and_evaluation() -> None:
    seeds = []
    for seed, first_index in ((0, 0), (0, 1 << 20), (1, 0), (0, 0)):
        lab = FakeIsaacLab()
        IsaacEnv(lab, "lab", seed, first_index=first_index).begin()
        seeds += lab.seeds
    assert seeds[0] == seeds[3]
    assert len({*seeds}) == 3


def test_numpy_to_torch_vector_env_is_supported() -> None:
    pytest.importorskip("array_api_compat")  # an extra of Gymnasium's
    from gymnasium.wrappers.vector import NumpyToTorch

    kwargs = {"autoreset_mode": AutoresetMode.DISABLED}  # otherwise NumpyToTorch cannot convert the infos
    vector = gymnasium.make_vec("CartPole-v1", 3, vectorization_mode="sync", vector_kwargs=kwargs, max_episode_steps=4)
    env = env_maker(lambda: NumpyToTorch(vector)).device_env(3, 0)
    assert isinstance(env, TensorVectorEnv)
    actions = [[0.0, 1.0, 0.0], [1.0, 0.0, 0.0]] * 2
    steps = step_through(env, actions)
    assert env_ids(steps[-1].truncated) == [0, 1, 2]
    assert steps[-1].observation.abs().max() <= 0.05
    last, previous = steps[-1].final_observation, steps[-2].observation
    np.testing.assert_allclose(last[:, 0], previous[:, 0] + 0.02 * previous[:, 1], atol=1e-6)  # Euler integration


# -- in a run ----------------------------------------------------------------------------------------------------------


def make_collector(maker: Any, steps: int = 12, timeline: Timeline | None = None, **kwargs: Any) -> DeviceCollector:
    env_spec = probe(maker)
    assert env_spec.on_device
    torch.manual_seed(0)
    policy = ActorCritic(env_spec.obs_layout, env_spec.action_layout, PPORecipe(recurrent="gru", recurrent_size=4))
    rollout = Rollout(steps, N, env_spec.obs_layout.obs_bytes, env_spec.action_layout.width, policy.state_size, CPU)
    return DeviceCollector(maker.device_env(N, 0), env_spec, policy, rollout, 0, timeline or Timeline(), **kwargs)


def test_simulator_is_not_captured_and_keeps_final_observations() -> None:
    def capture(*_: Any) -> Any:
        raise AssertionError("a simulator cannot be captured")

    messages: list[str] = []
    maker = env_maker(lambda: FakeIsaacLab(compute_final_obs=True))
    collector = make_collector(maker, capture=capture, say=messages.append)
    collector.compile_steps()
    assert collector._step == collector._take_timed_step
    collector.start()
    rollout = collector.finish().rollout
    collector.read_episode_stats()
    # All four are truncated in the fifth step and in the tenth.
    assert rollout.final_at.tolist() == [4 * N + i for i in range(N)] + [9 * N + i for i in range(N)]
    finals = rollout.final_obs.view(torch.float32)
    assert finals[:, 0].tolist() == [LIMIT] * 2 * N
    assert finals[:, 1].tolist() == rollout.obs[[4, 9]].view(torch.float32)[:, :, 1].flatten().tolist()
    assert collector.episodes == 2 * N
    assert messages == []


def test_time_in_a_simulator_counts_as_environment() -> None:
    class SlowLab(FakeIsaacLab):
        def step(self, actions: torch.Tensor) -> Any:
            time.sleep(0.02)
            return super().step(actions)

    timeline = Timeline()
    collector = make_collector(env_maker(SlowLab), timeline=timeline)
    timeline.begin()
    collector.start()
    collector.finish()
    seconds = timeline.seconds()
    assert seconds["environment"] >= 12 * 0.02
    assert min(seconds["inference"], seconds["storage"]) > 0
    assert sum(seconds.values()) - seconds["environment"] < seconds["environment"]


def test_inexact_final_observation_is_reported_once() -> None:
    messages: list[str] = []
    collector = make_collector(env_maker(FakeIsaacLab), steps=4, say=messages.append)
    collector.start()
    counts = []
    for _ in range(3):
        collector.finish()
        collector.read_episode_stats()
        collector.open_rollout()
        counts.append(len(messages))
    assert counts == [0, 1, 1]  # the first truncation is in the fifth step
    assert "observation before it" in messages[0]


def test_probed_simulator_is_reused_and_closed() -> None:
    created: list[FakeIsaacLab] = []

    def make(**kwargs: Any) -> FakeIsaacLab:
        created.append(FakeIsaacLab(**kwargs))
        return created[-1]

    maker = env_maker(make, {"num_envs": 6})
    assert vector_size(maker) == 6
    env_spec = probe(maker)
    assert env_spec.obs_layout.space.shape == (2,)
    assert not created[0].closed
    env = maker.device_env(6, 0)
    assert (len(created), created[0].seeds) == (1, [])
    maker.device_env(6, 0)
    assert len(created) == 2  # a second simulator, for evaluation
    TensorEnvs(env, env_spec).close()
    assert created[0].closed
    with pytest.raises(UsageError, match="is a batched environment"):
        maker()


SMALL: dict[str, Any] = {
    "preset": "classic",
    "n_steps": 16,
    "batch_size": 64,
    "n_epochs": 4,
    "net_arch": (16,),
    "learning_rate": 5e-3,
    "eval_episodes": 8,
    "tensorboard": False,
    "quiet": True,
}


def make_isaac_lab() -> FakeIsaacLab:
    return FakeIsaacLab(num_envs=16)


def make_isaac_gym() -> FakeIsaacGym:
    return FakeIsaacGym()


def make_tensor_vector_env() -> FakeTensorVectorEnv:
    return FakeTensorVectorEnv(num_envs=16)


@pytest.mark.learning
@pytest.mark.parametrize("factory", [make_isaac_lab, make_isaac_gym, make_tensor_vector_env])
def test_ppo_learns_on_simulator(factory: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = unidle.train(factory, timesteps=16_000, runs_dir=str(tmp_path), **SMALL)
    assert run.config.recipe.n_envs == factory().num_envs
    assert run.evaluate(episodes=16).mean_return > 0.8 * LIMIT
    assert ("observation before it" in capsys.readouterr().err) == (factory is not make_tensor_vector_env)


class FakeLabWithGlobalGenerators(FakeIsaacLab):
    """Seeds and draws from the global generators, as Isaac Lab and mjlab do."""

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[dict, dict]:
        if seed is not None:
            random.seed(seed)
            np.random.seed(seed % 2**32)  # noqa: NPY002
            torch.manual_seed(seed)
        return super().reset(seed=seed, options=options)

    def reset_envs(self, ids: torch.Tensor) -> None:
        super().reset_envs(ids)
        noise = random.random() + np.random.random()  # noqa: NPY002
        self.obs_buf[ids, 1] = torch.randn(len(ids)) + noise


def make_lab_with_global_generators() -> FakeLabWithGlobalGenerators:
    return FakeLabWithGlobalGenerators(num_envs=16)


def test_training_with_and_without_evaluation_gives_the_same_weights(tmp_path: Path) -> None:
    settings = {**SMALL, "timesteps": 1024, "runs_dir": str(tmp_path)}
    weights, returns = [], []
    for eval_every in (0, 256):
        run = unidle.train(make_lab_with_global_generators, **settings, eval_every=eval_every)
        state = load_checkpoint(run.folder.latest(), policy_only=True)["algo"]["policy"]
        weights.append(torch.cat([tensor.flatten() for tensor in state.values()]))
        returns.append([record["rollout/return_mean"] for record in run.records if record["kind"] == "iteration"])
    assert torch.equal(*weights)
    assert returns[0] == returns[1]
    assert len(returns[0]) == 4


class Horizon:
    def __init__(self, is_finite_horizon: bool) -> None:
        self.is_finite_horizon = is_finite_horizon


@pytest.mark.parametrize("kind", [FakeIsaacLab, FakeMjlab])
def test_time_outs_of_a_finite_horizon_are_terminations(kind: type[Any]) -> None:
    for finite in (False, True):
        lab = kind()
        lab.cfg = Horizon(finite)
        steps = step_through(IsaacEnv(lab, "lab", 0), ACTIONS)
        ended = [sorted(a + b) for a, b in zip(TERMINATED, TRUNCATED)]
        assert [env_ids(step.terminated) for step in steps] == (ended if finite else TERMINATED)
        assert [env_ids(step.truncated) for step in steps] == ([[]] * 6 if finite else TRUNCATED)


class FakeLabWithLog(FakeIsaacLab):
    """Logs when environments end, as Isaac Lab does, and keeps the dict until the next ones end."""

    log: dict[str, Any] = {}  # noqa: RUF012

    def step(self, actions: torch.Tensor) -> Any:
        *outcome, extras = super().step(actions)
        if (outcome[2] | outcome[3]).any():
            self.log = {"Episode_Reward/alive": self.obs_buf[:, 0].mean() + LIMIT, "Curriculum/level": 2}
        return *outcome, {**extras, "log": self.log}


def make_lab_with_log() -> FakeLabWithLog:
    return FakeLabWithLog(num_envs=16)


def test_values_that_the_simulator_logs_are_in_the_metrics(tmp_path: Path) -> None:
    settings = {**SMALL, "timesteps": 512, "eval_every": 0, "runs_dir": str(tmp_path)}
    run = unidle.train(make_lab_with_log, **settings)
    records = [record for record in run.records if record["kind"] == "iteration"]
    assert [record["Curriculum/level"] for record in records] == [2.0, 2.0]
    assert records[0]["Episode_Reward/alive"] == pytest.approx(LIMIT, abs=1)


def make_lab_with_critic_group() -> FakeIsaacLab:
    """The sign, needed for learning, is in the group `policy`; the critic also has its own group."""
    return FakeIsaacLab(num_envs=16, compute_final_obs=True)


def test_actor_and_critic_use_their_observation_groups(tmp_path: Path) -> None:
    settings = {**SMALL, "timesteps": 1024, "eval_every": 0, "runs_dir": str(tmp_path)}
    groups = {"actor_obs": ("policy",), "critic_obs": ("policy", "critic")}
    run = unidle.train(make_lab_with_critic_group, **settings, **groups)
    policy = run.agent.policy
    assert [leaf.path for leaf in policy.encoder.layout.leaves] == [("policy",)]
    assert policy.encoder.n_features == 2
    assert policy.critic_encoder.n_features == 9
    assert run.predict({"policy": np.array([0.0, 1.0], np.float32)})[0].shape == (1,)
    assert run.evaluate(episodes=4).mean_length > 0
    with pytest.raises(UsageError, match="keys critic, policy"):
        unidle.train(make_lab_with_critic_group, **settings, actor_obs=("polcy",), run_name="wrong")


def test_observation_groups_are_concatenated_in_space_order() -> None:
    env = IsaacEnv(FakeIsaacLab(compute_final_obs=True), "lab", 0, obs_groups=())
    assert list(env.observation_space) == ["critic", "policy"]
    _, first = env.begin()
    assert (first[:, :7] == 99).all()
    assert (first[:, 7] == 0).all()
    layout = ObservationLayout.of(env.observation_space)
    obs = torch.zeros(N, layout.obs_bytes, dtype=torch.uint8)
    pack_obs(first, None, layout, obs)
    assert torch.equal(torch.cat([leaf_tensor(obs, leaf) for leaf in layout.leaves], -1), first)


def test_resume_reports_environments_with_new_episodes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = {**SMALL, "timesteps": 512, "eval_every": 0, "runs_dir": str(tmp_path), "run_name": "lab"}
    unidle.train(make_isaac_lab, **settings)
    assert "start a new episode" not in capsys.readouterr().err
    run = unidle.resume(tmp_path / "lab", env=make_isaac_lab, timesteps=1024, quiet=True)
    assert "16 of 16 environments" in capsys.readouterr().err
    assert run.summary()["step"] == 1024


@pytest.mark.parametrize(
    ("make", "settings", "message"),
    [
        (
            lambda: FakeIsaacLab(group="camera"),
            {},
            "observation groups camera, critic; name the policy's group `policy`",
        ),
        (lambda: FakeTensorVectorEnv(AutoresetMode.NEXT_STEP), {}, "NEXT_STEP"),
        (lambda: FakeTensorVectorEnv(key="nowhere"), {}, r"infos\['final_obs'\]"),
        (FakeIsaacLab, {"overlap": "strict"}, "nothing to overlap"),
        (FakeIsaacLab, {"discretize": 3}, "`discretize` does not apply"),
    ],
)
def test_unsupported_setup_is_a_usage_error(make: Any, settings: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=message):
        unidle.train(make, timesteps=256, runs_dir=str(tmp_path), **{**SMALL, **settings})


def test_id_of_batched_env_must_be_wrapped_in_function() -> None:
    gymnasium.register("IsaacStandIn-v0", FakeIsaacLab, disable_env_checker=True, order_enforce=False)
    with pytest.raises(UsageError, match="pass a function that returns it"):
        probe(env_maker("IsaacStandIn-v0"))
    assert probe(env_maker(lambda: gymnasium.make("IsaacStandIn-v0"))).on_device


@pytest.mark.parametrize("kind", [FakeIsaacLab, FakeIsaacGym, FakeTensorVectorEnv])
def test_actions_are_moved_to_simulator_device(kind: type[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """The policy may be on another device, as in an evaluation on the CPU."""
    env, seen = kind(), []
    env.device = "meta"
    simulate = env.simulate

    def record_device(actions: torch.Tensor) -> Any:
        seen.append(actions.device.type)
        return simulate(torch.zeros(actions.shape))

    monkeypatch.setattr(env, "simulate", record_device)
    device_env = env_maker(lambda: env).device_env(N, 0)
    device_env.step(device_env.begin()[0], torch.ones(N, 1))
    assert seen == ["meta"]


@pytest.mark.parametrize("algo", ["sac", "td3"])
def test_off_policy_algorithms_train_on_simulator_with_unbounded_actions(algo: str, tmp_path: Path) -> None:
    small = {"n_steps": 4, "batch_size": 32, "buffer_size": 1000, "learning_starts": 64, "utd_ratio": 0.1}
    settings = {**SMALL, **small, "preset": algo, "timesteps": 256, "eval_every": 0, "runs_dir": str(tmp_path)}
    del settings["n_epochs"]
    run = unidle.train(make_isaac_lab, action_limit=0.25, **settings)
    assert run.records[-1]["train/n_updates"] > 0
    actions, _ = run.predict(np.random.default_rng(0).normal(size=(64, 2)), deterministic=False)
    assert np.abs(actions).max() <= 0.25
