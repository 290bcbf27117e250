"""Evaluation episodes, compared with a single environment stepped by hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from small_envs import Counting, Drift, RandomLength, counting_steps, short_cartpole
from small_runs import SmallRun, small_run

import unidle
from unidle.config import Run
from unidle.engine.evaluate.play import FIRST_EVALUATION_ENV, Evaluation, Share, Stopped, longest_episode, play
from unidle.envs.make import env_maker
from unidle.envs.pool.serial import SerialEnvs
from unidle.envs.pool.slot import episode_seed
from unidle.envs.probe import probe


def evaluation_envs(run: SmallRun, n_envs: int) -> SerialEnvs:
    return SerialEnvs(run.maker, run.envs.env_spec, n_envs, run.seed, FIRST_EVALUATION_ENV)


def play_by_hand(run: SmallRun, index: int, episode: int) -> tuple[float, int]:
    """Return and length of one episode with deterministic actions."""
    env_spec, policy = run.envs.env_spec, run.policy
    env = run.maker()
    observation, _ = env.reset(seed=episode_seed(run.seed, FIRST_EVALUATION_ENV + index, episode))
    state = torch.zeros(1, policy.state_size)
    total, length, ended = 0.0, 0, False
    while not ended:
        packed = torch.from_numpy(env_spec.obs_layout.pack(observation)).unsqueeze(0)
        with torch.no_grad():
            params, after = policy.act(packed, state)
            action = policy.distribution.to_env(policy.distribution.mode(params))
        state = state if after is None else after
        observation, reward, terminated, truncated, _ = env.step(env_spec.action_layout.decode(action[0].numpy()))
        total, length, ended = total + float(reward), length + 1, terminated or truncated
    env.close()
    return total, length


@pytest.mark.parametrize("recurrent", ["none", "gru", "lstm"])
@pytest.mark.parametrize("env", [short_cartpole, Drift, RandomLength])
def test_evaluation_matches_episodes_played_by_hand(env: Any, recurrent: str) -> None:
    run = small_run(env, recurrent=recurrent, normalize_obs=True)
    run.collect()
    run.learn()
    result = play(run.policy, evaluation_envs(run, 3), 7)
    # 7 episodes on 3 environments: 3, 2 and 2.
    expected = [play_by_hand(run, index, episode) for index, quota in enumerate((3, 2, 2)) for episode in range(quota)]
    assert result.lengths == [length for _, length in expected]
    assert result.returns == pytest.approx([total for total, _ in expected], rel=1e-5)
    assert result.episodes == 7


@pytest.mark.parametrize("recurrent", ["none", "gru"])
def test_shares_played_separately_equal_whole_evaluation(recurrent: str) -> None:
    run = small_run(Drift, recurrent=recurrent)
    run.collect()
    run.learn()
    whole = play(run.policy, evaluation_envs(run, 5), 13)
    env_spec, parts = run.envs.env_spec, []
    for first, count in ((0, 2), (2, 1), (3, 2)):
        envs = SerialEnvs(run.maker, env_spec, count, run.seed, FIRST_EVALUATION_ENV + first)
        parts.append(play(run.policy, envs, 13, share=Share(first, 5)))
    assert Evaluation.merge(parts) == whole


@pytest.mark.parametrize("without_success", [0, 1])
def test_success_is_dropped_unless_all_shares_report_it(without_success: int) -> None:
    parts = [Evaluation([1.0, 2.0], [5, 5], [True, False], [0, 1]), Evaluation([3.0], [5], [True], [2])]
    assert Evaluation.merge(parts).success == pytest.approx(2 / 3)
    # A share reports no success if one of its episodes was cut off before it reported any.
    parts[without_success] = replace(parts[without_success], successes=[])
    whole = Evaluation.merge(parts)
    assert (whole.returns, whole.tasks, whole.successes) == ([1.0, 2.0, 3.0], [0, 1, 2], [])
    assert not any("success" in name for name in whole.metrics())


def test_evaluation_does_not_favour_short_episodes() -> None:
    # Lengths are uniform on 2 to 41. Taking the first 40 episodes that end would favour short ones.
    run = small_run(RandomLength)
    n_envs, episodes = 20, 40
    result = play(run.policy, evaluation_envs(run, n_envs), episodes)
    seeds = [episode_seed(run.seed, FIRST_EVALUATION_ENV + index, e) for index in range(n_envs) for e in range(2)]
    lengths = [int(np.random.default_rng(seed).integers(2, 42)) for seed in seeds]
    assert result.lengths == lengths
    assert result.returns == lengths
    assert result.mean_length == pytest.approx(np.mean(lengths))
    assert max(lengths) > 10 * min(lengths)


@pytest.mark.parametrize(("episodes", "n_envs"), [(1, 4), (4, 4), (5, 4), (9, 1)])
def test_evaluation_plays_exactly_the_requested_episodes(episodes: int, n_envs: int) -> None:
    run = small_run(Counting)
    result = play(run.policy, evaluation_envs(run, n_envs), episodes)
    expected: list[tuple[float, int]] = []
    for index in range(n_envs):
        quota = episodes // n_envs + (index < episodes % n_envs)
        total = 0.0
        for record in counting_steps(run.seed, FIRST_EVALUATION_ENV + index, 100):
            total += record["reward"]
            if quota and (record["terminated"] or record["truncated"]):
                expected.append((total, record["next"][1]))
                quota, total = quota - 1, 0.0
    assert list(zip(result.returns, result.lengths)) == expected
    assert result.episodes == episodes


def test_mean_and_std_are_over_all_episodes() -> None:
    result = Evaluation([1.0, 2.0, 6.0], [10, 20, 60])
    assert result.mean_return == 3.0
    assert result.std_return == pytest.approx((14 / 3) ** 0.5)  # ((−2)² + (−1)² + 3²) / 3
    assert result.mean_length == 30.0


def test_evaluation_is_repeatable_and_sampling_depends_on_seed() -> None:
    run = small_run("Pendulum-v1")
    envs = evaluation_envs(run, 2)
    assert play(run.policy, envs, 2) == play(run.policy, envs, 2)
    sampled = [play(run.policy, envs, 2, deterministic=False, seed=seed).returns for seed in (0, 0, 1)]
    assert sampled[0] == sampled[1]
    assert sampled[0] != sampled[2]
    assert sampled[0] != play(run.policy, envs, 2).returns


@pytest.mark.parametrize("recurrent", ["none", "lstm"])
def test_evaluation_leaves_training_unchanged(recurrent: str) -> None:
    runs = [small_run(short_cartpole, recurrent=recurrent, normalize_obs=True, normalize_reward=True) for _ in range(2)]
    for run in runs:
        for _ in range(3):
            run.collect()
            run.learn()
            if run is runs[1]:
                before = torch.get_rng_state(), np.random.get_state()[1].copy()  # noqa: NPY002
                play(run.policy, evaluation_envs(run, 3), 5, deterministic=run.iteration == 2)
                assert torch.equal(torch.get_rng_state(), before[0])
                assert np.array_equal(np.random.get_state()[1], before[1])  # noqa: NPY002
    left, right = (run.policy.state_dict() for run in runs)
    for name in left:
        assert torch.equal(left[name], right[name]), name
    assert torch.equal(runs[0].rollout.obs, runs[1].rollout.obs)
    assert torch.equal(runs[0].rollout.states, runs[1].rollout.states)


def test_evaluation_and_training_seeds_never_overlap() -> None:
    training = {episode_seed(0, env, episode) for env in range(64) for episode in range(64)}
    evaluation = {episode_seed(0, FIRST_EVALUATION_ENV + env, episode) for env in range(64) for episode in range(64)}
    assert not training & evaluation


class Endless(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(-1, 1, (1,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[np.ndarray, dict]:
        return np.zeros(1, np.float32), {}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict]:
        return np.zeros(1, np.float32), 0.5, False, False, {}


def test_endless_episode_is_cut_off_and_counted() -> None:
    run = small_run(Endless)
    result = play(run.policy, run.envs, 3, max_steps=40)
    assert result.lengths == [40] * 3
    assert result.returns == [20.0] * 3
    assert result.metrics()["eval/cut_off"] == 3


@pytest.mark.parametrize("recurrent", ["none", "gru"])
def test_episode_after_one_that_was_cut_off_starts_from_its_own_seed(recurrent: str) -> None:
    run = small_run(RandomLength, recurrent=recurrent)
    expected = [play_by_hand(run, env, episode) for env, quota in enumerate((3, 2, 2)) for episode in range(quota)]
    lengths = [length for _, length in expected]
    limit = sorted(lengths)[len(lengths) // 2]
    result = play(run.policy, evaluation_envs(run, 3), 7, max_steps=limit)
    assert result.lengths == [min(length, limit) for length in lengths]
    whole = [index for index, length in enumerate(lengths) if length < limit]
    assert [result.returns[index] for index in whole] == pytest.approx([expected[index][0] for index in whole])
    assert 0 < result.cut_off < 7


@pytest.mark.parametrize(
    ("has_time_limit", "settings", "steps"),
    [
        (False, {}, 10_000),
        (False, {"eval_episodes": 200}, 1000),
        (False, {"eval_every": 20_000}, 2000),
        (False, {"timesteps": 10**9}, 100_000),
        (True, {}, 100_000),
        (True, {"eval_max_steps": 7}, 7),
    ],
)
def test_without_time_limit_evaluation_takes_no_more_steps_than_training(
    has_time_limit: bool, settings: dict[str, Any], steps: int
) -> None:
    env_spec = replace(small_run(Endless).envs.env_spec, has_time_limit=has_time_limit)
    assert longest_episode(Run(**settings), env_spec) == steps


@pytest.mark.parametrize(
    ("factory", "has_time_limit"),
    [
        (lambda: gymnasium.make("CartPole-v1"), True),
        (lambda: gymnasium.make("CliffWalking-v1"), False),
        (lambda: gymnasium.make("CliffWalking-v1", max_episode_steps=9), True),
        (lambda: gymnasium.wrappers.TimeLimit(Endless(), 9), True),
        (Endless, False),
    ],
)
def test_time_limit_is_known_from_registration_or_wrapper(factory: Any, has_time_limit: bool) -> None:
    assert probe(env_maker(factory)).has_time_limit == has_time_limit


def test_evaluation_of_endless_env_is_cut_off_and_user_is_told_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings: dict[str, Any] = {"preset": "classic", "timesteps": 256, "n_steps": 64, "batch_size": 64, "n_epochs": 1}
    settings |= {"eval_every": 64, "eval_episodes": 2, "runs_dir": str(tmp_path), "quiet": True, "device": "cpu"}
    run = unidle.train(Endless, **settings)
    evaluations = [record for record in run.records if record["kind"] == "evaluation"]
    assert [(record["eval/length_mean"], record["eval/cut_off"]) for record in evaluations] == [(1000, 2)] * 4
    assert capsys.readouterr().err.count("cut off after 1,000 steps") == 1
    assert run.evaluate(1).lengths == [1000]
    run = unidle.train(Endless, eval_max_steps=20, **settings)
    assert run.evaluate(1).lengths == [20]
    assert "cut off" not in capsys.readouterr().err


def test_stop_callback_aborts_evaluation() -> None:
    run = small_run(Endless)
    with pytest.raises(Stopped):
        play(run.policy, run.envs, 3, stop=lambda: True)


def test_evaluation_switches_policy_to_eval_mode_and_back() -> None:
    run = small_run("CartPole-v1")
    modes = []
    run.policy.encoder.register_forward_hook(lambda module, *_: modes.append(module.training))
    run.policy.train()
    play(run.policy, run.envs, 1)
    assert modes
    assert not any(modes)
    assert run.policy.training
