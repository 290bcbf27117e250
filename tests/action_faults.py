"""An environment whose action says how to fail; its observation holds the episode's seed and the step in it."""

from __future__ import annotations

import os
import signal
import time
from enum import IntEnum
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from unidle.envs.make import env_maker
from unidle.envs.pool.slot import episode_seed
from unidle.envs.probe import probe
from unidle.envs.spec import EnvSpec


class Do(IntEnum):
    """What each action does."""

    STEP = 0
    TERMINATE = 1
    TRUNCATE = 2
    RAISE = 3
    RAISE_LONG_MESSAGE = 4  # longer than a pipe's buffer
    TERMINATE_AND_FAIL_RESET = 5
    NAN_REWARD = 6
    INFINITE_OBSERVATION = 7
    TRUNCATE_WITH_NAN = 8  # truncate with a final observation that is not finite
    TERMINATE_WITH_NAN_REWARD = 9
    TERMINATE_AND_NAN_RESET = 10
    EXIT = 11  # end the process at once
    HANG = 12
    SLOW = 13  # take 0.4 seconds


class ActionFaultEnv(gymnasium.Env):
    """Observation: the episode's seed, the step in it, and the step again as a float.

    Files in `folder` cause faults: "creation fails" and "creation kills" (the process) when an environment is created,
    "reset hangs", "reset fails" and "reset nan" (a NaN in the observation) at each reset.
    """

    observation_space = spaces.Dict(
        {"at": spaces.Box(0, 2**31, (2,), np.int64), "x": spaces.Box(-np.inf, np.inf, (1,), np.float32)}
    )
    action_space = spaces.Discrete(len(Do))

    def __init__(self, folder: str | None = None) -> None:
        self._folder, self._next_reset = folder, "ok"
        if self.has_file("creation fails"):
            raise OSError("no such robot")
        if self.has_file("creation kills"):
            os.kill(os.getpid(), signal.SIGKILL)

    def has_file(self, name: str) -> bool:
        return self._folder is not None and (Path(self._folder) / name).exists()

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[dict, dict]:
        if self.has_file("reset hangs"):
            time.sleep(600)
        if self._next_reset == "fails" or self.has_file("reset fails"):
            raise RuntimeError("stuck in the mud")
        self._seed, self._steps = seed if seed is not None else 0, 0
        return self._observation(np.nan if self._next_reset == "nan" or self.has_file("reset nan") else 0.0), {}

    def step(self, action: Any) -> tuple[dict, float, bool, bool, dict]:
        match Do(int(action)):
            case Do.RAISE:
                raise ZeroDivisionError("the robot fell over")
            case Do.RAISE_LONG_MESSAGE:
                raise ValueError("x" * 3_000_000)
            case Do.EXIT:
                os._exit(3)
            case Do.HANG:
                time.sleep(600)
            case Do.SLOW:
                time.sleep(0.4)
            case Do.TERMINATE_AND_FAIL_RESET:
                self._next_reset = "fails"
            case Do.TERMINATE_AND_NAN_RESET:
                self._next_reset = "nan"
        self._steps += 1
        x = {Do.INFINITE_OBSERVATION: np.inf, Do.TRUNCATE_WITH_NAN: np.nan}.get(action, self._steps)
        reward = (
            np.nan if action in (Do.NAN_REWARD, Do.TERMINATE_WITH_NAN_REWARD) else reward_of(self._seed, self._steps)
        )
        ends = action in (
            Do.TERMINATE,
            Do.TERMINATE_AND_FAIL_RESET,
            Do.TERMINATE_WITH_NAN_REWARD,
            Do.TERMINATE_AND_NAN_RESET,
        )
        return self._observation(x), reward, ends, action in (Do.TRUNCATE, Do.TRUNCATE_WITH_NAN), {}

    def _observation(self, x: float) -> dict[str, np.ndarray]:
        return {"at": np.array([self._seed, self._steps], np.int64), "x": np.array([x], np.float32)}


def reward_of(seed: int, step: int) -> float:
    """Exact in float32."""
    return seed % 4096 + step / 1024


class _NoFaults(ActionFaultEnv):
    """For the probe, which samples random actions."""

    def step(self, action: Any) -> tuple[dict, float, bool, bool, dict]:
        return super().step(Do.STEP)


ENV_SPEC: EnvSpec = probe(env_maker(_NoFaults))
SEED = 5
CHECKED_STEPS = 8  # NaN in an environment's first steps is an error, not a fault


def position(obs: np.ndarray) -> tuple[int, int]:
    """(seed, step) in a packed observation."""
    seed, step = ENV_SPEC.obs_layout.unpack(obs)["at"]
    return int(seed), int(step)


def expected_position(env: int, episode: int, step: int) -> tuple[int, int]:
    """The `position` at a step of an episode of environment `env`."""
    return episode_seed(SEED, env, episode), step
