"""Small environments, one for each thing an environment may do or do wrong. They import no torch."""

from __future__ import annotations

import copy
import os
import signal
import sys
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces


class Scripted(gymnasium.Env):
    """Returns given values from `reset` and `step`."""

    def __init__(self, observation_space: spaces.Space, reset: Any, step: Any = None, from_step: int = 0) -> None:
        self.observation_space, self.action_space = observation_space, spaces.Discrete(2)
        self._reset, self._step, self._from_step, self._steps = reset, step, from_step, 0

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> Any:
        return self._reset

    def step(self, action: Any) -> Any:
        self._steps += 1
        if self._steps <= self._from_step:
            return self._reset[0], 0.0, False, False, {}
        return self._step


class Walk(gymnasium.Env):
    """A random walk drawn from the episode's seed; observation [position, steps]; `ending` says how episodes end."""

    observation_space = spaces.Box(-np.inf, np.inf, (2,), np.float32)
    action_space = spaces.Discrete(3, start=-1)

    def __init__(self, ending: str = "truncation", length: int = 6) -> None:
        self._ending, self._last = ending, length

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[np.ndarray, dict]:
        super().reset(seed=seed)
        self._position, self._steps = self.np_random.normal(), 0
        return self._observation(), {}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict]:
        self._position += float(action) + self.np_random.normal()
        self._steps += 1
        over = self._steps >= self._last
        terminated, truncated = over and self._ending != "truncation", over and self._ending != "termination"
        return self._observation(), self._position, terminated, truncated, {}

    def _observation(self) -> np.ndarray:
        return np.array([self._position, self._steps], np.float32)


class CheckpointableWalk(Walk):
    """A walk that can save and load its state, with noise that does not depend on the seed."""

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[np.ndarray, dict]:
        super().reset(seed=seed)
        self._position = float(np.random.default_rng().normal())
        return self._observation(), {}

    def state_dict(self) -> dict[str, Any]:
        return {"position": self._position, "steps": self._steps, "rng": self.np_random.bit_generator.state}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._position, self._steps = state["position"], state["steps"]
        self.np_random.bit_generator.state = state["rng"]


class MixedDictEnv(gymnasium.Env):
    """Dict observations and actions with all kinds of spaces, and random episode lengths; all drawn from the seed."""

    observation_space = spaces.Dict(
        {
            "camera": spaces.Box(0, 255, (8, 9, 3), np.uint8),
            "body": spaces.Tuple((spaces.Box(-np.inf, np.inf, (3,), np.float64), spaces.Discrete(5, start=2))),
            "switches": spaces.MultiBinary(3),
            "dials": spaces.MultiDiscrete([[3, 4], [5, 2]]),
        }
    )
    action_space = spaces.Dict({"go": spaces.Discrete(4), "how": spaces.Box(-2.0, 1.0, (2,), np.float32)})

    def __init__(self) -> None:
        self.observation_space = copy.deepcopy(
            self.observation_space
        )  # it samples from it: each instance needs its own

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[dict, dict]:
        super().reset(seed=seed)
        self._effect = 0.0
        self.observation_space.seed(int(self.np_random.integers(2**31)))
        return self._observation(), {}

    def step(self, action: Any) -> tuple[dict, float, bool, bool, dict]:
        self._effect += float(action["go"]) + float(action["how"].sum())
        ending = self.np_random.random()
        return self._observation(), self._effect, bool(ending < 0.05), bool(ending > 0.95), {}

    def _observation(self) -> dict[str, Any]:
        observation = self.observation_space.sample()
        observation["body"][0][0] = self._effect
        return observation


class ImageEnv(gymnasium.Env):
    """Random images, channels last; truncated after 7 steps."""

    observation_space = spaces.Box(0, 255, (12, 10, 3), np.uint8)
    action_space = spaces.Box(-1.0, 1.0, (2,), np.float32)

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[np.ndarray, dict]:
        super().reset(seed=seed)
        self._steps = 0
        return self._image(), {}

    def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool, bool, dict]:
        self._steps += 1
        return self._image(), float(action[0]), False, self._steps >= 7, {}

    def _image(self) -> np.ndarray:
        return self.np_random.integers(0, 256, (12, 10, 3), np.uint8)


class Masked(gymnasium.Env):
    """Allows one action per step, in turn; any other action is an error.

    The mask is in info, or with `in_observation` a key of the observation; `forget` omits it after that many steps.
    """

    action_space = spaces.Discrete(4)

    def __init__(self, in_observation: bool = False, forget: int | None = None, allow: int = 1) -> None:
        self._in_observation, self._forget, self._allow = in_observation, forget, allow
        position = spaces.Box(0, 3, (1,), np.float32)
        self.observation_space: spaces.Space = position
        if in_observation:
            self.observation_space = spaces.Dict({"position": position, "action_mask": spaces.MultiBinary(4)})

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[Any, dict]:
        self._steps = 0
        return self._outcome()

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict]:
        if action != self._steps % 4:
            raise ValueError(f"action {action} was not allowed")
        self._steps += 1
        observation, info = self._outcome()
        return observation, 1.0, False, False, info

    def _outcome(self) -> tuple[Any, dict]:
        mask = np.zeros(4, np.int8)
        mask[self._steps % 4] = self._allow
        position = np.array([self._steps % 4], np.float32)
        if self._in_observation:
            return {"position": position, "action_mask": mask}, {}
        return position, {} if self._forget is not None and self._steps >= self._forget else {"action_mask": mask}


class Failing(Walk):
    """Fails in its third step: by an exception, or by killing its own process."""

    def __init__(self, how: str = "exception") -> None:
        super().__init__(length=1000)
        self._how = how

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict]:
        if self._steps == 2 and self._how == "exception":
            raise ZeroDivisionError("the robot fell over")
        if self._steps == 2 and self._how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        return super().step(action)


class ProcessInfoEnv(gymnasium.Env):
    """Observes the id of its process and whether that process has imported torch."""

    observation_space = spaces.Dict({"pid": spaces.Box(0, 2**31, (1,), np.int64), "has_torch": spaces.Discrete(2)})
    action_space = spaces.Discrete(2)

    def __init__(self, close_folder: str | None = None) -> None:
        self._close_folder = close_folder

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[dict, dict]:
        return self._observation(), {}

    def step(self, action: Any) -> tuple[dict, float, bool, bool, dict]:
        return self._observation(), 0.0, False, False, {}

    def _observation(self) -> dict[str, Any]:
        return {"pid": np.array([os.getpid()], np.int64), "has_torch": int("torch" in sys.modules)}

    def close(self) -> None:
        if self._close_folder:
            (Path(self._close_folder) / str(os.getpid())).touch()
