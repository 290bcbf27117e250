"""Strict overlap: rollout k is collected with the weights of update k − 1, and learning corrects for that."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from small_envs import Counting, Drift, counting_steps, short_cartpole
from small_runs import SmallRun, small_run

import unidle
from unidle.algos.ppo import clipped_policy_loss
from unidle.buffers.advantages import gae
from unidle.engine.checkpoint.checkpoint_file import load_checkpoint
from unidle.engine.checkpoint.run_folder import RunFolder
from unidle.envs.pool.slot import episode_seed


@pytest.fixture
def start_run() -> Iterator[Callable[..., SmallRun]]:
    """Starts small runs with strict overlap; they are closed after the test."""
    runs: list[SmallRun] = []

    def start(*arguments: Any, **settings: Any) -> SmallRun:
        runs.append(small_run(*arguments, overlap="strict", **settings))
        return runs[-1]

    yield start
    for run in runs:
        run.collector.close()


class Gated(gymnasium.Env):
    """Environment 0 of a run with seed 0 does not step until the gate file exists."""

    observation_space = spaces.Box(-1, 1, (1,), np.float32)
    action_space = spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self._is_gated = seed == episode_seed(0, 0, 0)
        return np.zeros(1, np.float32), {}

    def step(self, action: Any) -> Any:
        while self._is_gated and not Path(os.environ["UNIDLE_TEST_GATE"]).exists():
            time.sleep(0.005)
        return np.zeros(1, np.float32), 0.0, False, False, {}


# -- which weights act -------------------------------------------------------------------------------------------------


def clone_weights(policy: torch.nn.Module) -> list[torch.Tensor]:
    return [value.clone() for value in policy.state_dict().values()]


@pytest.mark.parametrize("workers", [0, 2])
def test_rollout_k_is_collected_with_weights_of_update_k_minus_1(
    start_run: Callable[..., SmallRun], workers: int
) -> None:
    run = start_run(Drift, workers=workers, slices=1, n_envs=2, n_steps=16, normalize_obs=True)
    after_update = [clone_weights(run.policy)]  # [k] the weights after k updates
    for k in range(5):
        slot = run.collector.finish()
        expected = after_update[max(0, k - 1)]
        assert all(torch.equal(a, b) for a, b in zip(clone_weights(slot.policy), expected))
        with torch.no_grad():  # every action was sampled with these weights
            for t in range(16):
                by_slot_policy, by_latest_policy = (
                    policy.distribution.sample(policy.act(slot.rollout.obs[t])[0], slot.inference.noise.at((t,)))
                    for policy in (slot.policy, run.policy)
                )
                assert (slot.rollout.actions[t] - by_slot_policy).abs().max() < 1e-5  # NumPy rounds differently
                assert k == 0 or (slot.rollout.actions[t] - by_latest_policy).abs().max() > 1e-4
        learning = run.algo.update_in_parts(slot.rollout, run.shuffle(), slot.behaviour)
        for _ in learning:
            run.collector.poll(0.0)
        run.iteration += 1
        after_update.append(clone_weights(run.policy))
        run.collector.open_rollout()
    assert not torch.equal(after_update[0][0], after_update[-1][0])


def test_collection_runs_at_most_one_rollout_ahead_of_learning(start_run: Callable[..., SmallRun]) -> None:
    run = start_run(Drift, workers=1, n_envs=2, n_steps=4)
    run.collector.finish()
    polls = 0
    while run.collector.poll(1.0):
        polls += 1
    assert polls >= 4
    assert run.collector.schedule.rollout == [2]  # rollout 1 is complete; the weights for rollout 2 do not exist yet
    assert run.collector._slots[1].unfinished == 0


def test_collection_stops_at_end_of_run(start_run: Callable[..., SmallRun]) -> None:
    run = start_run(Drift, workers=1, n_envs=2, n_steps=4)
    run.collector.schedule.n_rollouts = 3
    for _ in range(2):
        run.collector.finish()
        run.collector.open_rollout()
    while run.collector.poll(1.0):
        pass
    assert run.collector.schedule.rollout == [3]  # rollout 2 is complete; rollout 3 is open but stays empty
    assert run.collector.schedule.newest == 3


def test_slow_slice_does_not_stall_other_slices(
    start_run: Callable[..., SmallRun], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UNIDLE_TEST_GATE", str(tmp_path / "gate"))
    (tmp_path / "gate").touch()  # open for the probe
    run = start_run(Gated, workers=2, n_envs=4, n_steps=6, batch_size=8, slices=2)
    (tmp_path / "gate").unlink()
    deadline = time.monotonic() + 20
    while run.collector.schedule.rollout[2:] != [2, 2]:  # the other worker's slices fill both open rollouts
        run.collector.poll()
        assert time.monotonic() < deadline
    assert run.collector.schedule.rollout[0] == 0
    (tmp_path / "gate").touch()
    run.collector.finish()
    assert run.collector.schedule.rollout[0] >= 1


@pytest.mark.parametrize("workers", [0, 2])
def test_transitions_are_stored_correctly_while_two_rollouts_are_open(
    start_run: Callable[..., SmallRun], workers: int
) -> None:
    steps, n_envs, seed = 11, 4, 42
    run = start_run(Counting, n_steps=steps, n_envs=n_envs, batch_size=11, seed=seed, workers=workers, slices=2)
    expected = [counting_steps(seed, env, 5 * steps + 1) for env in range(n_envs)]
    for first in range(0, 4 * steps, steps):
        rollout = run.collector.finish().rollout
        for _ in range(3):
            run.collector.poll(0.01)  # fills the other slot
        for env in range(n_envs):
            records = expected[env][first : first + steps + 1]
            obs = rollout.obs[:, env].contiguous().view(torch.int64).tolist()
            assert [tuple(row) for row in obs] == [record["observation"] for record in records]
            assert rollout.starts[:, env].tolist() == [record["start"] for record in records]
            assert rollout.rewards[:, env].tolist() == [record["reward"] for record in records[:-1]]
            assert rollout.truncated[:, env].tolist() == [record["truncated"] for record in records[:-1]]
        run.collector.open_rollout()


# -- correction for stale data -----------------------------------------------------------------------------------------


def test_importance_weights_are_truncated_ratio_of_learner_to_behaviour_policy(
    start_run: Callable[..., SmallRun],
) -> None:
    run = start_run(Drift)
    slot = run.collector.finish()
    assert torch.equal(run.algo.prepare(slot.rollout, slot.behaviour).weights, torch.ones(32, 1))
    assert run.algo.prepare(slot.rollout).weights is None
    with torch.no_grad():
        run.policy.log_std.add_(0.8)
    weights = run.algo.prepare(slot.rollout, slot.behaviour).weights
    log_probs = []
    for policy in (run.policy, slot.policy):
        params, _ = policy(slot.rollout.obs[:-1].reshape(32, 1, -1))
        log_probs.append(policy.distribution.log_prob_and_entropy(params, slot.rollout.actions.reshape(32, 1, -1))[0])
    ratio = (log_probs[0] - log_probs[1]).exp()
    torch.testing.assert_close(weights, ratio.clamp(max=2.0), rtol=1e-5, atol=1e-6)
    assert (ratio > 2).any()
    assert (ratio < 1).any()


def test_advantages_of_stale_steps_use_importance_weights(start_run: Callable[..., SmallRun]) -> None:
    run = start_run(Drift, n_steps=4, batch_size=8)
    slot = run.collector.finish()
    with torch.no_grad():
        run.policy.log_std.add_(0.8)
    stale, fresh = run.algo.prepare(slot.rollout, slot.behaviour), run.algo.prepare(slot.rollout)
    rollout, recipe = slot.rollout, run.algo.recipe
    assert not rollout.truncated.any()
    with torch.no_grad():
        values = run.policy(rollout.obs.flatten(0, 1).unsqueeze(1))[1].view(rollout.obs.shape[:2])
    gae_inputs = rollout.rewards, values, torch.zeros_like(rollout.rewards), rollout.terminated, rollout.truncated
    expected, _ = gae(*gae_inputs, recipe.gamma, recipe.gae_lambda, stale.weights.view(rollout.shape))
    torch.testing.assert_close(stale.advantages.view(rollout.shape), expected)
    assert not torch.allclose(stale.advantages, fresh.advantages)


def test_weighted_policy_loss_matches_hand_computed_value() -> None:
    ratio, advantages = torch.tensor([1.5, 0.5, 1.0]), torch.tensor([2.0, -1.0, 3.0])
    weights = torch.tensor([2.0, 0.5, 1.0])
    # min(1.5 · 2, 1.2 · 2) = 2.4;  min(−0.5, −0.8) = −0.8;  3
    loss = clipped_policy_loss(ratio, advantages, torch.tensor(0.2), weights)
    assert loss.item() == pytest.approx(-(2 * 2.4 + 0.5 * -0.8 + 3) / 3)


# -- reproducibility ---------------------------------------------------------------------------------------------------

SMALL: dict[str, Any] = {
    "preset": "classic",
    "overlap": "strict",
    "n_envs": 5,
    "n_steps": 32,
    "batch_size": 32,
    "n_epochs": 2,
    "net_arch": (16,),
    "normalize_obs": True,
    "normalize_reward": True,
    "timesteps": 1600,
    "eval_every": 0,
    "tensorboard": False,
    "quiet": True,
}


def final_weights(path: Path) -> dict[str, torch.Tensor]:
    latest = RunFolder.open(path).latest()
    assert latest is not None
    weights: dict[str, torch.Tensor] = load_checkpoint(latest)["algo"]["policy"]
    return weights


@pytest.mark.parametrize("recurrent", ["none", "gru"])
def test_workers_and_slices_do_not_change_final_weights(recurrent: str, tmp_path: Path) -> None:
    engines: list[dict[str, Any]] = [
        {"subproc": False},
        {"workers": 1, "slices": 3},
        {"workers": 2, "slices": 1},
        {"workers": 3, "slices": 1},
    ]
    weights = []
    for number, engine in enumerate(engines):
        run = unidle.train(
            short_cartpole, runs_dir=str(tmp_path), run_name=str(number), recurrent=recurrent, **SMALL, **engine
        )
        weights.append(final_weights(run.path))
    for other in weights[1:]:
        assert all(torch.equal(weights[0][name], other[name]) for name in other)


def test_strict_overlap_changes_learned_weights(tmp_path: Path) -> None:
    runs = [
        unidle.train(short_cartpole, runs_dir=str(tmp_path), run_name=overlap, **{**SMALL, "overlap": overlap})
        for overlap in ("off", "strict")
    ]
    off, strict = (final_weights(run.path) for run in runs)
    assert any(not torch.equal(off[name], strict[name]) for name in off)
