"""Small environments for commands, which name them `cli_envs:Name`. They import no torch."""

from __future__ import annotations

import time
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from unidle.envs.pool.slot import episode_seed

FAULTS = {
    "dtype": "observation from step() has dtype float64, but its space has float32; return .astype(float32).",
    "outside": "observation from step() is outside its space: 2.0 at index (0,), whose bounds are -1.0 and 1.0; "
    "widen the space or clip the observation.",
    "nan": "observation from step() holds nan at index (0,); observations must be finite.",
    "shape": "observation from step() has shape (2,), but its space has (1,); make them equal.",
    "reward": "step() returned the reward nan; rewards must be finite.",
}


class FaultyEnv(gymnasium.Env):
    """Violates the API in one way, a key of FAULTS, from its third step on."""

    observation_space = spaces.Box(-1, 1, (1,), np.float32)
    action_space = spaces.Discrete(2)

    def __init__(self, fault: str) -> None:
        self._fault, self._steps = fault, 0

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[np.ndarray, dict]:
        return np.zeros(1, np.float32), {}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict]:
        self._steps += 1
        good = np.zeros(1, np.float32)
        if self._steps < 3:
            return good, 0.0, False, False, {}
        wrong = {
            "dtype": np.zeros(1, np.float64),
            "outside": np.full(1, 2.0, np.float32),
            "nan": np.full(1, np.nan, np.float32),
            "shape": np.zeros(2, np.float32),
        }
        return wrong.get(self._fault, good), np.nan if self._fault == "reward" else 0.0, False, False, {}


class LateNanEnv(gymnasium.Env):
    """Returns NaN as its `what` after `steps` steps, but only in environment 1 of a run with seed 0."""

    observation_space = spaces.Box(-1, 1, (2,), np.float32)
    action_space = spaces.Discrete(2)

    def __init__(self, steps: int = 200, what: str = "observation") -> None:
        self._left, self._what, self._returns_nan = steps, what, False

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[np.ndarray, dict]:
        super().reset(seed=seed)
        self._length = 0
        self._returns_nan |= seed == episode_seed(0, 1, 0)
        return self.np_random.uniform(-1, 1, 2).astype(np.float32), {}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict]:
        self._left -= 1
        self._length += 1
        observation, reward = self.np_random.uniform(-1, 1, 2).astype(np.float32), float(action)
        if self._returns_nan and self._left < 0:
            observation[1] = np.nan if self._what == "observation" else observation[1]
            reward = np.nan if self._what == "reward" else reward
        return observation, reward, self._length >= 5, False, {}


class RaisingEnv(LateNanEnv):
    """Raises in the third step of one episode in ten."""

    def __init__(self) -> None:
        super().__init__(steps=10**9)

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict]:
        if self._length == 2 and self.np_random.random() < 0.1:
            raise ConnectionError("the simulator does not answer")
        return super().step(action)


class Choice(gymnasium.Env):
    """The observation says which of two actions earns a reward of 1. Learned in seconds; episodes have ten steps.

    With `pause`, each step takes that many seconds; `answer=1` swaps the actions.
    """

    observation_space = spaces.Box(0, 1, (2,), np.float32)
    action_space = spaces.Discrete(2)

    def __init__(self, pause: float = 0.0, answer: int = 0) -> None:
        self._pause, self._answer = pause, answer

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[np.ndarray, dict]:
        super().reset(seed=seed)
        self._steps = 0
        return self._observation(), {}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict]:
        if self._pause:
            time.sleep(self._pause)
        is_correct = int(action) == (self._correct ^ self._answer)
        self._steps += 1
        return self._observation(), float(is_correct), False, self._steps >= 10, {}

    def _observation(self) -> np.ndarray:
        self._correct = int(self.np_random.integers(2))
        return np.eye(2, dtype=np.float32)[self._correct]


class PrintingEnv(Choice):
    """Prints in reset and step."""

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[np.ndarray, dict]:
        print("reset")
        return super().reset(seed=seed)

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict]:
        print("step", action)
        return super().step(action)


class RenderingEnv(gymnasium.Env):
    """Episodes of 3 to 9 steps, drawn from the seed; frames have odd sizes and get brighter with each step."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": 20}  # noqa: RUF012
    observation_space = spaces.Box(0, 9, (1,), np.float32)
    action_space = spaces.Discrete(2)

    def __init__(self, render_mode: str | None = None) -> None:
        self.render_mode = render_mode

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[np.ndarray, dict]:
        super().reset(seed=seed)
        self._steps, self._last = 0, int(self.np_random.integers(3, 10))
        return np.zeros(1, np.float32), {}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict]:
        self._steps += 1
        return np.full(1, self._steps, np.float32), 1.0, self._steps == self._last, False, {}

    def render(self) -> np.ndarray | None:
        return np.full((33, 49, 3), self._steps * 25, np.uint8) if self.render_mode == "rgb_array" else None


class FixedRenderModeEnv(RenderingEnv):
    """Takes no `render_mode` argument: its render mode is fixed."""

    def __init__(self) -> None:
        super().__init__("rgb_array")


class NonRenderingEnv(RenderingEnv):
    """Renders nothing in any render mode."""

    def render(self) -> None:
        return None


class MaskedRenderingEnv(RenderingEnv):
    """The mask allows one action, alternating; the other one is an error."""

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[np.ndarray, dict]:
        return super().reset(seed=seed)[0], self._mask()

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict]:
        if not self._mask()["action_mask"][action]:
            raise ValueError(f"action {action} was not allowed")
        return *super().step(action)[:4], self._mask()

    def _mask(self) -> dict[str, np.ndarray]:
        return {"action_mask": np.eye(2, dtype=np.int8)[self._steps % 2]}


class SlowEnv(gymnasium.Env):
    """A step takes a few milliseconds."""

    observation_space = spaces.Box(-1, 1, (1,), np.float32)
    action_space = spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[np.ndarray, dict]:
        super().reset(seed=seed)
        return np.zeros(1, np.float32), {}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict]:
        time.sleep(0.002)
        return np.zeros(1, np.float32), 1.0, False, False, {}


class Interrupting(Choice):
    """Ctrl-C after so many episodes that have a seed, as all have in training."""

    def __init__(self, episodes: int) -> None:
        super().__init__()
        self._left = episodes

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[np.ndarray, dict]:
        self._left -= seed is not None
        if self._left < 0:
            raise KeyboardInterrupt
        return super().reset(seed=seed)
