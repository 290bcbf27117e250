"""`check_env`: whether episodes repeat and depend on earlier ones, notes from what was observed, memory, progress."""

from __future__ import annotations

import random
import tracemalloc
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.wrappers import NormalizeReward

from unidle.envs.check_env import check_env
from unidle.envs.make import env_maker


class Line(gymnasium.Env):
    """Episodes of 20 steps; observations and rewards are multiplied by `scale`."""

    action_space = spaces.Discrete(2)

    def __init__(self, scale: float = 1.0, bound: float = np.inf) -> None:
        self.observation_space = spaces.Box(-bound, bound, (2,), np.float32)
        self._scale = scale

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[np.ndarray, dict]:
        super().reset(seed=seed)
        self._at = 0
        return self._observation(), {}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict]:
        self._at += 1
        return self._observation(), self._reward(), False, self._at == 20, {}

    def _observation(self) -> np.ndarray:
        return np.full(2, self._scale * self._at / 20, np.float32)

    def _reward(self) -> float:
        return self._scale * self._at / 20


class NoisyReward(Line):
    def _reward(self) -> float:
        return random.random()


class Older(gymnasium.Wrapper):
    """Rewards grow with the number of episodes."""

    def __init__(self, env: gymnasium.Env, effect: float = 1.0) -> None:
        super().__init__(env)
        self.episodes, self._effect = 0, effect

    def reset(self, **kwargs: Any) -> tuple[Any, dict]:
        self.episodes += 1
        return super().reset(**kwargs)

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict]:
        observation, reward, terminated, truncated, info = super().step(action)
        return observation, float(reward) + self._effect * self.episodes, terminated, truncated, info


def remarks(env: Any, **kwargs: Any) -> list[str]:
    return check_env(env_maker(env, kwargs), steps=80).remarks


def test_exact_env_with_small_values_has_no_notes() -> None:
    assert remarks(Line) == []


def test_reward_that_does_not_repeat_is_reported() -> None:
    (note,) = remarks(NoisyReward)
    assert note.startswith("two episodes from the same seed differ (the reward of step 1 was 0.")


def test_reward_that_depends_on_earlier_episodes_is_reported_with_its_cause() -> None:
    assert remarks(lambda: Older(Line())) == [
        "episodes depend on earlier ones (the reward of step 1 was 1.05, then 6.05): Older.episodes survives reset(); "
        "give its class state_dict() and load_state_dict(), so that runs resume exactly."
    ]


def test_state_that_survives_is_reported_even_if_nothing_depends_on_it_yet() -> None:
    assert remarks(lambda: Older(Line(), effect=0.0)) == [
        "Older.episodes survives reset(); if episodes come to depend on it, give its class state_dict() and "
        "load_state_dict(), so that runs resume exactly."
    ]


def test_saved_state_is_named_as_saved() -> None:
    (note,) = remarks(lambda: NormalizeReward(Line()))
    assert note.endswith(
        "through the state of NormalizeReward, which is saved with a run; each environment has its own, in evaluation "
        "too."
    )


def test_notes_come_from_values_and_not_from_bounds() -> None:
    assert remarks(Line, bound=1e6) == []
    assert remarks(Line, scale=500.0) == [
        "observations reach 500; --normalize-obs is likely to help.",
        "rewards reach 500; for PPO, --normalize-reward is likely to help.",
    ]
    assert remarks(Line, scale=0.0) == ["every reward was 0; learning needs rewards that exploration finds."]


class Pictures(Line):
    def __init__(self) -> None:
        super().__init__()
        self.observation_space = spaces.Box(0, 255, (128, 128, 3), np.uint8)

    def _observation(self) -> np.ndarray:
        return self.np_random.integers(0, 256, (128, 128, 3), np.uint8)


def test_memory_does_not_grow_with_observations() -> None:
    maker = env_maker(Pictures)
    check_env(maker, steps=4)  # imports and caches
    tracemalloc.start()
    try:
        check_env(maker, steps=400)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 40 * Pictures().observation_space.sample().nbytes  # keeping them would take 400


@pytest.mark.parametrize("steps", [20, 100])
def test_progress_counts_all_steps(steps: int) -> None:
    seen: list[tuple[int, int]] = []
    check_env(env_maker(Line), steps, lambda done, total: seen.append((done, total)))
    total = 2 * steps + steps // 4
    assert seen == [(done, total) for done in range(1, total + 1)]
