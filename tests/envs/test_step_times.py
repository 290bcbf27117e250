"""The time of a step, as workers are chosen by it: resets count, and one slow first step does not."""

from __future__ import annotations

import time
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

from unidle.envs.make import env_maker
from unidle.envs.probe import probe
from unidle.envs.step_times import StepTimes


def times(steps: list[float], resets: list[float]) -> StepTimes:
    found = StepTimes()
    for seconds in steps:
        found.add_step(seconds)
    for seconds in resets:
        found.add_reset(seconds)
    return found


def test_slow_first_step_does_not_count() -> None:
    found = times([9.0], [])
    assert not found.is_enough
    assert times([9.0, 0.1, 0.2, 0.3], []).per_step() == pytest.approx(0.2)


def test_resets_count_with_their_share_of_the_steps() -> None:
    assert times([0.1] * 10, [2.0, 4.0]).per_step() == pytest.approx(0.1 + 2 * 3.0 / 10)


def test_slow_steps_and_slow_resets_are_timed_a_few_times_only() -> None:
    assert times([5.0, 5.0], []).is_enough
    assert times([0.0, 0.0], [1.5]).is_enough
    assert not times([0.01] * 31, []).is_enough
    assert times([0.01] * 32, []).is_enough


class Slow(gymnasium.Env):
    """Every reset takes `reset` seconds and the first step `first` seconds; episodes have four steps."""

    observation_space = spaces.Box(-1, 1, (1,), np.float32)
    action_space = spaces.Discrete(2)

    def __init__(self, reset: float = 0.0, first: float = 0.0) -> None:
        self._reset, self._first, self._steps = reset, first, 0

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[np.ndarray, dict]:
        time.sleep(self._reset)
        return np.zeros(1, np.float32), {}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict]:
        self._steps += 1
        if self._steps == 1:
            time.sleep(self._first)
        return np.zeros(1, np.float32), 0.0, self._steps % 4 == 0, False, {}


def test_probe_adds_resets_to_the_step_time() -> None:
    assert probe(env_maker(lambda: Slow(reset=0.02))).step_seconds > 0.02 / 4


def test_probe_is_not_misled_by_a_slow_first_step() -> None:
    assert probe(env_maker(lambda: Slow(first=1.2))).step_seconds < 0.1
