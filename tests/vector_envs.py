"""Vector environments of each kind that unidle accepts, around the same small environments. They import no torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv
from gymnasium.wrappers.vector import RecordEpisodeStatistics
from toy_envs import ImageEnv, Masked, MixedDictEnv, Walk

from unidle import ProcessVectorEnv

N = 4


class RandomEpisodes(Walk):
    """A walk with a random length, ending and action mask in every episode."""

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[np.ndarray, dict]:
        observation, _ = super().reset(seed=seed)
        self._last = int(self.np_random.integers(1, 9))
        self._ending = str(self.np_random.choice(["termination", "truncation", "both"]))
        return observation, self._info()

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict]:
        assert self._mask[action + 1], "the action is masked"
        return *super().step(action)[:4], self._info()

    def _info(self) -> dict[str, np.ndarray]:
        self._mask = self.np_random.integers(0, 2, 3).astype(np.int8)
        self._mask[self.np_random.integers(3)] = 1
        return {"action_mask": self._mask.copy()}


class FlatDict(gymnasium.Env):
    """A flat Dict observation, as Stable-Baselines3 supports it; episodes end at random."""

    observation_space = spaces.Dict(
        {"picture": spaces.Box(0, 255, (9, 8, 1), np.uint8), "speed": spaces.Box(-np.inf, np.inf, (2,), np.float32)}
    )
    action_space = spaces.MultiDiscrete([3, 2])

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[dict, dict]:
        super().reset(seed=seed)
        self._effect = np.zeros(2, np.float32)
        return self._observation(), {}

    def step(self, action: Any) -> tuple[dict, float, bool, bool, dict]:
        self._effect += action
        ending = self.np_random.random()
        return self._observation(), float(self._effect.sum()), bool(ending < 0.1), bool(ending > 0.8), {}

    def _observation(self) -> dict[str, Any]:
        return {"picture": self.np_random.integers(0, 256, (9, 8, 1), np.uint8), "speed": self._effect.copy()}


def gymnasium_factory(kind: type, mode: AutoresetMode, wrap: Any = lambda env: env, **kwargs: Any) -> Any:
    return lambda env: wrap(kind([env] * N, autoreset_mode=mode, **kwargs))


def sb3_factory(kind: str, **kwargs: Any) -> Any:
    def make(env: Callable[[], gymnasium.Env]) -> Any:
        from stable_baselines3.common import vec_env

        return getattr(vec_env, kind)([env] * N, **kwargs)

    return make


SAME, NEXT, DISABLED = AutoresetMode.SAME_STEP, AutoresetMode.NEXT_STEP, AutoresetMode.DISABLED
VECTOR_ENVS: dict[str, Callable[[Callable[[], gymnasium.Env]], Any]] = {
    "sync, same step": gymnasium_factory(SyncVectorEnv, SAME),
    "sync, next step": gymnasium_factory(SyncVectorEnv, NEXT),
    "sync, disabled": gymnasium_factory(SyncVectorEnv, DISABLED),
    "sync, next step, no copy": gymnasium_factory(SyncVectorEnv, NEXT, copy=False),
    "sync, next step, wrapped": gymnasium_factory(SyncVectorEnv, NEXT, RecordEpisodeStatistics),
    "async, same step": gymnasium_factory(AsyncVectorEnv, SAME),
    "async, next step": gymnasium_factory(AsyncVectorEnv, NEXT),
    "async, disabled, pipes": gymnasium_factory(AsyncVectorEnv, DISABLED, shared_memory=False),
    "unidle's processes, next step": gymnasium_factory(ProcessVectorEnv, NEXT, workers=2),
    "unidle's processes, same step": gymnasium_factory(ProcessVectorEnv, SAME, workers=2),
    "sb3, one process": sb3_factory("DummyVecEnv"),
    "sb3, processes": sb3_factory("SubprocVecEnv", start_method="fork"),  # other methods import torch N times
}
TASKS: dict[str, Callable[[], gymnasium.Env]] = {
    "Discrete action, mask": RandomEpisodes,
    "mask in the observation": lambda: gymnasium.wrappers.TimeLimit(Masked(in_observation=True), 5),
    "image, Box action": ImageEnv,
    "Dict": FlatDict,
    "nested Dict, Dict action": MixedDictEnv,
}
