"""The host collector: correct, reproducible and resumable rollouts, with and without worker processes."""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from small_envs import Counting, Drift, Nondeterministic, counting_steps, short_cartpole
from small_runs import SmallRun, save_and_load, small_run
from torch import Tensor

from unidle.buffers.rollout import Rollout
from unidle.engine.collect import episode_log
from unidle.engine.collect.episode_log import EpisodeLog, as_tensors
from unidle.rng import keyed_generator

FIELDS = ("obs", "starts", "actions", "rewards", "terminated", "truncated", "states", "final_obs", "final_at")


def clone_fields(rollout: Rollout) -> dict[str, Tensor]:
    return {name: getattr(rollout, name).clone() for name in FIELDS}


def assert_identical(left: dict[str, Tensor], right: dict[str, Tensor]) -> None:
    for name in FIELDS:
        assert torch.equal(left[name], right[name]), name


def decode_counting(obs: Tensor) -> list[tuple[int, int]]:
    """The (seed, step) pairs in packed `Counting` observations [n, obs_bytes]."""
    return [tuple(pair) for pair in obs.contiguous().view(torch.int64).tolist()]


@pytest.fixture
def start_run() -> Iterator[Callable[..., SmallRun]]:
    """Starts small runs, which are closed after the test."""
    runs: list[SmallRun] = []

    def start(*arguments: Any, **settings: Any) -> SmallRun:
        runs.append(small_run(*arguments, **settings))
        return runs[-1]

    yield start
    for run in runs:
        run.envs.close()


# -- transitions -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [0, 2])
def test_transitions_are_recorded_correctly(start_run: Callable[..., SmallRun], workers: int) -> None:
    steps, n_envs, seed = 11, 3, 42
    run = start_run(Counting, n_steps=steps, n_envs=n_envs, batch_size=11, seed=seed, workers=workers)
    expected = [counting_steps(seed, env, 3 * steps + 1) for env in range(n_envs)]
    lengths: list[int] = []
    for first in (0, steps, 2 * steps):
        rollout = run.collect()
        finals = dict(
            zip(rollout.final_at.tolist(), decode_counting(rollout.final_obs) if len(rollout.final_obs) else [])
        )
        for env in range(n_envs):
            records = expected[env][first : first + steps + 1]
            assert decode_counting(rollout.obs[:, env]) == [record["observation"] for record in records]
            assert rollout.starts[:, env].tolist() == [record["start"] for record in records]
            for t, record in enumerate(records[:-1]):
                assert rollout.rewards[t, env].item() == record["reward"]
                assert rollout.terminated[t, env].item() == record["terminated"]
                assert rollout.truncated[t, env].item() == record["truncated"]
                # Truncated episodes, and no others, have a final observation.
                assert finals.get(t * n_envs + env) == (record["next"] if record["truncated"] else None)
                if record["terminated"] or record["truncated"]:
                    lengths.append(record["next"][1])
    assert run.collector.stats.episodes == len(lengths)
    assert sorted(run.collector.stats.recent_lengths) == sorted(lengths)
    assert all(any(record[kind] for env in expected for record in env) for kind in ("terminated", "truncated"))


def test_episode_returns_are_sums_of_rewards(start_run: Callable[..., SmallRun]) -> None:
    run = start_run(Counting, n_steps=40, n_envs=1, batch_size=8)
    run.collect()
    returns, total = [], 0.0
    for record in counting_steps(0, 0, 40):
        total += record["reward"]
        if record["terminated"] or record["truncated"]:
            returns.append(total)
            total = 0.0
    assert list(run.collector.stats.recent_returns) == returns


def test_envs_receive_recorded_actions_scaled_and_clipped(
    start_run: Callable[..., SmallRun],
) -> None:
    run = start_run(Drift, n_steps=8, log_std_init=1.0)  # the action range is [−2, 4]: scale 3, shift 1
    received_actions: list[np.ndarray] = []
    for slot in run.envs._slots:
        step = slot.env.step
        slot.env.step = lambda action, step=step: (received_actions.append(action), step(action))[1]
    run.collect()
    expected = (run.rollout.actions * 3 + 1).clamp(-2, 4).reshape(-1, 2)
    np.testing.assert_allclose(np.stack(received_actions), expected.numpy(), atol=1e-6)
    assert (run.rollout.actions.abs() > 1).any()
    assert all(Drift.action_space.contains(action) for action in received_actions)


def test_recurrent_state_is_zeroed_at_episode_start_and_carried_over_rollouts(
    start_run: Callable[..., SmallRun],
) -> None:
    run = start_run(Drift, recurrent="gru", n_steps=8)
    for _ in range(3):
        before = run.rollout.states[-1].clone()
        rollout = run.collect()
        assert torch.equal(rollout.states[0], before)
        for t in range(8):
            state = rollout.states[t].clone()
            state[rollout.starts[t]] = 0.0
            with torch.no_grad():
                _, after = run.policy.act(rollout.obs[t], state)
            assert torch.equal(rollout.states[t + 1], after)
    assert rollout.starts[1:].any()


# -- reproducibility -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("env", [short_cartpole, "Pendulum-v1"])
def test_rollouts_depend_only_on_seed(start_run: Callable[..., SmallRun], env: Any) -> None:
    def rollouts(seed: int) -> list[dict[str, Tensor]]:
        run = start_run(env, seed=seed)
        collected = []
        for _ in range(2):
            collected.append(clone_fields(run.collect()))
            run.learn()
        return collected

    first, again, other = rollouts(7), rollouts(7), rollouts(8)
    for left, right in zip(first, again):
        assert_identical(left, right)
    assert not torch.equal(first[0]["obs"], other[0]["obs"])
    assert not torch.equal(first[0]["actions"], other[0]["actions"])


@pytest.mark.parametrize("env", [short_cartpole, Drift])
def test_worker_processes_do_not_change_rollouts(start_run: Callable[..., SmallRun], env: Any) -> None:
    runs = [start_run(env, n_envs=3, batch_size=12, workers=workers, normalize_obs=True) for workers in (0, 2)]
    for _ in range(2):
        serial, parallel = (clone_fields(run.collect()) for run in runs)
        assert_identical(serial, parallel)
        for run in runs:
            run.learn()
    assert torch.equal(runs[0].algo.parameters.flat, runs[1].algo.parameters.flat)


def test_action_noise_depends_only_on_seed_and_iteration(start_run: Callable[..., SmallRun]) -> None:
    def noise(seed: int, iterations: list[int]) -> Tensor:
        """The action noise of the last iteration; with mean 0 and standard deviation 1 it equals the action."""
        run = start_run(Drift, seed=seed)
        with torch.no_grad():
            run.policy.actor_head.weight.zero_()
        for iteration in iterations:
            run.collector.schedule.newest = iteration - 1
            run.collector.open_rollout()
            run.collector.schedule.oldest = iteration
            run.collector.schedule.rollout = [iteration] * len(run.collector.schedule.rollout)
            run.collector.finish()
        return run.rollout.actions.clone()

    reference = noise(3, [5])
    torch.manual_seed(99)
    np.random.seed(99)  # noqa: NPY002
    assert torch.equal(noise(3, [0, 1, 5]), reference)
    assert not torch.equal(noise(3, [4]), reference)
    assert not torch.equal(noise(4, [5]), reference)
    assert reference.unique().numel() == reference.numel()


def test_collection_does_not_use_global_random_state(start_run: Callable[..., SmallRun]) -> None:
    run = start_run(short_cartpole)
    before = torch.get_rng_state(), np.random.get_state()[1].copy()  # noqa: NPY002
    run.collect()
    assert torch.equal(torch.get_rng_state(), before[0])
    assert np.array_equal(np.random.get_state()[1], before[1])  # noqa: NPY002


def test_keyed_generators_differ_if_any_part_of_key_differs() -> None:
    keys = [(0, 1, 0), (1, 1, 0), (0, 2, 0), (0, 1, 1), (2**62, 1, 0)]
    draws = [torch.rand(4, generator=keyed_generator(torch.device("cpu"), *key)).tolist() for key in keys]
    assert len({tuple(draw) for draw in draws}) == len(keys)
    assert draws[0] == torch.rand(4, generator=keyed_generator(torch.device("cpu"), 0, 1, 0)).tolist()


# -- log of open episodes ----------------------------------------------------------------------------------------------


@given(st.data(), st.integers(1, 3))
def test_episode_log_equals_lists_cleared_at_episode_end(data: st.DataObject, n_envs: int) -> None:
    log = EpisodeLog(n_envs, width=1)
    expected: list[list[float]] = [[] for _ in range(n_envs)]
    count = 0.0
    for steps in data.draw(st.lists(st.integers(1, 6), max_size=4)):
        ends = data.draw(st.lists(st.booleans(), min_size=steps * n_envs, max_size=steps * n_envs))
        ended = np.array(ends).reshape(steps, n_envs)
        actions = np.zeros((steps, n_envs, 1), np.float32)
        for t in range(steps):
            for env in range(n_envs):
                count += 1
                actions[t, env] = count
                expected[env] = [] if ended[t, env] else [*expected[env], count]
        rewards = actions[..., 0] / 4
        log.extend(actions, rewards, ended)
        actions[:] = rewards[:] = -1  # the collector reuses this memory for the next rollout
    for env in range(n_envs):
        assert log.open_episode(env)[0][:, 0].tolist() == expected[env]
        assert log.open_episode(env)[1].tolist() == [action / 4 for action in expected[env]]
        assert {part.dtype for part in log.open_episode(env)} == {np.dtype(np.float32)}


def test_episode_log_forgets_episodes_beyond_memory_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(episode_log, "_MAX_BYTES", 3 * 2 * 2 * 8)  # three rollouts of two steps in two environments
    log = EpisodeLog(2, width=1)
    log.resume(0, np.full((4, 1), 7, np.float32), np.ones(4, np.float32))
    for rollout in range(10):
        actions = np.full((2, 2, 1), rollout, np.float32)
        log.extend(actions, np.ones((2, 2), np.float32), np.array([[False, False], [False, rollout % 2 == 0]]))
        assert len(log.open_episode(0)[0]) == (2 * rollout + 6 if rollout < 3 else 0)
        assert log.open_episode(1)[0][:, 0].tolist() == ([] if rollout % 2 == 0 else [rollout] * 2)
        assert len(log._rollouts) <= 3
    ended = np.array([[True, False], [False, False]])
    log.extend(np.full((2, 2, 1), 10, np.float32), np.ones((2, 2), np.float32), ended)
    assert log.open_episode(0)[0].tolist() == [[10]]


class Phase(enum.IntEnum):
    NIGHT = 1


@pytest.mark.parametrize("state", [Phase.NIGHT, {Phase.NIGHT: 1}, [object()], np.datetime64("2026-01-01"), [int]])
def test_env_state_with_unsupported_types_is_rejected(state: Any) -> None:
    with pytest.raises(TypeError, match="is not a plain value"):
        as_tensors(state)


def test_env_state_is_converted_to_plain_types() -> None:
    state = {"a": np.float32(0.5), 3: [1, ("x", None, True)], "c": Counter("aa"), "d": np.arange(3)}
    plain = as_tensors(state)
    assert plain.pop("d").tolist() == [0, 1, 2]
    assert plain == {"a": 0.5, 3: [1, ("x", None, True)], "c": {"a": 2}}
    assert [type(plain["a"]), type(plain["c"])] == [float, dict]


# -- resuming --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("env", [short_cartpole, "Pendulum-v1", Counting])
@pytest.mark.parametrize("recurrent", ["none", "lstm"])
def test_resumed_collector_equals_uninterrupted_collector(
    start_run: Callable[..., SmallRun], env: Any, recurrent: str
) -> None:
    run = start_run(env, recurrent=recurrent, n_steps=10, batch_size=10)
    for _ in range(2):
        run.collect()
    saved = save_and_load(run.collector.state_dict())
    resumed = start_run(env, recurrent=recurrent, n_steps=10, batch_size=10)
    assert resumed.collector.load_state_dict(saved) == {}
    resumed.iteration = run.iteration
    for _ in range(2):
        assert_identical(clone_fields(run.collect()), clone_fields(resumed.collect()))
    assert list(run.collector.stats.recent_returns) == list(resumed.collector.stats.recent_returns)
    assert list(run.collector.stats.recent_lengths) == list(resumed.collector.stats.recent_lengths)
    assert run.collector.stats.episodes == resumed.collector.stats.episodes
    for index in range(2):
        assert np.array_equal(
            run.collector.boundary.log.open_episode(index)[0], resumed.collector.boundary.log.open_episode(index)[0]
        )


def test_nondeterministic_env_starts_new_episode_on_resume(
    start_run: Callable[..., SmallRun],
) -> None:
    run = start_run(Nondeterministic, recurrent="gru", n_steps=4, batch_size=4)
    run.collect()
    resumed = start_run(Nondeterministic, recurrent="gru", n_steps=4, batch_size=4)
    assert list(resumed.collector.load_state_dict(save_and_load(run.collector.state_dict()))) == [0, 1]

    assert resumed.envs.block.episode.tolist() == [1, 1]
    assert len(resumed.collector.boundary.log.open_episode(0)[0]) == 0
    resumed.collect()
    assert resumed.rollout.starts[0].all()
    assert len(resumed.collector.boundary.log.open_episode(0)[0]) == 4
