"""gymnax and Brax environments behave as in their own libraries."""

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
from unidle.engine.checkpoint.checkpoint_file import load_checkpoint  # noqa: E402
from unidle.engine.checkpoint.run_folder import RunFolder  # noqa: E402
from unidle.engine.collect.device import DeviceCollector  # noqa: E402
from unidle.engine.collect.host import HostCollector  # noqa: E402
from unidle.envs.device.device_env import Step, traits_of  # noqa: E402
from unidle.envs.device.host_view import TensorEnvs  # noqa: E402
from unidle.envs.device.jax_env import JaxEnv, JaxTask, _Words, space_of  # noqa: E402
from unidle.envs.make import env_maker  # noqa: E402
from unidle.envs.probe import probe  # noqa: E402
from unidle.errors import UsageError  # noqa: E402
from unidle.nn.actor_critic import ActorCritic  # noqa: E402
from unidle.timeline import Timeline  # noqa: E402

CPU = torch.device("cpu")


def make_env(name: str, n_envs: int, seed: int = 3, first_index: int = 0, **kwargs: Any) -> JaxEnv:
    return env_maker(name, kwargs).device_env(n_envs, seed, first_index=first_index)


def step_through(env: JaxEnv, actions: torch.Tensor) -> list[Step]:
    """The steps taken with actions [T, N, width]."""
    state, _ = env.begin()
    steps = []
    for action in actions:
        state, step = env.step(state, action)
        steps.append(step)
    return steps


# -- packed state ------------------------------------------------------------------------------------------------------

DTYPES = [np.bool_, np.uint8, np.int16, np.int32, np.uint32, np.float16, np.float32]
LEAVES = st.sampled_from(DTYPES).flatmap(
    lambda dtype: arrays.arrays(dtype, arrays.array_shapes(min_dims=0, max_dims=3, max_side=3))
)


@settings(max_examples=30)
@given(st.lists(LEAVES, min_size=1, max_size=4))
def test_packed_state_unpacks_bit_for_bit(leaves: list[np.ndarray]) -> None:
    tree = {str(number): [jnp.asarray(leaf)] for number, leaf in enumerate(leaves)}
    words = _Words(jax.eval_shape(lambda: tree))
    packed = words.pack(tree)
    assert packed.dtype == jnp.int32
    assert packed.shape == (sum(leaf.size for leaf in leaves),)
    unpacked = words.unpack(packed)
    assert jax.tree.structure(unpacked) == jax.tree.structure(tree)
    for before, after in zip(jax.tree.leaves(tree), jax.tree.leaves(unpacked)):
        assert before.dtype == after.dtype
        assert np.asarray(before).tobytes() == np.asarray(after).tobytes()


# -- a task with known outcomes ----------------------------------------------------------------------------------------

CONTINUE, TERMINATE, TERMINATE_AND_TRUNCATE = 0.0, 1.0, 2.0


def counting_task(limit: int | None = 3) -> JaxTask:
    """Observes [steps so far, a random number per episode, the action]; the action may terminate, truncate or both."""

    def reset(key: Any) -> tuple[Any, Any]:
        drawn = jax.random.uniform(key)
        return {"steps": jnp.int32(0), "drawn": drawn, "key": key}, jnp.stack([jnp.float32(0), drawn, -1.0])

    def step(key: Any, state: Any, action: Any) -> tuple[Any, Any, Any, Any, Any]:
        after = {**state, "steps": state["steps"] + 1}
        shown = jnp.stack([after["steps"].astype(jnp.float32), state["drawn"], action[0]])
        return after, shown, 10 * after["steps"], action[0] > 0.5, action[0] > 1.5

    seen = jax.eval_shape(reset, jax.random.PRNGKey(0))[1]
    return JaxTask(space_of(seen), gymnasium.spaces.Box(0.0, 2.0, (1,), np.float32), reset, step, limit)


def test_episode_ends_and_observations_are_exact() -> None:
    env = JaxEnv(counting_task(), n_envs=2, seed=0)
    assert (env.observation_space.shape, env.episode_limit) == ((3,), 3)
    state, first = env.begin()
    assert first[:, 0].tolist() == [0, 0]
    drawn = first[:, 1].clone()
    actions = torch.tensor([[CONTINUE, CONTINUE], [CONTINUE, TERMINATE], [TERMINATE_AND_TRUNCATE, CONTINUE]])
    steps = []
    for action in actions:
        state, step = env.step(state, action.unsqueeze(1))
        steps.append(step)
    assert [s.terminated.tolist() for s in steps] == [[False, False], [False, True], [True, False]]
    assert [s.truncated.tolist() for s in steps] == [[False, False]] * 3  # it also terminated at its limit
    assert [s.reward.tolist() for s in steps] == [[10, 10], [20, 20], [30, 10]]
    assert all(s.reward.dtype == torch.float32 for s in steps)
    assert steps[1].final_observation.tolist() == [[2, drawn[0], CONTINUE], [2, drawn[1], TERMINATE]]
    assert steps[1].observation[0].tolist() == [2, drawn[0], CONTINUE]
    assert steps[1].observation[1, [0, 2]].tolist() == [0, -1]
    assert steps[1].observation[1, 1] not in drawn  # a new episode draws a new number
    state, step = env.step(state, torch.full((2, 1), CONTINUE))
    state, step = env.step(state, torch.full((2, 1), CONTINUE))
    # The second environment ended after two steps; this is the third step of its next episode.
    assert (step.truncated.tolist(), step.terminated.tolist()) == ([False, True], [False, False])
    assert step.final_observation[:, 0].tolist() == [2, 3]
    assert step.observation[:, 0].tolist() == [2, 0]


def test_each_env_and_episode_has_its_own_random_numbers() -> None:
    def random_numbers(**overrides: Any) -> torch.Tensor:
        """[episodes, N]"""
        env = JaxEnv(counting_task(limit=1), **{"n_envs": 4, "seed": 0, **overrides})
        first = env.begin()[1][:, 1]
        later = [s.observation[:, 1] for s in step_through(env, torch.zeros(3, env.n_envs, 1))]
        return torch.stack([first, *later])

    base = random_numbers()
    assert len(base.unique()) == base.numel()
    assert torch.equal(base, random_numbers())
    assert torch.equal(base[:, 2:], random_numbers(n_envs=2, first_index=2))
    for other in (random_numbers(seed=1), random_numbers(seed=1 << 32), random_numbers(first_index=4)):
        assert len(torch.cat([base, other]).unique()) == 2 * base.numel()


def test_each_step_has_its_own_random_numbers() -> None:
    def step(key: Any, state: Any, action: Any) -> tuple[Any, Any, Any, Any, Any]:
        return state, jax.random.uniform(key)[None], 1.0, False, False  # plain numbers, as returned by Brax's pendulum

    task = dataclasses.replace(
        counting_task(limit=3), reset=lambda key: (jnp.int32(0), jax.random.uniform(key)[None]), step=step
    )
    env = JaxEnv(task, n_envs=2, seed=0)
    first = env.begin()[1]
    seen = torch.cat([first, *(s.final_observation for s in step_through(env, torch.zeros(7, 2, 1)))])
    assert len(seen.unique()) == 16


def test_tensors_are_exchanged_without_copy() -> None:
    env = JaxEnv(counting_task(), n_envs=3, seed=0)
    seen: dict[str, Any] = {}
    traced = env._step_all

    def record(*arrays: Any) -> Any:
        outcome = traced(*arrays)
        seen.update(inputs=arrays, outputs=outcome)
        return outcome

    env._step_all = record
    state, _ = env.begin()
    action = torch.zeros(3, 1)
    after, step = env.step(state, action)
    pointers = [array.unsafe_buffer_pointer() for array in (*seen["inputs"][1:], *seen["outputs"])]
    assert pointers == [tensor.data_ptr() for tensor in (state["words"], action, after["words"], *step)]


@pytest.mark.gpu
def test_torch_and_jax_synchronise_on_gpu() -> None:
    on_gpu, on_cpu = (JaxEnv(counting_task(limit=7), n_envs=4096, seed=0, device=device) for device in ("cuda", "cpu"))
    (state, first), (cpu_state, cpu_first) = on_gpu.begin(), on_cpu.begin()
    assert torch.equal(first.cpu(), cpu_first)
    generator = torch.Generator().manual_seed(0)
    total, expected = torch.zeros(4096, 3, device="cuda"), torch.zeros(4096, 3)
    for _ in range(50):
        action = (torch.rand(4096, 1, generator=generator) > 0.9).float()
        late = action.cuda() * torch.ones(4096, 4096, device="cuda").mm(torch.eye(4096, device="cuda"))[:, :1]
        state, step = on_gpu.step(state, late)
        late.fill_(9.0)  # JAX must have read the action by now
        cpu_state, cpu_step = on_cpu.step(cpu_state, action)
        total += step.observation + step.final_observation
        expected += cpu_step.observation + cpu_step.final_observation
        assert step.reward.device.type == "cuda"
    assert torch.allclose(total.cpu(), expected)


# -- gymnax ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("limit", [9, 500])
def test_gymnax_cartpole_equals_gymnasium(limit: int) -> None:
    pytest.importorskip("gymnax")
    n_envs, steps = 6, 40
    env = make_env("gymnax:CartPole-v1", n_envs, max_steps_in_episode=limit)
    references = [gymnasium.make("CartPole-v1", max_episode_steps=limit) for _ in range(n_envs)]
    state, observation = env.begin()
    for reference, start in zip(references, observation):
        reference.reset()
        reference.unwrapped.state = start.double().numpy()
    # Pushed in one direction, the pole falls in 8 to 10 steps: before, at and after the limit.
    actions = torch.from_numpy(np.random.default_rng(0).integers(0, 2, (steps, n_envs, 1))).float()
    actions[:, :3] = 0.0
    ends: list[tuple[bool, bool, int]] = []
    lengths = [0] * n_envs
    for action in actions:
        state, step = env.step(state, action)
        for i, reference in enumerate(references):
            expected, reward, terminated, truncated, _ = reference.step(int(action[i, 0]))
            lengths[i] += 1
            np.testing.assert_allclose(step.final_observation[i].numpy(), expected, atol=1e-5)
            assert (step.reward[i], step.terminated[i]) == (reward, terminated)
            assert step.truncated[i] == (truncated and not terminated)
            if terminated or truncated:
                ends.append((bool(terminated), bool(truncated), lengths[i]))
                assert step.observation[i].abs().max() <= 0.05
                reference.reset()
                lengths[i] = 0
            else:
                assert torch.equal(step.observation[i], step.final_observation[i])
            reference.unwrapped.state = step.observation[i].double().numpy()
    kinds = {(terminated, truncated) for terminated, truncated, _ in ends}
    assert kinds == ({(True, False), (False, True), (True, True)} if limit == 9 else {(True, False)})


def test_gymnax_final_observation_uses_configured_limit() -> None:
    # The observation is time / limit; the raised limit that tells termination from truncation must not show in it.
    pytest.importorskip("gymnax")
    env = make_env("gymnax:DiscountingChain-bsuite", 2, max_steps_in_episode=4)
    steps = step_through(env, torch.zeros(4, 2, 1))
    assert [s.final_observation[0, 1].item() for s in steps] == [0.25, 0.5, 0.75, 1.0]
    assert [s.truncated.tolist() for s in steps] == [[False] * 2] * 3 + [[True] * 2]


def test_gymnax_kwargs_reach_env_or_its_params() -> None:
    pytest.importorskip("gymnax")
    env = make_env("gymnax:Catch-bsuite", 2, rows=6, columns=3)
    assert env.observation_space.shape == (6, 3)
    with pytest.raises(UsageError, match="wheels"):
        make_env("gymnax:CartPole-v1", 2, wheels=3)


def test_gymnax_device_rollouts_equal_host_rollouts() -> None:
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

    on_device = DeviceCollector(maker.device_env(n_envs, seed), env_spec, policy, rollout(), seed, Timeline())
    envs = TensorEnvs(maker.device_env(n_envs, seed), env_spec)
    on_host = HostCollector(envs, policy, [rollout()], seed, Timeline())
    on_device.start()
    on_host.start()
    truncations = 0
    for _ in range(3):
        device_rollout, host_rollout = on_device.finish().rollout, on_host.finish().rollout
        on_device.read_episode_stats()
        for field in ("obs", "starts", "actions", "rewards", "terminated", "truncated", "final_at", "final_obs"):
            assert torch.equal(getattr(device_rollout, field), getattr(host_rollout, field)), field
        truncations += len(device_rollout.final_at)
        assert on_device.episodes == on_host.stats.episodes
        on_device.open_rollout()
        on_host.open_rollout()
    assert truncations > 3 * n_envs


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


def test_resumed_run_equals_uninterrupted_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("gymnax")
    settings = {**SMALL, "timesteps": 768, "runs_dir": str(tmp_path), "env_kwargs": {"max_steps_in_episode": 10}}
    uninterrupted = unidle.train("gymnax:CartPole-v1", run_name="uninterrupted", **settings)

    def stop_early(context: unidle.CallbackContext) -> None:
        if context.record["iteration"] == 3:
            context.stop()

    unidle.train("gymnax:CartPole-v1", run_name="resumed", after_iteration=[stop_early], **settings)
    resumed = unidle.resume(tmp_path / "resumed", quiet=True)
    expected, actual = latest_state(uninterrupted), latest_state(resumed)
    assert expected["step"] == actual["step"] == 768
    for left, right in zip(expected["collector"]["moving"], actual["collector"]["moving"], strict=True):
        assert torch.equal(left, right)
    for name, weights in expected["algo"]["policy"].items():
        assert torch.equal(weights, actual["algo"]["policy"][name]), name
    assert "could not be replayed" not in capsys.readouterr().err


@pytest.mark.learning
def test_ppo_learns_gymnax_cartpole(tmp_path: Path) -> None:
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


def test_brax_steps_equal_brax_and_keep_final_observation() -> None:
    pytest.importorskip("brax")
    from brax import envs

    env = make_env("brax:fast", 2, episode_length=4)
    reference = envs.get_environment("fast")
    assert (env.observation_space.shape, env.action_space) == ((2,), gymnasium.spaces.Box(-1, 1, (1,), np.float32))
    actions = torch.tensor([[1.0, -1.0]] * 6).unsqueeze(-1)
    states = [reference.reset(jax.random.PRNGKey(0))] * 2
    for t, step in enumerate(step_through(env, actions), start=1):
        states = [reference.step(state, jnp.asarray(actions[t - 1, i].numpy())) for i, state in enumerate(states)]
        for i, state in enumerate(states):
            np.testing.assert_allclose(step.final_observation[i].numpy(), state.obs, atol=1e-7)
            assert step.reward[i] == float(state.reward)
        assert step.truncated.tolist() == [t == 4] * 2
        assert not step.terminated.any()
        if t == 4:
            assert not torch.equal(step.final_observation[0], torch.zeros(2))
            assert torch.equal(step.observation, torch.zeros(2, 2))
            states = [reference.reset(jax.random.PRNGKey(0))] * 2
        else:
            assert torch.equal(step.observation, step.final_observation)


# -- traits and errors -------------------------------------------------------------------------------------------------


def test_jax_env_declares_its_traits() -> None:
    traits = traits_of(JaxEnv(counting_task(), n_envs=1, seed=0))
    assert (traits.capture_safe, traits.resumable, traits.exact_final_observation) == (False, True, True)


@pytest.mark.parametrize(
    ("name", "package", "message"),
    [
        ("gymnax:CartPol-v1", "gymnax", "did you mean `CartPole-v1`"),
        ("brax:ants", "brax", "did you mean `ant`"),
    ],
)
def test_unknown_name_gets_suggestion(name: str, package: str, message: str) -> None:
    pytest.importorskip(package)
    with pytest.raises(UsageError, match=message):
        make_env(name, 1)


@pytest.mark.parametrize("name", ["gymnax:CartPole-v1", "brax:ant"])
def test_missing_package_error_names_install_command(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    package = name.partition(":")[0]
    for module in [module for module in sys.modules if module.partition(".")[0] == package]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(UsageError, match=f"pip install {package}"):
        probe(env_maker(name))


def test_gpu_that_jax_does_not_see_is_an_error() -> None:
    if any(device.platform == "gpu" for device in jax.devices()):
        pytest.skip("JAX sees a GPU")
    with pytest.raises(UsageError, match=r"jax\[cuda12\]"):
        JaxEnv(counting_task(), n_envs=1, seed=0, device="cuda")
