"""Environments that fail where they are told to, and say exactly where they are and what was done to them."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any, Literal

import gymnasium
import numpy as np
from gymnasium import spaces
from identity_envs import SayTheAction
from small_envs import counting_length, counting_terminates

Break = Literal["raise", "nan reward", "nan observation", "exit", "slow"]
Place = tuple[int, int, int]  # seed of the episode, step in it, action that led there (−1: none)
IN_RESET = -1
LONGEST = 5
ACTIONS = 97


class EchoReals(gymnasium.Env):
    """Its observation is its episode, its step and the real that led there, which is also its reward.

    Every third episode or so raises in its fourth step; the others are cut off after nine.
    """

    observation_space = spaces.Box(-np.inf, np.inf, (3,), np.float32)
    action_space = spaces.Box(-1, 1, (1,), np.float32)

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[np.ndarray, dict]:
        self._episode, self._step = (seed or 1) % 1000, 0
        return np.array([self._episode, 0, 0], np.float32), {}

    def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool, bool, dict]:
        self._step += 1
        if self._step == 4 and self._episode % 3 == 0:
            raise RuntimeError("as planned")
        seen = np.array([self._episode, self._step, action[0]], np.float32)
        return seen, float(action[0]), False, self._step == 9, {}


class Echo(gymnasium.Env):
    """Its observation is its place, its reward (`echo_reward`) the step, the episode and the action it got; all exact.

    `breaks` says in which step of the episode with which seed it fails, and how; IN_RESET: before the first one.
    """

    observation_space = spaces.Box(0, 1, (5,), np.float32)
    action_space = spaces.Discrete(ACTIONS)

    def __init__(self, breaks: dict[tuple[int, int], Break] | None = None) -> None:
        self._breaks = breaks or {}

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[np.ndarray, dict]:
        self._seed, self._step, self._action = seed if seed is not None else 0, 0, -1
        self._fail(IN_RESET)
        return self._observation(), {}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict]:
        how = self._fail(self._step)
        self._step += 1
        self._action = int(action)
        ended = self._step >= counting_length(self._seed, LONGEST)
        terminated = ended and counting_terminates(self._seed)
        reward = np.nan if how == "nan reward" else echo_reward(self._seed, self._step, self._action)
        observation = self._observation() * (np.float32(np.nan) if how == "nan observation" else np.float32(1))
        return observation, reward, terminated, ended and not terminated, {}

    def _fail(self, step: int) -> Break | None:
        how = self._breaks.get((self._seed, step))
        if how == "raise":
            raise ZeroDivisionError("the robot fell over")
        if how == "exit":
            os._exit(3)
        if how == "slow":
            time.sleep(0.3)
        return how

    def _observation(self) -> np.ndarray:
        return echo_observation((self._seed, self._step, self._action))


class SavedEcho(Echo):
    """One whose episodes need no replay."""

    def state_dict(self) -> dict[str, int]:
        return {"seed": self._seed, "step": self._step, "action": self._action}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._seed, self._step, self._action = state["seed"], state["step"], state["action"]


def echo_observation(place: Place) -> np.ndarray:
    """Five numbers between 0 and 1 that tell a place."""
    seed, step, action = place
    parts = [(seed >> 20) / 2048, (seed >> 10) % 1024 / 1024, seed % 1024 / 1024, step / 64, (action + 1) / 128]
    return np.array(parts, np.float32)


def echo_place(observation: np.ndarray) -> Place:
    """The place that such numbers tell."""
    high, middle, low, step, action = (observation * np.array([2048, 1024, 1024, 64, 128])).astype(int).tolist()
    return (high << 20) + (middle << 10) + low, step, action - 1


def echo_reward(seed: int, step: int, action: int) -> float:
    """For the step that led to `step`: 7 bits of action, 6 of step, 11 of seed."""
    return action + step / 64 + seed % 2048 / 131072


class Once(gymnasium.Env):
    """Rewards action 1; does `how` in the step after `after` whole ones, if its first episode was the one of `seed`.

    So it is one environment of a run that fails, and no more after it was made again. Episodes are cut off after 40
    steps.
    """

    observation_space = spaces.Box(-np.inf, np.inf, (2,), np.float32)
    action_space = spaces.Discrete(2)

    def __init__(self, how: str, after: int, seed: int) -> None:
        self._how, self._after, self._seed = how, after, seed
        self._first_seed: int | None = None
        self._taken = 0

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[np.ndarray, dict]:
        super().reset(seed=seed)
        self._first_seed = self._first_seed if self._taken else seed
        self._steps = 0
        return self._observation(), {}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict]:
        how = self._how if self._first_seed == self._seed and self._taken == self._after else "well"
        if how == "raise":
            raise ZeroDivisionError("the robot fell over")
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "hang":
            time.sleep(600)
        self._taken += 1
        self._steps += 1
        reward = np.nan if how == "nan reward" else float(action == 1)
        observation = self._observation() * np.float32(np.nan if how == "nan observation" else 1)
        return observation, reward, False, self._steps == 40, {}

    def _observation(self) -> np.ndarray:
        return np.array([self._steps / 40, self.np_random.normal()], np.float32)


class Broken(gymnasium.Env):
    """A walk whose steps after the third of an episode fail as long as there is a file `broken`."""

    observation_space = spaces.Box(-np.inf, np.inf, (2,), np.float32)
    action_space = spaces.Discrete(3, start=-1)

    def __init__(self, broken: str) -> None:
        self._broken = Path(broken)

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[np.ndarray, dict]:
        super().reset(seed=seed)
        self._where, self._steps = self.np_random.normal(), 0
        return self._observation(), {}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict]:
        if self._steps == 3 and self._broken.exists():
            raise OSError("the cable is loose")
        self._where += float(action) + self.np_random.normal()
        self._steps += 1
        return self._observation(), -abs(self._where), abs(self._where) > 6, self._steps == 30, {}

    def _observation(self) -> np.ndarray:
        return np.array([self._where, self._steps / 30], np.float32)


class Trial(SayTheAction):
    """A choice of five to be learned, in which one step in `odds` fails, drawn from the episode's seed.

    A fault is an exception or a number that is none; or, for each file `kill-*` or `hang-*` in `folder`, which it takes
    away, the end of the process or a step without one. With a file `calm` there, nothing happens.
    """

    def __init__(self, folder: str, odds: int) -> None:
        super().__init__(spaces.Discrete(5))
        self._folder, self._odds = Path(folder), odds
        self._taken = 0

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict]:
        self._taken += 1
        fails = self.np_random.integers(self._odds) == 0
        if not fails or (self._folder / "calm").exists():
            return super().step(action)
        if self._took("kill"):
            os._exit(3)
        if self._took("hang"):
            time.sleep(600)
        if self._taken <= 8 or self.np_random.random() < 0.5:  # so early, what is not finite is the user's mistake
            raise ZeroDivisionError("the robot fell over")
        observation, reward, *rest = super().step(action)
        if self.np_random.random() < 0.5:
            return observation, np.nan, *rest
        return observation * np.float32(np.nan), reward, *rest

    def _took(self, what: str) -> bool:
        for file in self._folder.glob(f"{what}-*"):
            try:
                file.unlink()
            except FileNotFoundError:  # another one took it
                continue
            return True
        return False
