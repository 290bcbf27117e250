"""Small environments, most of them with rewards and observations that can be computed in advance."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from unidle.envs.pool.slot import episode_seed


class Counting(gymnasium.Env):
    """Observes [episode seed, step]; the seed is a hash of run seed, environment and episode.

    The reward is `counting_reward`. Both are exact, and nothing depends on the action.
    """

    observation_space = spaces.Box(0, 2**31 - 1, (2,), np.int64)
    action_space = spaces.Discrete(3)

    def __init__(self, longest: int = 7) -> None:
        self._longest = longest

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[np.ndarray, dict]:
        super().reset(seed=seed)
        self._seed, self._step = seed if seed is not None else 1, 0
        return self._observation(), {}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict]:
        self._step += 1
        ended = self._step >= counting_length(self._seed, self._longest)
        terminated = ended and counting_terminates(self._seed)
        return self._observation(), counting_reward(self._seed, self._step), terminated, ended and not terminated, {}

    def _observation(self) -> np.ndarray:
        return np.array([self._seed, self._step], np.int64)


def counting_length(seed: int, longest: int = 7) -> int:
    """Length of the episode with this seed."""
    return 1 + seed % longest


def counting_terminates(seed: int) -> bool:
    """Whether that episode is terminated rather than truncated."""
    return seed // 7 % 2 == 0


def counting_reward(seed: int, step: int) -> float:
    """Reward of a step: 12 bits of the seed as the integer part, the step as the fraction."""
    return seed % 4096 + step / 4096


def counting_steps(run_seed: int, env: int, steps: int, longest: int = 7) -> list[dict[str, Any]]:
    """Expected first `steps` steps of environment `env` of a run, one dict each."""
    records: list[dict[str, Any]] = []
    episode = 0
    while len(records) < steps:
        seed = episode_seed(run_seed, env, episode)
        length = counting_length(seed, longest)
        for step in range(1, length + 1):
            last = step == length
            records.append(
                {
                    "observation": (seed, step - 1),
                    "start": step == 1,
                    "reward": counting_reward(seed, step),
                    "terminated": last and counting_terminates(seed),
                    "truncated": last and not counting_terminates(seed),
                    "next": (seed, step),
                }
            )
        episode += 1
    return records[:steps]


class Drift(gymnasium.Env):
    """A point moved by a Box action; episodes are truncated after `limit` steps and never terminate."""

    observation_space = spaces.Box(-np.inf, np.inf, (3,), np.float32)
    action_space = spaces.Box(-2.0, 4.0, (2,), np.float32)

    def __init__(self, limit: int = 5) -> None:
        self._limit = limit

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[np.ndarray, dict]:
        super().reset(seed=seed)
        self._point = self.np_random.normal(size=3).astype(np.float32)
        self._steps = 0
        return self._point.copy(), {}

    def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool, bool, dict]:
        self._point = self._point + 0.1 * np.array([*action, action.sum()], np.float32)
        self._steps += 1
        return self._point.copy(), float(-np.abs(self._point).sum()), False, self._steps >= self._limit, {}


class Nondeterministic(gymnasium.Env):
    """Different in every run, regardless of the seed."""

    observation_space = spaces.Box(-np.inf, np.inf, (1,), np.float32)
    action_space = spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[np.ndarray, dict]:
        super().reset(seed=seed)
        self._random = np.random.default_rng()
        return self._random.normal(size=1).astype(np.float32), {}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict]:
        return self._random.normal(size=1).astype(np.float32), 1.0, False, False, {}


class RandomLength(gymnasium.Env):
    """Episodes of 2 to 41 steps, drawn from the seed, with a reward of 1 per step."""

    observation_space = spaces.Box(-1, 1, (1,), np.float32)
    action_space = spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[np.ndarray, dict]:
        super().reset(seed=seed)
        self._left = int(self.np_random.integers(2, 42))
        return np.zeros(1, np.float32), {}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict]:
        self._left -= 1
        return np.zeros(1, np.float32), 1.0, self._left == 0, False, {}


class MaskedMultiDiscrete(gymnasium.Env):
    """Two discrete actions of different sizes with a random mask that changes every step."""

    observation_space = spaces.Box(-np.inf, np.inf, (2,), np.float32)
    action_space = spaces.MultiDiscrete([3, 5])

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[np.ndarray, dict]:
        super().reset(seed=seed)
        return self._outcome()

    def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool, bool, dict]:
        if not (self._mask[action[0]] and self._mask[3 + action[1]]):
            raise ValueError(f"action {action} was not allowed by {self._mask}")
        observation, info = self._outcome()
        return observation, float(action.sum()), bool(self.np_random.random() < 0.1), False, info

    def _outcome(self) -> tuple[np.ndarray, dict]:
        self._mask = self.np_random.integers(0, 2, 8).astype(np.int8)
        self._mask[self.np_random.integers(3)] = self._mask[3 + self.np_random.integers(5)] = 1
        return self.np_random.normal(size=2).astype(np.float32), {"action_mask": self._mask.copy()}


def short_cartpole() -> gymnasium.Env:
    """CartPole truncated after 12 steps, so that a short rollout has terminated and truncated episodes."""
    return gymnasium.make("CartPole-v1", max_episode_steps=12)
