"""Environments that are solved by repeating or classifying the observation, for every action and observation space."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from unidle.spaces.actions import ActionLayout

_EPISODE_LENGTH = 16


class ActionIdentityEnv(gymnasium.Env):
    """Observes an action of the space (one-hot if discrete) and rewards repeating it; an exact repetition earns 1."""

    def __init__(self, action_space: spaces.Space) -> None:
        self.action_space = action_space
        self._layout = ActionLayout.of(action_space)
        self._nvec = self._layout.nvec
        size = sum(self._nvec) + self._layout.reals
        self.observation_space = spaces.Box(-10, 10, (size,), np.float32)

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[np.ndarray, dict]:
        super().reset(seed=seed)
        self._steps = 0
        return self._show(), {}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict]:
        assert self.action_space.contains(action), f"{action!r} is outside {self.action_space}"
        given, heads = self._layout.encode(action), self._layout.heads
        right = (given[:heads] == self._target[:heads]).astype(float)
        near = 1 - np.abs(given[heads:] - self._target[heads:])
        self._steps += 1
        over = self._steps == _EPISODE_LENGTH
        return self._show(), float(np.concatenate([right, near]).mean()), False, over, {}

    def _show(self) -> np.ndarray:
        reals = self.np_random.uniform(-0.8, 0.8, self._layout.reals)
        choices = [int(self.np_random.integers(n)) for n in self._nvec]
        self._target = np.concatenate([choices, reals]).astype(np.float32)
        hot = [np.eye(n)[choice] for n, choice in zip(self._nvec, choices)]
        return np.concatenate([*hot, reals]).astype(np.float32)


class ObservationIdentityEnv(gymnasium.Env):
    """Shows one of four observations of the space and rewards its index as the action."""

    action_space = spaces.Discrete(4)

    def __init__(self, observation_space: spaces.Space) -> None:
        self.observation_space = observation_space
        observation_space.seed(3)
        self._shown = [observation_space.sample() for _ in range(4)]

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[Any, dict]:
        super().reset(seed=seed)
        self._steps = 0
        return self._show(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict]:
        reward = float(action == self._target)
        self._steps += 1
        return self._show(), reward, False, self._steps == _EPISODE_LENGTH, {}

    def _show(self) -> Any:
        self._target = int(self.np_random.integers(4))
        return self._shown[self._target]


class CueMemoryEnv(gymnasium.Env):
    """Shows a cue in the first step only and rewards repeating it later; without memory no policy beats 0.5."""

    action_space = spaces.Discrete(2)
    observation_space = spaces.Box(-1, 1, (2,), np.float32)

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[np.ndarray, dict]:
        super().reset(seed=seed)
        self._steps, self._cue = 0, int(self.np_random.integers(2))
        return np.array([2 * self._cue - 1, 0], np.float32), {}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict]:
        self._steps += 1
        ends = self._steps == 4
        reward = float(ends and action == self._cue)
        return np.array([0, self._steps == 3], np.float32), reward, ends, False, {}


class MaskedActionsEnv(gymnasium.Env):
    """Rewards the largest allowed action; the mask is in info or the observation, and any other action raises."""

    def __init__(self, in_observation: bool = False) -> None:
        self._in_observation = in_observation
        obs = spaces.Box(0, 1, (12,), np.float32)
        mask = spaces.MultiBinary(12)
        self.observation_space = spaces.Dict(obs=obs, action_mask=mask) if in_observation else obs
        self.action_space = spaces.MultiDiscrete([6, 6])

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[Any, dict]:
        super().reset(seed=seed)
        self._steps = 0
        return self._show()

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict]:
        heads = self._mask.reshape(2, 6)
        if not (heads[0, action[0]] and heads[1, action[1]]):
            raise ValueError(f"{action} is not allowed by {heads}")
        best = [np.flatnonzero(head).max() for head in heads]
        self._steps += 1
        reward = float(np.mean([a == b for a, b in zip(action, best)]))
        observation, info = self._show()
        return observation, reward, False, self._steps == _EPISODE_LENGTH, info

    def _show(self) -> tuple[Any, dict]:
        self._mask = (self.np_random.random(12) < 0.5).astype(np.int8)
        self._mask[[int(self.np_random.integers(6)), 6 + int(self.np_random.integers(6))]] = 1
        obs = self._mask.astype(np.float32)
        if self._in_observation:
            return {"obs": obs, "action_mask": self._mask.copy()}, {}
        return obs, {"action_mask": self._mask.copy()}
