"""An environment that fails when, and as, its action says; its observation says exactly where it is."""

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
from unidle.envs.spec import EnvSpec, probe


class Do(IntEnum):
    """What an action asks for."""

    STEP = 0
    END = 1  # terminate
    CUT = 2  # truncate
    RAISE = 3
    SHOUT = 4  # raise, with more words than a pipe holds
    END_AND_FAIL_RESET = 5
    NAN_REWARD = 6
    INFINITE_OBSERVATION = 7
    CUT_WITH_NAN = 8  # truncate with a last observation that is not finite
    END_WITH_NAN_REWARD = 9
    END_AND_NAN_RESET = 10
    EXIT = 11  # end the process at once
    HANG = 12
    SLOW = 13  # take 0.4 seconds


class Troubled(gymnasium.Env):
    """Observation: the seed of the episode and the step in it, and a real number that is the step too.

    Files in `folder` make the making fail ("unmakeable"), kill the process instead ("deadly"), or have each reset take
    for ever ("sleepy"), fail ("unresettable") or show something that is not finite ("blind").
    """

    observation_space = spaces.Dict(
        {"at": spaces.Box(0, 2**31, (2,), np.int64), "x": spaces.Box(-np.inf, np.inf, (1,), np.float32)}
    )
    action_space = spaces.Discrete(len(Do))

    def __init__(self, folder: str | None = None) -> None:
        self._folder, self._reset = folder, "well"
        if self._says("unmakeable"):
            raise OSError("no such robot")
        if self._says("deadly"):
            os.kill(os.getpid(), signal.SIGKILL)

    def _says(self, name: str) -> bool:
        return self._folder is not None and (Path(self._folder) / name).exists()

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[dict, dict]:
        if self._says("sleepy"):
            time.sleep(600)
        if self._reset == "fails" or self._says("unresettable"):
            raise RuntimeError("stuck in the mud")
        self._seed, self._steps = seed if seed is not None else 0, 0
        return self._observation(np.nan if self._reset == "nan" or self._says("blind") else 0.0), {}

    def step(self, action: Any) -> tuple[dict, float, bool, bool, dict]:
        match Do(int(action)):
            case Do.RAISE:
                raise ZeroDivisionError("the robot fell over")
            case Do.SHOUT:
                raise ValueError("x" * 3_000_000)
            case Do.EXIT:
                os._exit(3)
            case Do.HANG:
                time.sleep(600)
            case Do.SLOW:
                time.sleep(0.4)
            case Do.END_AND_FAIL_RESET:
                self._reset = "fails"
            case Do.END_AND_NAN_RESET:
                self._reset = "nan"
        self._steps += 1
        x = {Do.INFINITE_OBSERVATION: np.inf, Do.CUT_WITH_NAN: np.nan}.get(action, self._steps)
        reward = np.nan if action in (Do.NAN_REWARD, Do.END_WITH_NAN_REWARD) else reward_of(self._seed, self._steps)
        ends = action in (Do.END, Do.END_AND_FAIL_RESET, Do.END_WITH_NAN_REWARD, Do.END_AND_NAN_RESET)
        return self._observation(x), reward, ends, action in (Do.CUT, Do.CUT_WITH_NAN), {}

    def _observation(self, x: float) -> dict[str, np.ndarray]:
        return {"at": np.array([self._seed, self._steps], np.int64), "x": np.array([x], np.float32)}


def reward_of(seed: int, step: int) -> float:
    """Exact in single precision."""
    return seed % 4096 + step / 1024


class _WellBehaved(Troubled):
    """For the probe, which acts at random."""

    def step(self, action: Any) -> tuple[dict, float, bool, bool, dict]:
        return super().step(Do.STEP)


ENV_SPEC: EnvSpec = probe(env_maker(_WellBehaved))
SEED = 5
CHECKED = 8  # first steps in which what is not finite is still the user's mistake


def place(row: np.ndarray) -> tuple[int, int]:
    """(seed, step) that a row shows."""
    seed, step = ENV_SPEC.obs_layout.unpack(row)["at"]
    return int(seed), int(step)


def at(env: int, episode: int, step: int) -> tuple[int, int]:
    """What `place` must be for that step of that episode of an environment of the run."""
    return episode_seed(SEED, env, episode), step
