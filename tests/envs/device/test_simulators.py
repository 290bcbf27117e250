"""Simulators that hold their state themselves, by stand-ins with the interfaces of the real ones.

What is imitated, of Isaac Lab's ManagerBasedRLEnv and DirectRLEnv and of mjlab's ManagerBasedRlEnv:
`num_envs`, `device`, `unwrapped`, `single_observation_space` (a Dict of groups) and `single_action_space`;
`reset(seed=…) -> (groups, extras)`; `step(actions) -> (groups, reward, terminated, time_outs, extras)`, where the
observations of an environment that ended are those of its next episode; both ends may come at once; and with
`compute_final_obs`, in a step that resets something, `extras["final_obs"]` holds the groups of all environments as they
were before it. Isaac Lab's derives from gymnasium.Env, mjlab's from nothing. The tensors returned are the simulator's
own buffers, written over by the next step. Of Isaac Gym's VecTask: `observation_space` and `action_space` of one
environment, `reset() -> {"obs": …}`, `step -> ({"obs": …}, reward, reset_buf, extras)` with integers in `reset_buf` and
`extras["time_outs"]`, and no `close`.
"""

from __future__ import annotations

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
from unidle.engine.collect.device import DeviceCollector
from unidle.envs.device.device_env import Step, Traits, traits_of
from unidle.envs.device.host_view import TensorEnvs
from unidle.envs.device.simulators import IsaacEnv, TensorVectorEnv
from unidle.envs.make import env_maker
from unidle.envs.spec import probe
from unidle.envs.vector.host_envs import vector_size
from unidle.errors import UsageError
from unidle.nn.actor_critic import ActorCritic
from unidle.nn.encoder import leaf_tensor, pack_obs
from unidle.spaces.observations import ObservationLayout
from unidle.timeline import Timeline

CPU = torch.device("cpu")
N, LIMIT = 4, 5


class Sim:
    """Shows [steps so far, a sign]; rewards an action of that sign; a large action ends the episode."""

    def __init__(self, num_envs: int = N, limit: int = LIMIT) -> None:
        self.num_envs, self.device, self._limit = num_envs, "cpu", limit
        self.obs_buf = torch.zeros(num_envs, 2)
        self.lengths = torch.zeros(num_envs, dtype=torch.long)
        self.seeds: list[int | None] = []
        self.closed = False
        self._random = torch.Generator()

    def begin(self, ids: torch.Tensor) -> None:
        self.lengths[ids] = 0
        self.obs_buf[ids, 0] = 0.0
        self.obs_buf[ids, 1] = torch.randint(0, 2, (len(ids),), generator=self._random) * 2.0 - 1.0

    def begin_all(self, seed: int | None) -> None:
        self.seeds.append(seed)
        if seed is not None:
            self._random.manual_seed(seed)
        self.begin(torch.arange(self.num_envs))

    def advance(self, actions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        assert actions.shape == (self.num_envs, 1)
        self.lengths = self.lengths + 1  # made anew in whatever mode the caller is in, then changed in place by `begin`
        self.obs_buf[:, 0] = self.lengths
        reward = (actions[:, 0] * self.obs_buf[:, 1]).clamp(-1, 1)
        terminated, time_outs = actions[:, 0].abs() > 50, self.lengths >= self._limit
        before = self.obs_buf.clone()
        self.begin((terminated | time_outs).nonzero().squeeze(1))
        return reward, terminated, time_outs, before


class IsaacLab(Sim, gymnasium.Env):
    is_vector_env = True

    def __init__(self, compute_final_obs: bool = False, group: str = "policy", **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._computes_final, self._group = compute_final_obs, group
        shown = spaces.Box(-np.inf, np.inf, (2,))
        self.single_observation_space = spaces.Dict({"critic": spaces.Box(-np.inf, np.inf, (7,)), group: shown})
        self.single_action_space = spaces.Box(-np.inf, np.inf, (1,))
        self.extras: dict[str, Any] = {}

    def groups(self, policy: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"critic": torch.full((self.num_envs, 7), 99.0), self._group: policy}

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[dict, dict]:
        self.begin_all(seed)
        return self.groups(self.obs_buf), self.extras

    def step(self, actions: torch.Tensor) -> tuple[dict, torch.Tensor, torch.Tensor, torch.Tensor, dict]:
        reward, terminated, time_outs, before = self.advance(actions)
        self.extras = {"log": {}}
        if self._computes_final and (terminated | time_outs).any():
            self.extras["final_obs"] = self.groups(before)
        return self.groups(self.obs_buf), reward, terminated, time_outs, self.extras

    def close(self) -> None:
        self.closed = True


class Mjlab:
    """Its observations are the group `actor`, its spaces are its own, and it derives from nothing."""

    class Space:
        def __init__(self, **given: Any) -> None:
            self.__dict__.update(given)

    def __init__(self) -> None:
        self._lab = IsaacLab(group="actor")
        self.num_envs, self.device, self.unwrapped = N, "cpu", self
        groups = {"actor": self.Space(shape=(2,), low=-np.inf, high=np.inf)}
        self.single_observation_space = self.Space(spaces=groups)
        self.single_action_space = self.Space(shape=(1,), low=-np.inf, high=np.inf)
        self.step, self.close = self._lab.step, self._lab.close

    def reset(self, *, seed: int | None = None, env_ids: Any = None, options: Any = None) -> tuple[dict, dict]:
        return self._lab.reset(seed=seed)


class IsaacGym(Sim):
    def __init__(self, tells_time_outs: bool = True) -> None:
        super().__init__()
        self._tells = tells_time_outs
        self.observation_space, self.action_space = spaces.Box(-np.inf, np.inf, (2,)), spaces.Box(-1.0, 1.0, (1,))

    def reset(self) -> dict[str, torch.Tensor]:
        self.begin_all(None)
        return {"obs": self.obs_buf}

    def step(self, actions: torch.Tensor) -> tuple[dict, torch.Tensor, torch.Tensor, dict]:
        reward, terminated, time_outs, _ = self.advance(actions)
        ended = terminated | time_outs
        # Old tasks may say so of an environment whose episode goes on.
        extras = {"time_outs": (time_outs & ~terminated) | ~ended} if self._tells else {}
        return {"obs": self.obs_buf}, reward, ended.long(), extras


class Tensors(Sim, gymnasium.vector.VectorEnv):
    """A gymnasium.vector.VectorEnv on tensors."""

    def __init__(self, mode: AutoresetMode = AutoresetMode.SAME_STEP, key: str = "final_obs", **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.metadata = {"autoreset_mode": mode}
        self._disabled, self._key = mode == AutoresetMode.DISABLED, key
        self.single_observation_space = spaces.Box(-np.inf, np.inf, (2,), np.float32)
        self.single_action_space = spaces.Box(-100.0, 100.0, (1,), np.float32)

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[torch.Tensor, dict]:
        if options is None:
            self.begin_all(seed)
        else:
            Sim.begin(self, options["reset_mask"].nonzero().squeeze(1))
        return self.obs_buf, {}

    def begin(self, ids: torch.Tensor) -> None:
        if not (self._disabled and self.lengths.any()):
            super().begin(ids)

    def step(self, actions: torch.Tensor) -> tuple[Any, ...]:
        reward, terminated, time_outs, before = self.advance(actions)
        infos = {self._key: before} if (terminated | time_outs).any() and not self._disabled else {}
        return self.obs_buf, reward, terminated, time_outs, infos

    def close_extras(self, **kwargs: Any) -> None:
        self.closed = True


def acted(env: Any, pushes: list[list[float]]) -> list[Step]:
    """A step for each list of actions, with copies of what came out."""
    state, _ = env.begin()
    steps = []
    for push in pushes:
        state, step = env.step(state, torch.tensor(push).unsqueeze(1))
        steps.append(Step(*(part.clone() for part in step)))
    return steps


# Environment 1 is ended by its third step, environment 2 in the very step in which its time is up.
PUSHES = [[1.0, 1.0, 1.0, 1.0], [1.0] * N, [1.0, 99.0, 1.0, 1.0], [1.0] * N, [1.0, 1.0, 99.0, 1.0], [1.0] * N]
TERMINATED = [[], [], [1], [], [2], []]
TRUNCATED = [[], [], [], [], [0, 3], []]


def numbers(flags: torch.Tensor) -> list[int]:
    assert flags.dtype == torch.bool
    return flags.nonzero().squeeze(1).tolist()


@pytest.mark.parametrize(
    "make",
    [
        lambda: IsaacEnv(IsaacLab(), "lab", 0),
        lambda: IsaacEnv(IsaacLab(compute_final_obs=True), "lab", 0),
        lambda: IsaacEnv(gymnasium.Wrapper(IsaacLab()), "wrapped", 0),
        lambda: IsaacEnv(Mjlab(), "mjlab", 0),
        lambda: IsaacEnv(IsaacGym(), "gym", 0),
        lambda: TensorVectorEnv(Tensors(), "tensors", 0),
        lambda: TensorVectorEnv(Tensors(key="final_observation"), "tensors", 0),
        lambda: TensorVectorEnv(Tensors(AutoresetMode.DISABLED), "tensors", 0),
    ],
    ids=["lab", "lab, final", "lab, wrapped", "mjlab", "gym", "tensors", "tensors, old name", "tensors, disabled"],
)
def test_ends_rewards_and_observations_are_the_simulators(make: Any) -> None:
    env = make()
    assert (env.n_envs, env.observation_space.shape, env.action_space.shape) == (N, (2,), (1,))
    state, observation = env.begin()
    assert (state, observation[:, 0].tolist()) == ({}, [0] * N)
    shown = observation.clone()
    steps = acted(env, PUSHES)
    assert [numbers(s.terminated) for s in steps] == TERMINATED
    assert [numbers(s.truncated) for s in steps] == TRUNCATED
    lengths = [0] * N
    for step, ended in zip(steps, map(set.union, map(set, TERMINATED), map(set, TRUNCATED))):
        assert step.reward.dtype == torch.float32
        lengths = [length + 1 for length in lengths]
        lengths = [0 if i in ended else length for i, length in enumerate(lengths)]
        assert step.observation[:, 0].tolist() == lengths
        if not ended:
            # The sign stays for an episode, and the reward is the sign's for a push of 1.
            assert torch.equal(step.reward, step.observation[:, 1])
    assert set(shown[:, 1].tolist()) <= {-1.0, 1.0}


@pytest.mark.parametrize(
    ("make", "exact"),
    [
        (lambda: IsaacEnv(IsaacLab(), "lab", 0), False),
        (lambda: IsaacEnv(IsaacGym(), "gym", 0), False),
        (lambda: IsaacEnv(IsaacLab(compute_final_obs=True), "lab", 0), True),
        (lambda: TensorVectorEnv(Tensors(), "tensors", 0), True),
        (lambda: TensorVectorEnv(Tensors(key="final_observation"), "tensors", 0), True),
        (lambda: TensorVectorEnv(Tensors(AutoresetMode.DISABLED), "tensors", 0), True),
    ],
    ids=["lab", "gym", "lab, final", "tensors", "tensors, old name", "tensors, disabled"],
)
def test_the_final_observation_is_the_last_or_the_one_before_it(make: Any, exact: bool) -> None:
    env = make()
    steps = acted(env, PUSHES)
    cut, before = steps[4], steps[3]
    for i in (0, 3):
        last = [float(LIMIT), before.observation[i, 1].item()]
        assert cut.final_observation[i].tolist() == (last if exact else before.observation[i].tolist())
    assert traits_of(env) == Traits(capture_safe=False, resumable=False, exact_final_observation=exact)


def test_without_time_outs_every_end_is_a_termination() -> None:
    steps = acted(IsaacEnv(IsaacGym(tells_time_outs=False), "gym", 0), PUSHES)
    assert [numbers(s.terminated) for s in steps] == [[], [], [1], [], [0, 2, 3], []]
    assert not any(s.truncated.any() for s in steps)


def test_a_simulator_stepped_in_inference_mode_can_be_reset_outside_of_it() -> None:
    env = IsaacEnv(IsaacLab(), "lab", 0)
    state, _ = env.begin()
    with torch.inference_mode():
        env.step(state, torch.zeros(N, 1))
    _, observation = env.begin()
    assert observation[:, 0].tolist() == [0] * N


def test_seeds_differ_between_training_and_evaluation() -> None:
    seeds = []
    for seed, first_index in ((0, 0), (0, 1 << 20), (1, 0), (0, 0)):
        lab = IsaacLab()
        IsaacEnv(lab, "lab", seed, first_index=first_index).begin()
        seeds += lab.seeds
    assert seeds[0] == seeds[3]
    assert len({*seeds}) == 3


def test_gymnasiums_own_vector_of_tensors_is_one_too() -> None:
    pytest.importorskip("array_api_compat")  # an extra of Gymnasium's
    from gymnasium.wrappers.vector import NumpyToTorch

    kwargs = {"autoreset_mode": AutoresetMode.DISABLED}  # in the other mode it cannot convert its own infos
    vector = gymnasium.make_vec("CartPole-v1", 3, vectorization_mode="sync", vector_kwargs=kwargs, max_episode_steps=4)
    env = env_maker(lambda: NumpyToTorch(vector)).device_env(3, 0)
    assert isinstance(env, TensorVectorEnv)
    pushes = [[0.0, 1.0, 0.0], [1.0, 0.0, 0.0]] * 2
    steps = acted(env, pushes)
    assert numbers(steps[-1].truncated) == [0, 1, 2]
    assert steps[-1].observation.abs().max() <= 0.05
    last, shown = steps[-1].final_observation, steps[-2].observation
    np.testing.assert_allclose(last[:, 0], shown[:, 0] + 0.02 * shown[:, 1], atol=1e-6)  # Euler's rule


# -- in a run ----------------------------------------------------------------------------------------------------------


def collector_of(maker: Any, steps: int = 12, **kwargs: Any) -> DeviceCollector:
    env_spec = probe(maker)
    assert env_spec.on_device
    torch.manual_seed(0)
    policy = ActorCritic(env_spec.obs_layout, env_spec.action_layout, PPORecipe(recurrent="gru", recurrent_size=4))
    rollout = Rollout(steps, N, env_spec.obs_layout.obs_bytes, env_spec.action_layout.width, policy.state_size, CPU)
    return DeviceCollector(maker.device_env(N, 0), env_spec, policy, rollout, 0, Timeline(), **kwargs)


def test_nothing_is_captured_and_every_cut_is_kept() -> None:
    def capture(*_: Any) -> Any:
        raise AssertionError("a simulator cannot be captured")

    told: list[str] = []
    maker = env_maker(lambda: IsaacLab(compute_final_obs=True))
    collector = collector_of(maker, capture=capture, say=told.append)
    collector.compile_steps()
    assert collector._step == collector._take_step
    collector.start()
    whole = collector.finish().rollout
    collector.read_episode_stats()
    # All four are cut off at the fifth step and at the tenth.
    assert whole.final_at.tolist() == [4 * N + i for i in range(N)] + [9 * N + i for i in range(N)]
    finals = whole.final_obs.view(torch.float32)
    assert finals[:, 0].tolist() == [LIMIT] * 2 * N
    assert finals[:, 1].tolist() == whole.obs[[4, 9]].view(torch.float32)[:, :, 1].flatten().tolist()
    assert collector.episodes == 2 * N
    assert told == []


def test_an_inexact_final_observation_is_told_once_and_only_when_it_matters() -> None:
    told: list[str] = []
    collector = collector_of(env_maker(IsaacLab), steps=4, say=told.append)
    collector.start()
    counts = []
    for _ in range(3):
        collector.finish()
        collector.read_episode_stats()
        collector.open_rollout()
        counts.append(len(told))
    assert counts == [0, 1, 1]  # the first cut is at the fifth step
    assert "observation before it" in told[0]


def test_a_simulator_is_made_once_and_closed_once() -> None:
    made: list[IsaacLab] = []

    def make(**kwargs: Any) -> IsaacLab:
        made.append(IsaacLab(**kwargs))
        return made[-1]

    maker = env_maker(make, {"num_envs": 6})
    assert vector_size(maker) == 6
    env_spec = probe(maker)
    assert env_spec.obs_layout.space.shape == (2,)
    assert not made[0].closed
    env = maker.device_env(6, 0)
    assert (len(made), made[0].seeds) == (1, [])
    maker.device_env(6, 0)
    assert len(made) == 2  # another one, for evaluation
    TensorEnvs(env, env_spec).close()
    assert made[0].closed
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


def lab_for_a_run() -> IsaacLab:
    return IsaacLab(num_envs=16)


def gym_for_a_run() -> IsaacGym:
    return IsaacGym()


def tensors_for_a_run() -> Tensors:
    return Tensors(num_envs=16)


@pytest.mark.learning
@pytest.mark.parametrize("factory", [lab_for_a_run, gym_for_a_run, tensors_for_a_run])
def test_it_is_learned(factory: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = unidle.train(factory, timesteps=16_000, runs_dir=str(tmp_path), **SMALL)
    assert run.config.recipe.n_envs == factory().num_envs
    assert run.evaluate(episodes=16).mean_return > 0.8 * LIMIT
    assert ("observation before it" in capsys.readouterr().err) == (factory is not tensors_for_a_run)


def seeing_critic() -> IsaacLab:
    """The sign, without which nothing can be learned, is in the group `policy`; the critic has its own group too."""
    return IsaacLab(num_envs=16, compute_final_obs=True)


def test_actor_and_critic_see_the_groups_that_they_name(tmp_path: Path) -> None:
    settings = {**SMALL, "timesteps": 1024, "eval_every": 0, "runs_dir": str(tmp_path)}
    groups = {"actor_obs": ("policy",), "critic_obs": ("policy", "critic")}
    run = unidle.train(seeing_critic, **settings, **groups)
    policy = run.agent.policy
    assert [leaf.path for leaf in policy.encoder.layout.leaves] == [("policy",)]
    assert policy.encoder.n_features == 2
    assert policy.critic_encoder.n_features == 9
    assert run.predict({"policy": np.array([0.0, 1.0], np.float32)}).shape == (1,)
    assert run.evaluate(episodes=4).mean_length > 0
    with pytest.raises(UsageError, match="keys critic, policy"):
        unidle.train(seeing_critic, **settings, actor_obs=("polcy",), run_name="wrong")


def test_groups_come_side_by_side_in_the_order_of_the_space() -> None:
    env = IsaacEnv(IsaacLab(compute_final_obs=True), "lab", 0, obs_groups=())
    assert list(env.observation_space) == ["critic", "policy"]
    _, first = env.begin()
    assert (first[:, :7] == 99).all()
    assert (first[:, 7] == 0).all()
    layout = ObservationLayout.of(env.observation_space)
    obs = torch.zeros(N, layout.obs_bytes, dtype=torch.uint8)
    pack_obs(first, None, layout, obs)
    assert torch.equal(torch.cat([leaf_tensor(obs, leaf) for leaf in layout.leaves], -1), first)


def test_a_resumed_run_says_that_it_begins_new_episodes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = {**SMALL, "timesteps": 512, "eval_every": 0, "runs_dir": str(tmp_path), "run_name": "lab"}
    unidle.train(lab_for_a_run, **settings)
    assert "starts anew" not in capsys.readouterr().err
    run = unidle.resume(tmp_path / "lab", env=lab_for_a_run, timesteps=1024, quiet=True)
    assert "16 of 16 environments" in capsys.readouterr().err
    assert run.summary()["step"] == 1024


@pytest.mark.parametrize(
    ("make", "settings", "sentence"),
    [
        (
            lambda: IsaacLab(group="camera"),
            {},
            "observation groups camera, critic; name the policy's group `policy`",
        ),
        (lambda: Tensors(AutoresetMode.NEXT_STEP), {}, "NEXT_STEP"),
        (lambda: Tensors(key="nowhere"), {}, r"infos\['final_obs'\]"),
        (IsaacLab, {"overlap": "strict"}, "nothing to overlap"),
        (IsaacLab, {"discretize": 3}, "--discretize does not apply"),
    ],
)
def test_what_does_not_go_is_said_in_a_sentence(make: Any, settings: Any, sentence: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=sentence):
        unidle.train(make, timesteps=256, runs_dir=str(tmp_path), **{**SMALL, **settings})


def test_an_id_that_makes_many_is_to_be_wrapped_in_a_function() -> None:
    gymnasium.register("IsaacStandIn-v0", IsaacLab, disable_env_checker=True, order_enforce=False)
    with pytest.raises(UsageError, match="pass a function that returns it"):
        probe(env_maker("IsaacStandIn-v0"))
    assert probe(env_maker(lambda: gymnasium.make("IsaacStandIn-v0"))).on_device


@pytest.mark.parametrize("kind", [IsaacLab, IsaacGym, Tensors])
def test_actions_go_to_the_device_that_the_simulator_is_on(kind: type[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """The policy may be on another, as it is where an evaluation plays on the CPU."""
    env, seen = kind(), []
    env.device = "meta"
    advance = env.advance

    def look(actions: torch.Tensor) -> Any:
        seen.append(actions.device.type)
        return advance(torch.zeros(actions.shape))

    monkeypatch.setattr(env, "advance", look)
    device_env = env_maker(lambda: env).device_env(N, 0)
    device_env.step(device_env.begin()[0], torch.ones(N, 1))
    assert seen == ["meta"]
