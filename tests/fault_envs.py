"""Environments that fail at chosen steps, and whose observations hold the seed, the step and the last action."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any, Literal

import gymnasium
import numpy as np
from gymnasium import spaces
from identity_envs import ActionIdentityEnv
from small_envs import counting_length, counting_terminates

EchoFault = Literal["raise", "nan reward", "nan observation", "exit", "slow"]
EchoState = tuple[int, int, int]  # seed of the episode, step in it, last action (−1: none)
IN_RESET = -1
MAX_EPISODE_LENGTH = 5
ACTIONS = 97


class ContinuousEcho(gymnasium.Env):
    """Observes its episode, its step and the last action, which is also the reward.

    About every third episode raises in its fourth step; the others are truncated after nine.
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
        observation = np.array([self._episode, self._step, action[0]], np.float32)
        return observation, float(action[0]), False, self._step == 9, {}


class Echo(gymnasium.Env):
    """Observes its state; the reward (`echo_reward`) encodes the step, the episode and the action. All are exact.

    `faults` maps (episode seed, step) to the fault that happens there; IN_RESET as the step: in reset.
    """

    observation_space = spaces.Box(0, 1, (5,), np.float32)
    action_space = spaces.Discrete(ACTIONS)

    def __init__(self, faults: dict[tuple[int, int], EchoFault] | None = None) -> None:
        self._faults = faults or {}

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[np.ndarray, dict]:
        self._seed, self._step, self._action = seed if seed is not None else 0, 0, -1
        self._fail(IN_RESET)
        return self._observation(), {}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict]:
        fault = self._fail(self._step)
        self._step += 1
        self._action = int(action)
        ended = self._step >= counting_length(self._seed, MAX_EPISODE_LENGTH)
        terminated = ended and counting_terminates(self._seed)
        reward = np.nan if fault == "nan reward" else echo_reward(self._seed, self._step, self._action)
        observation = self._observation() * (np.float32(np.nan) if fault == "nan observation" else np.float32(1))
        return observation, reward, terminated, ended and not terminated, {}

    def _fail(self, step: int) -> EchoFault | None:
        fault = self._faults.get((self._seed, step))
        if fault == "raise":
            raise ZeroDivisionError("the robot fell over")
        if fault == "exit":
            os._exit(3)
        if fault == "slow":
            time.sleep(0.3)
        return fault

    def _observation(self) -> np.ndarray:
        return echo_observation((self._seed, self._step, self._action))


class CheckpointableEcho(Echo):
    """Restores its state directly instead of replaying actions."""

    def state_dict(self) -> dict[str, int]:
        return {"seed": self._seed, "step": self._step, "action": self._action}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._seed, self._step, self._action = state["seed"], state["step"], state["action"]


def echo_observation(state: EchoState) -> np.ndarray:
    """A state as five numbers between 0 and 1."""
    seed, step, action = state
    parts = [(seed >> 20) / 2048, (seed >> 10) % 1024 / 1024, seed % 1024 / 1024, step / 64, (action + 1) / 128]
    return np.array(parts, np.float32)


def decode_echo(observation: np.ndarray) -> EchoState:
    """The state that an observation encodes."""
    high, middle, low, step, action = (observation * np.array([2048, 1024, 1024, 64, 128])).astype(int).tolist()
    return (high << 20) + (middle << 10) + low, step, action - 1


def echo_reward(seed: int, step: int, action: int) -> float:
    """Reward of the transition to `step`: 7 bits of action, 6 of step, 11 of seed."""
    return action + step / 64 + seed % 2048 / 131072


class FailsOnce(gymnasium.Env):
    """Rewards action 1; `fault` happens after `after` steps if the first episode had seed `seed`.

    So one environment of a run fails, and not again once it is recreated. Episodes are truncated after 40 steps.
    """

    observation_space = spaces.Box(-np.inf, np.inf, (2,), np.float32)
    action_space = spaces.Discrete(2)

    def __init__(self, fault: str, after: int, seed: int) -> None:
        self._how, self._after, self._seed = fault, after, seed
        self._first_seed: int | None = None
        self._taken = 0

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[np.ndarray, dict]:
        super().reset(seed=seed)
        self._first_seed = self._first_seed if self._taken else seed
        self._steps = 0
        return self._observation(), {}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict]:
        fault = self._how if self._first_seed == self._seed and self._taken == self._after else "well"
        if fault == "raise":
            raise ZeroDivisionError("the robot fell over")
        if fault == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if fault == "hang":
            time.sleep(600)
        self._taken += 1
        self._steps += 1
        reward = np.nan if fault == "nan reward" else float(action == 1)
        observation = self._observation() * np.float32(np.nan if fault == "nan observation" else 1)
        return observation, reward, False, self._steps == 40, {}

    def _observation(self) -> np.ndarray:
        return np.array([self._steps / 40, self.np_random.normal()], np.float32)


class FailsWhileFileExists(gymnasium.Env):
    """A random walk whose fourth step of an episode raises while the file `fail_file` exists."""

    observation_space = spaces.Box(-np.inf, np.inf, (2,), np.float32)
    action_space = spaces.Discrete(3, start=-1)

    def __init__(self, fail_file: str) -> None:
        self._fail_file = Path(fail_file)

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[np.ndarray, dict]:
        super().reset(seed=seed)
        self._position, self._steps = self.np_random.normal(), 0
        return self._observation(), {}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict]:
        if self._steps == 3 and self._fail_file.exists():
            raise OSError("the cable is loose")
        self._position += float(action) + self.np_random.normal()
        self._steps += 1
        return self._observation(), -abs(self._position), abs(self._position) > 6, self._steps == 30, {}

    def _observation(self) -> np.ndarray:
        return np.array([self._position, self._steps / 30], np.float32)


class RandomFaults(ActionIdentityEnv):
    """A choice of five to learn, in which one step in `odds` fails, drawn from the episode's seed.

    A fault is an exception or a NaN. For each file `kill-*` or `hang-*` in `folder`, which is then deleted, the process
    exits or the step hangs instead. With a file `no-faults` there, nothing fails.
    """

    def __init__(self, folder: str, odds: int) -> None:
        super().__init__(spaces.Discrete(5))
        self._folder, self._odds = Path(folder), odds
        self._taken = 0

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict]:
        self._taken += 1
        fails = self.np_random.integers(self._odds) == 0
        if not fails or (self._folder / "no-faults").exists():
            return super().step(action)
        if self._consume("kill"):
            os._exit(3)
        if self._consume("hang"):
            time.sleep(600)
        if self._taken <= 8 or self.np_random.random() < 0.5:  # a NaN this early is an error, not a fault
            raise ZeroDivisionError("the robot fell over")
        observation, reward, *rest = super().step(action)
        if self.np_random.random() < 0.5:
            return observation, np.nan, *rest
        return observation * np.float32(np.nan), reward, *rest

    def _consume(self, what: str) -> bool:
        for file in self._folder.glob(f"{what}-*"):
            try:
                file.unlink()
            except FileNotFoundError:  # another process deleted it
                continue
            return True
        return False
