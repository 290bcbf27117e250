"""Where each environment stands, in a form that outlives the process."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor


class EpisodeLog:
    """The actions of each open episode, so that it can be replayed after a resume."""

    def __init__(self, n_envs: int, width: int) -> None:
        self._width = width
        self._pieces: list[list[np.ndarray]] = [[] for _ in range(n_envs)]

    def extend(self, actions: np.ndarray, ended: np.ndarray) -> None:
        """Add T steps: actions [T, N, width] as the environments got them, and where episodes ended [T, N]."""
        steps = len(actions)
        last_end = np.where(ended.any(0), steps - 1 - ended[::-1].argmax(0), -1)  # [N]
        for env, last in enumerate(last_end):
            if last >= 0:
                self._pieces[env] = []
            if last + 1 < steps:
                self._pieces[env].append(actions[last + 1 :, env].copy())

    def actions(self, env: int) -> np.ndarray:
        """[k, width] since the open episode of `env` began."""
        return np.concatenate([np.zeros((0, self._width), np.float32), *self._pieces[env]])

    def restart(self, env: int, actions: np.ndarray) -> None:
        """Begin again with the actions of a resumed episode."""
        self._pieces[env] = [actions] if len(actions) else []


def as_tensors(value: Any) -> Any:
    """An environment's state in types that load without unpickling code; TypeError if it holds any other."""
    if isinstance(value, np.ndarray):
        return torch.from_numpy(value.copy())
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, dict):
        return {key: as_tensors(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(as_tensors(part) for part in value)
    if value is None or isinstance(value, (bool, int, float, str, Tensor)):
        return value
    raise TypeError(f"{type(value).__name__} is no plain value")


def as_arrays(value: Any) -> Any:
    """What `as_tensors` made, as the environment knows it."""
    if isinstance(value, Tensor):
        return value.numpy()
    if isinstance(value, dict):
        return {key: as_arrays(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(as_arrays(part) for part in value)
    return value
