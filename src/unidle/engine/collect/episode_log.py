"""The actions and rewards of open episodes, and environment states, in a form that checkpoints can store."""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np
import torch
from torch import Tensor

_MAX_BYTES = 2**31


class EpisodeLog:
    """The actions of each open episode, so that it can be replayed on resume, and its rewards to compare.

    A rollout is kept while there is an open episode that began in it or before. An episode that is too long for
    `_MAX_BYTES` is dropped: replaying it would take too long anyway.
    """

    def __init__(self, n_envs: int, width: int) -> None:
        self._none = np.zeros((0, width + 1), np.float32)
        self._rollouts: deque[np.ndarray] = deque()  # [T, N, width + 1] each: actions and reward
        self._first = self._end = 0  # number of steps before the oldest kept rollout, and until now
        self._begin = np.zeros(n_envs, np.int64)  # the step at which each open episode began
        self._before: dict[int, np.ndarray] = {}  # env → steps of its open episode before the run was resumed
        self._too_long = np.zeros(n_envs, np.bool_)

    def extend(self, actions: np.ndarray, rewards: np.ndarray, ended: np.ndarray) -> None:
        """Add T steps: actions [T, N, width] as the environments received them, rewards and episode ends [T, N]."""
        steps, stored = len(actions), np.concatenate([actions, rewards[..., np.newaxis]], 2, dtype=np.float32)
        has_ended = np.logical_or.reduce(ended, 0)
        if np.count_nonzero(has_ended):
            last_end = steps - 1 - ended[::-1].argmax(0)  # [N] meaningful where an episode ended
            self._begin[has_ended] = self._end + last_end[has_ended] + 1
            self._too_long[has_ended] = False
        self._rollouts.append(stored)
        self._end += steps
        if len(self._rollouts) * stored.nbytes > _MAX_BYTES:
            self._too_long |= self._begin < self._first + len(self._rollouts[0])
        if np.count_nonzero(self._too_long):
            self._begin[self._too_long] = self._end
        for env in [env for env in self._before if has_ended[env] or self._too_long[env]]:
            del self._before[env]
        while self._rollouts and self._first + len(self._rollouts[0]) <= self._begin.min():
            self._first += len(self._rollouts.popleft())

    def open_episode(self, env: int) -> tuple[np.ndarray, np.ndarray]:
        """Actions [k, width] and rewards [k] of `env` in its open episode; empty if it is too long."""
        parts, first, begin = [self._before.get(env, self._none)], self._first, int(self._begin[env])
        for rollout in self._rollouts:
            if begin < first + len(rollout):
                parts.append(rollout[max(0, begin - first) :, env])
            first += len(rollout)
        steps = np.concatenate(parts)
        return steps[:, :-1], steps[:, -1]

    def restart(self, env: int) -> None:
        """Start a new episode."""
        self._begin[env], self._too_long[env] = self._end, False
        self._before.pop(env, None)

    def resume(self, env: int, actions: np.ndarray, rewards: np.ndarray) -> None:
        """Continue an episode with its steps so far."""
        self.restart(env)
        if len(actions):
            self._before[env] = np.concatenate([actions, rewards[:, np.newaxis]], 1)


def as_tensors(value: Any) -> Any:
    """An environment's state in types that load without unpickling code; TypeError if it contains any other type."""
    if isinstance(value, np.ndarray):
        return torch.from_numpy(value.copy())
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, dict):
        return {as_tensors(key): as_tensors(part) for key, part in value.items()}
    if type(value) in (list, tuple):
        return type(value)(as_tensors(part) for part in value)
    # Exact types only: a subclass, such as an enum, would be pickled by the name of its class.
    if value is None or isinstance(value, Tensor) or type(value) in (bool, int, float, str):
        return value
    raise TypeError(f"{type(value).__name__} is not a plain value")


def as_arrays(value: Any) -> Any:
    """The inverse of `as_tensors`: the state as the environment expects it."""
    if isinstance(value, Tensor):
        return value.numpy()
    if isinstance(value, dict):
        return {key: as_arrays(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(as_arrays(part) for part in value)
    return value


def plain_state(state: dict[str, Any] | None) -> Any:
    """An environment's state for a checkpoint; None if it is not plain data: then the episode is replayed."""
    try:
        return as_tensors(state)
    except TypeError:
        return None
