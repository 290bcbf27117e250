"""Environments of gymnax and Brax, the real ones: what unidle shows of them is what they themselves do."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

jax = pytest.importorskip("jax")

import jax.numpy as jnp  # noqa: E402

import unidle  # noqa: E402
from unidle.buffers.rollout import Rollout  # noqa: E402
from unidle.config import PPORecipe  # noqa: E402
from unidle.engine.checkpoint.run_folder import RunFolder, load_checkpoint  # noqa: E402
from unidle.engine.collect.device import DeviceCollector  # noqa: E402
from unidle.engine.collect.host import HostCollector  # noqa: E402
from unidle.envs.device.device_env import Step, traits_of  # noqa: E402
from unidle.envs.device.host_view import TensorEnvs  # noqa: E402
from unidle.envs.device.jax_env import JaxEnv, JaxTask, _Words, space_of  # noqa: E402
from unidle.envs.make import env_maker  # noqa: E402
from unidle.envs.spec import probe  # noqa: E402
from unidle.errors import UsageError  # noqa: E402
from unidle.nn.actor_critic import ActorCritic  # noqa: E402
from unidle.timeline import Timeline  # noqa: E402

CPU = torch.device("cpu")


def made(name: str, n_envs: int, seed: int = 3, first_index: int = 0, **kwargs: Any) -> JaxEnv:
    return env_maker(name, kwargs).device_env(n_envs, seed, first_index=first_index)


def played(env: JaxEnv, actions: torch.Tensor) -> list[Step]:
    """What came of actions [T, N, width]."""
    state, _ = env.begin()
    steps = []
    for action in actions:
        state, step = env.step(state, action)
        steps.append(step)
    return steps


# -- the state as words ------------------------------------------------------------------------------------------------

DTYPES = [np.bool_, np.uint8, np.int16, np.int32, np.uint32, np.float16, np.float32]
LEAVES = st.sampled_from(DTYPES).flatmap(
    lambda dtype: arrays.arrays(dtype, arrays.array_shapes(min_dims=0, max_dims=3, max_side=3))
)


@settings(max_examples=30)
@given(st.lists(LEAVES, min_size=1, max_size=4))
def test_a_state_comes_back_from_words_bit_for_bit(leaves: list[np.ndarray]) -> None:
    tree = {str(number): [jnp.asarray(leaf)] for number, leaf in enumerate(leaves)}
    words = _Words(jax.eval_shape(lambda: tree))
    packed = words.pack(tree)
    assert packed.dtype == jnp.int32
    assert packed.shape == (sum(leaf.size for leaf in leaves),)
    back = words.unpack(packed)
    assert jax.tree.structure(back) == jax.tree.structure(tree)
    for before, after in zip(jax.tree.leaves(tree), jax.tree.leaves(back)):
        assert before.dtype == after.dtype
        assert np.asarray(before).tobytes() == np.asarray(after).tobytes()


# -- a task of which everything is known -------------------------------------------------------------------------------

OPEN, TERMINATES, TIES = 0.0, 1.0, 2.0


def counting(limit: int | None = 3) -> JaxTask:
    """Shows [steps so far, a number drawn for the episode, the action]; ends when told to, or both ways at once."""

    def reset(key: Any) -> tuple[Any, Any]:
        drawn = jax.random.uniform(key)
        return {"steps": jnp.int32(0), "drawn": drawn, "key": key}, jnp.stack([jnp.float32(0), drawn, -1.0])

    def step(key: Any, state: Any, action: Any) -> tuple[Any, Any, Any, Any, Any]:
        after = {**state, "steps": state["steps"] + 1}
        shown = jnp.stack([after["steps"].astype(jnp.float32), state["drawn"], action[0]])
        return after, shown, 10 * after["steps"], action[0] > 0.5, action[0] > 1.5

    seen = jax.eval_shape(reset, jax.random.PRNGKey(0))[1]
    return JaxTask(space_of(seen), gymnasium.spaces.Box(0.0, 2.0, (1,), np.float32), reset, step, limit)


def test_ends_final_observations_and_first_ones_are_as_they_happened() -> None:
    env = JaxEnv(counting(), n_envs=2, seed=0)
    assert (env.observation_space.shape, env.episode_limit) == ((3,), 3)
    state, first = env.begin()
    assert first[:, 0].tolist() == [0, 0]
    drawn = first[:, 1].clone()
    told = torch.tensor([[OPEN, OPEN], [OPEN, TERMINATES], [TIES, OPEN]])
    steps = []
    for action in told:
        state, step = env.step(state, action.unsqueeze(1))
        steps.append(step)
    assert [s.terminated.tolist() for s in steps] == [[False, False], [False, True], [True, False]]
    assert [s.truncated.tolist() for s in steps] == [[False, False]] * 3  # at its limit it also terminated
    assert [s.reward.tolist() for s in steps] == [[10, 10], [20, 20], [30, 10]]
    assert all(s.reward.dtype == torch.float32 for s in steps)
    assert steps[1].final_observation.tolist() == [[2, drawn[0], OPEN], [2, drawn[1], TERMINATES]]
    assert steps[1].observation[0].tolist() == [2, drawn[0], OPEN]
    assert steps[1].observation[1, [0, 2]].tolist() == [0, -1]
    assert steps[1].observation[1, 1] not in drawn  # a new episode has numbers of its own
    state, step = env.step(state, torch.full((2, 1), OPEN))
    state, step = env.step(state, torch.full((2, 1), OPEN))
    # The second one ended after two steps, so this is its third since.
    assert (step.truncated.tolist(), step.terminated.tolist()) == ([False, True], [False, False])
    assert step.final_observation[:, 0].tolist() == [2, 3]
    assert step.observation[:, 0].tolist() == [2, 0]


def test_each_environment_and_episode_has_its_own_random_numbers() -> None:
    def drawn(**given: Any) -> torch.Tensor:
        """[episodes, N]"""
        env = JaxEnv(counting(limit=1), **{"n_envs": 4, "seed": 0, **given})
        first = env.begin()[1][:, 1]
        later = [s.observation[:, 1] for s in played(env, torch.zeros(3, env.n_envs, 1))]
        return torch.stack([first, *later])

    one = drawn()
    assert len(one.unique()) == one.numel()
    assert torch.equal(one, drawn())
    assert torch.equal(one[:, 2:], drawn(n_envs=2, first_index=2))
    for other in (drawn(seed=1), drawn(seed=1 << 32), drawn(first_index=4)):
        assert len(torch.cat([one, other]).unique()) == 2 * one.numel()


def test_a_step_has_random_numbers_of_its_own() -> None:
    def step(key: Any, state: Any, action: Any) -> tuple[Any, Any, Any, Any, Any]:
        return state, jax.random.uniform(key)[None], 1.0, False, False  # plain numbers, as Brax's pendulum returns them

    task = dataclasses.replace(
        counting(limit=3), reset=lambda key: (jnp.int32(0), jax.random.uniform(key)[None]), step=step
    )
    env = JaxEnv(task, n_envs=2, seed=0)
    first = env.begin()[1]
    seen = torch.cat([first, *(s.final_observation for s in played(env, torch.zeros(7, 2, 1)))])
    assert len(seen.unique()) == 16


def test_tensors_change_hands_without_a_copy() -> None:
    env = JaxEnv(counting(), n_envs=3, seed=0)
    seen: dict[str, Any] = {}
    traced = env._step_all

    def watched(*arrays: Any) -> Any:
        outcome = traced(*arrays)
        seen.update(inputs=arrays, outputs=outcome)
        return outcome

    env._step_all = watched
    state, _ = env.begin()
    action = torch.zeros(3, 1)
    after, step = env.step(state, action)
    pointers = [array.unsafe_buffer_pointer() for array in (*seen["inputs"][1:], *seen["outputs"])]
    assert pointers == [tensor.data_ptr() for tensor in (state["words"], action, after["words"], *step)]


@pytest.mark.gpu
def test_on_a_gpu_neither_waits_too_little_for_the_other() -> None:
    there, here = (JaxEnv(counting(limit=7), n_envs=4096, seed=0, device=device) for device in ("cuda", "cpu"))
    (state, first), (mine, own) = there.begin(), here.begin()
    assert torch.equal(first.cpu(), own)
    generator = torch.Generator().manual_seed(0)
    total, expected = torch.zeros(4096, 3, device="cuda"), torch.zeros(4096, 3)
    for _ in range(50):
        action = (torch.rand(4096, 1, generator=generator) > 0.9).float()
        late = action.cuda() * torch.ones(4096, 4096, device="cuda").mm(torch.eye(4096, device="cuda"))[:, :1]
        state, step = there.step(state, late)
        late.fill_(9.0)  # if JAX still had to read it, it would see this
        mine, same = here.step(mine, action)
        total += step.observation + step.final_observation
        expected += same.observation + same.final_observation
        assert step.reward.device.type == "cuda"
    assert torch.allclose(total.cpu(), expected)


# -- gymnax ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("limit", [9, 500])
def test_gymnax_cartpole_is_gymnasiums(limit: int) -> None:
    pytest.importorskip("gymnax")
    n_envs, steps = 6, 40
    env = made("gymnax:CartPole-v1", n_envs, max_steps_in_episode=limit)
    theirs = [gymnasium.make("CartPole-v1", max_episode_steps=limit) for _ in range(n_envs)]
    state, observation = env.begin()
    for one, at in zip(theirs, observation):
        one.reset()
        one.unwrapped.state = at.double().numpy()
    # Pushed one way a pole falls in 8 to 10 steps: at the limit, before it and after it.
    actions = torch.from_numpy(np.random.default_rng(0).integers(0, 2, (steps, n_envs, 1))).float()
    actions[:, :3] = 0.0
    ends: list[tuple[bool, bool, int]] = []
    lengths = [0] * n_envs
    for action in actions:
        state, step = env.step(state, action)
        for i, one in enumerate(theirs):
            shown, reward, terminated, truncated, _ = one.step(int(action[i, 0]))
            lengths[i] += 1
            np.testing.assert_allclose(step.final_observation[i].numpy(), shown, atol=1e-5)
            assert (step.reward[i], step.terminated[i]) == (reward, terminated)
            assert step.truncated[i] == (truncated and not terminated)
            if terminated or truncated:
                ends.append((bool(terminated), bool(truncated), lengths[i]))
                assert step.observation[i].abs().max() <= 0.05
                one.reset()
                lengths[i] = 0
            else:
                assert torch.equal(step.observation[i], step.final_observation[i])
            one.unwrapped.state = step.observation[i].double().numpy()
    kinds = {(terminated, truncated) for terminated, truncated, _ in ends}
    assert kinds == ({(True, False), (False, True), (True, True)} if limit == 9 else {(True, False)})


def test_gymnax_final_observation_is_that_of_its_own_limit() -> None:
    # Its observation is the time over the limit: another limit to tell termination by must not show.
    pytest.importorskip("gymnax")
    env = made("gymnax:DiscountingChain-bsuite", 2, max_steps_in_episode=4)
    steps = played(env, torch.zeros(4, 2, 1))
    assert [s.final_observation[0, 1].item() for s in steps] == [0.25, 0.5, 0.75, 1.0]
    assert [s.truncated.tolist() for s in steps] == [[False] * 2] * 3 + [[True] * 2]


def test_gymnax_kwargs_go_where_they_belong() -> None:
    pytest.importorskip("gymnax")
    env = made("gymnax:Catch-bsuite", 2, rows=6, columns=3)
    assert env.observation_space.shape == (6, 3)
    with pytest.raises(UsageError, match="wheels"):
        made("gymnax:CartPole-v1", 2, wheels=3)


def test_rollouts_of_gymnax_are_those_of_the_host() -> None:
    pytest.importorskip("gymnax")
    n_envs, steps, seed = 4, 16, 3
    maker = env_maker("gymnax:CartPole-v1", {"max_steps_in_episode": 6})
    env_spec = probe(maker)
    torch.manual_seed(0)
    policy = ActorCritic(env_spec.obs_layout, env_spec.action_layout, PPORecipe(recurrent="gru", recurrent_size=8))

    def rollout() -> Rollout:
        return Rollout(
            steps, n_envs, env_spec.obs_layout.obs_bytes, env_spec.action_layout.width, policy.state_size, CPU
        )

    here = DeviceCollector(maker.device_env(n_envs, seed), env_spec, policy, rollout(), seed, Timeline())
    envs = TensorEnvs(maker.device_env(n_envs, seed), env_spec)
    there = HostCollector(envs, policy, [rollout()], seed, Timeline())
    here.start()
    there.start()
    cut = 0
    for _ in range(3):
        mine, theirs = here.finish().rollout, there.finish().rollout
        here.read_episode_stats()
        for field in ("obs", "starts", "actions", "rewards", "terminated", "truncated", "final_at", "final_obs"):
            assert torch.equal(getattr(mine, field), getattr(theirs, field)), field
        cut += len(mine.final_at)
        assert here.episodes == there.stats.episodes
        here.open_rollout()
        there.open_rollout()
    assert cut > 3 * n_envs


SMALL: dict[str, Any] = {
    "preset": "classic",
    "n_envs": 8,
    "n_steps": 16,
    "batch_size": 64,
    "n_epochs": 2,
    "net_arch": (16,),
    "eval_episodes": 4,
    "eval_every": 0,
    "tensorboard": False,
    "quiet": True,
}


def latest_state(run: unidle.TrainedRun) -> dict[str, Any]:
    latest = RunFolder.open(run.path).latest()
    assert latest is not None
    return load_checkpoint(latest)


def test_a_run_stopped_and_resumed_equals_one_that_was_not(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("gymnax")
    settings = {**SMALL, "timesteps": 768, "runs_dir": str(tmp_path), "env_kwargs": {"max_steps_in_episode": 10}}
    whole = unidle.train("gymnax:CartPole-v1", run_name="whole", **settings)

    def stop_early(context: unidle.CallbackContext) -> None:
        if context.record["iteration"] == 3:
            context.stop()

    unidle.train("gymnax:CartPole-v1", run_name="parts", after_iteration=[stop_early], **settings)
    parts = unidle.resume(tmp_path / "parts", quiet=True)
    one, other = latest_state(whole), latest_state(parts)
    assert one["step"] == other["step"] == 768
    for mine, theirs in zip(one["collector"]["moving"], other["collector"]["moving"], strict=True):
        assert torch.equal(mine, theirs)
    for name, weights in one["algo"]["policy"].items():
        assert torch.equal(weights, other["algo"]["policy"][name]), name
    assert "could not be replayed" not in capsys.readouterr().err


@pytest.mark.learning
def test_gymnax_cartpole_is_learned(tmp_path: Path) -> None:
    pytest.importorskip("gymnax")
    settings = {**SMALL, "n_envs": 128, "n_steps": 32, "batch_size": 512, "n_epochs": 4, "net_arch": (64, 64)}
    run = unidle.train(
        "gymnax:CartPole-v1",
        timesteps=300_000,
        target_return=300,
        learning_rate=1e-3,
        runs_dir=str(tmp_path),
        **{**settings, "eval_every": 20_000, "eval_episodes": 20},
    )
    assert run.evaluate(episodes=20).mean_return > 200


# -- Brax --------------------------------------------------------------------------------------------------------------


def test_brax_is_brax_without_its_loss_of_the_last_observation() -> None:
    pytest.importorskip("brax")
    from brax import envs

    env = made("brax:fast", 2, episode_length=4)
    theirs = envs.get_environment("fast")
    assert (env.observation_space.shape, env.action_space) == ((2,), gymnasium.spaces.Box(-1, 1, (1,), np.float32))
    actions = torch.tensor([[1.0, -1.0]] * 6).unsqueeze(-1)
    states = [theirs.reset(jax.random.PRNGKey(0))] * 2
    for t, step in enumerate(played(env, actions), start=1):
        states = [theirs.step(state, jnp.asarray(actions[t - 1, i].numpy())) for i, state in enumerate(states)]
        for i, state in enumerate(states):
            np.testing.assert_allclose(step.final_observation[i].numpy(), state.obs, atol=1e-7)
            assert step.reward[i] == float(state.reward)
        assert step.truncated.tolist() == [t == 4] * 2
        assert not step.terminated.any()
        if t == 4:
            assert not torch.equal(step.final_observation[0], torch.zeros(2))
            assert torch.equal(step.observation, torch.zeros(2, 2))
            states = [theirs.reset(jax.random.PRNGKey(0))] * 2
        else:
            assert torch.equal(step.observation, step.final_observation)


# -- what is declared, and what cannot be ------------------------------------------------------------------------------


def test_a_jax_environment_declares_what_it_has() -> None:
    traits = traits_of(JaxEnv(counting(), n_envs=1, seed=0))
    assert (traits.capture_safe, traits.resumable, traits.exact_final_observation) == (False, True, True)


@pytest.mark.parametrize(
    ("name", "package", "sentence"),
    [
        ("gymnax:CartPol-v1", "gymnax", "did you mean `CartPole-v1`"),
        ("brax:ants", "brax", "did you mean `ant`"),
    ],
)
def test_a_name_that_there_is_not_is_said(name: str, package: str, sentence: str) -> None:
    pytest.importorskip(package)
    with pytest.raises(UsageError, match=sentence):
        made(name, 1)


@pytest.mark.parametrize("name", ["gymnax:CartPole-v1", "brax:ant"])
def test_a_missing_package_is_said_with_the_command(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    package = name.partition(":")[0]
    for module in [module for module in sys.modules if module.partition(".")[0] == package]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(UsageError, match=f"pip install {package}"):
        probe(env_maker(name))


def test_a_gpu_that_jax_does_not_see_is_said() -> None:
    if any(device.platform == "gpu" for device in jax.devices()):
        pytest.skip("JAX sees a GPU")
    with pytest.raises(UsageError, match=r"jax\[cuda12\]"):
        JaxEnv(counting(), n_envs=1, seed=0, device="cuda")
