"""Classic control on tensors against Gymnasium, step by step, from the same states and actions."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import pytest
import torch

from unidle.envs.device.device_env import uniform
from unidle.tasks.classic_control import TASKS, Classic

N = 2000
# How far a step may differ from Gymnasium's, which computes in float64 and returns float32: in float64 by the rounding
# of the observation, in float32 by that of the computation. Acrobot at full speed takes large Runge-Kutta steps.
TOLERANCE = {torch.float64: 1e-6, torch.float32: 2e-5}


def tolerance(name: str, dtype: torch.dtype) -> dict[str, float]:
    bound = 1e-3 if "Acrobot" in name and dtype == torch.float32 else TOLERANCE[dtype]
    return {"rtol": bound, "atol": bound}


def gymnasium_env(name: str) -> Any:
    return gymnasium.make(name.removeprefix("unidle/")).unwrapped


def random_states(name: str, rng: np.random.Generator) -> np.ndarray:
    """[N, P] states over a wide range, some of them about to end their episode."""
    ranges = {
        "CartPole": [[-2.5, -3, -0.22, -3], [2.5, 3, 0.22, 3]],
        "Pendulum": [[-10, -8], [10, 8]],
        "Acrobot": [[-3.1, -3.1, -12, -28], [3.1, 3.1, 12, 28]],
        "MountainCar": [[-1.2, -0.07], [0.6, 0.07]],
    }
    low, high = next(bounds for key, bounds in ranges.items() if key in name)
    return rng.uniform(low, high, (N, len(low))).astype(np.float32)


def random_actions(space: gymnasium.Space, rng: np.random.Generator) -> np.ndarray:
    if isinstance(space, gymnasium.spaces.Discrete):
        return rng.integers(0, space.n, (N, 1)).astype(np.float32)
    return rng.uniform(space.low, space.high, (N, 1)).astype(np.float32)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("name", TASKS)
def test_step_matches_gymnasium_from_any_state(name: str, dtype: torch.dtype) -> None:
    rng = np.random.default_rng(0)
    env, reference = Classic(TASKS[name], N, 0), gymnasium_env(name)
    reference.reset(seed=0)
    assert env.observation_space == reference.observation_space
    assert env.action_space == reference.action_space
    physics, actions = random_states(name, rng), random_actions(env.action_space, rng)
    zeros = torch.zeros(N, dtype=torch.long)
    state = {"physics": torch.from_numpy(physics).to(dtype), "episode": zeros, "length": zeros}
    _, step = env.step(state, torch.from_numpy(actions).to(dtype))
    close = tolerance(name, dtype)
    discrete = isinstance(env.action_space, gymnasium.spaces.Discrete)
    ends = 0
    for index in range(N):
        reference.state = physics[index].astype(np.float64)
        if hasattr(reference, "steps_beyond_terminated"):
            reference.steps_beyond_terminated = None
        action = int(actions[index, 0]) if discrete else actions[index]
        observation, reward, terminated, _, _ = reference.step(action)
        torch.testing.assert_close(step.final_observation[index], torch.from_numpy(observation).to(dtype), **close)
        assert step.reward[index].item() == pytest.approx(float(reward), rel=close["rtol"], abs=close["atol"])
        assert bool(step.terminated[index]) == bool(terminated)
        ends += bool(terminated)
    assert ends > 0 or "Pendulum" in name
    assert ends < N


@pytest.mark.parametrize("name", TASKS)
def test_episode_and_time_limit_match_gymnasium(name: str) -> None:
    rng = np.random.default_rng(1)
    env = Classic(TASKS[name], 1, 3)
    spec = gymnasium.spec(name.removeprefix("unidle/"))
    assert env.episode_limit == spec.max_episode_steps
    state, _ = env.begin()
    reference = gymnasium_env(name)
    reference.reset(seed=0)
    reference.state = state["physics"][0].double().numpy()
    close = tolerance(name, torch.float32)
    for length in range(1, env.episode_limit + 1):
        action = random_actions(env.action_space, rng)[:1]
        state, step = env.step(state, torch.from_numpy(action))
        # Each step starts from the same state: accumulated float32 errors would test chaos instead.
        discrete = isinstance(env.action_space, gymnasium.spaces.Discrete)
        observation, _, terminated, _, _ = reference.step(int(action[0, 0]) if discrete else action[0])
        torch.testing.assert_close(step.final_observation[0], torch.from_numpy(observation).float(), **close)
        if terminated or length == env.episode_limit:
            break
        reference.state = state["physics"][0].double().numpy()
    assert bool(step.terminated[0]) == bool(terminated)
    assert bool(step.truncated[0]) == (length == env.episode_limit and not terminated)
    assert state["episode"].item() == 1
    assert state["length"].item() == 0


@pytest.mark.parametrize("name", TASKS)
def test_reset_distribution_matches_gymnasium_and_differs_per_episode(name: str) -> None:
    env, reference = Classic(TASKS[name], N, 0), gymnasium_env(name)
    state, first = env.begin()
    drawn = torch.stack([torch.as_tensor(reference.reset(seed=seed)[0]) for seed in range(1000)]).float()
    torch.testing.assert_close(first.mean(0), drawn.mean(0), rtol=0.05, atol=0.15 * float(drawn.std(0).max()) + 1e-6)
    torch.testing.assert_close(first.std(0), drawn.std(0), rtol=0.1, atol=1e-3)
    limit = {**state, "length": torch.full((N,), env.episode_limit - 1)}
    after, step = env.step(limit, torch.zeros(N, 1))
    assert bool((step.truncated | step.terminated).all())
    assert not torch.equal(step.observation, first)
    assert torch.equal(after["episode"], torch.ones(N, dtype=torch.long))
    assert len(torch.unique(after["physics"], dim=0)) > 0.99 * N


def test_only_finished_episodes_are_reset() -> None:
    env = Classic(TASKS["unidle/CartPole-v1"], 4, 0)
    state, _ = env.begin()
    state["length"] = torch.tensor([499, 0, 499, 7])
    after, step = env.step(state, torch.ones(4, 1))
    assert step.truncated.tolist() == [True, False, True, False]
    assert after["length"].tolist() == [0, 1, 0, 8]
    assert torch.equal(step.observation[1], step.final_observation[1])
    assert not torch.equal(step.observation[0], step.final_observation[0])
    assert (step.observation[0].abs() <= 0.05).all()


def test_random_numbers_are_uniform_and_independent() -> None:
    env, episode = torch.arange(5000), torch.arange(5000) % 7
    numbers = uniform(3, env, episode, 4)
    assert numbers.min() >= 0
    assert numbers.max() < 1
    counts = torch.histc(numbers, 20, 0.0, 1.0)
    assert (counts - 1000).abs().max() < 150  # 5 standard deviations
    correlation = torch.corrcoef(torch.cat((numbers.T, env[None] / 5000.0)))
    assert (correlation - torch.eye(5)).abs().max() < 0.07
    assert torch.equal(numbers, uniform(3, env, episode, 4))
    for other in (uniform(4, env, episode, 4), uniform(3, env + 1, episode, 4), uniform(3, env, episode + 1, 4)):
        assert (numbers == other).float().mean() < 0.01
    assert torch.equal(uniform(3, env, episode, 6)[:, :4], numbers)
    big = uniform(2**62 + 1, env, episode, 1)
    assert (big == uniform(2**62, env, episode, 1)).float().mean() < 0.01
