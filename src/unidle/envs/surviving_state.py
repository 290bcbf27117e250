"""Finds attributes that survive `reset(seed=…)`: the episodes of such an environment may depend on earlier ones."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any

import gymnasium
import numpy as np

from unidle.envs.carried_state import has_state_dict, layers

_KNOWN_PACKAGES = ("gymnasium", "stable_baselines3", "unidle")  # what they count does not change their episodes
_MAX_BYTES = 1 << 16


def plain_attributes(env: gymnasium.Env) -> dict[str, Any]:
    """Numbers, texts, arrays and the lengths of collections that an environment and its wrappers have as attributes.

    Leaves out attributes of well-known packages, and of classes that save their state.
    """
    found = {}
    for layer in layers(env):
        kind = type(layer)
        if kind.__module__.partition(".")[0] in _KNOWN_PACKAGES or has_state_dict(layer):
            continue
        for name, value in getattr(layer, "__dict__", {}).items():
            summary = _summary(value)
            if summary is not None:
                found[f"{kind.__name__}.{name}"] = summary
    return found


def surviving(before: Mapping[str, Any], after: Mapping[str, Any]) -> tuple[str, ...]:
    """The names of attributes that differ between two resets with the same seed."""
    return tuple(name for name, value in before.items() if name in after and after[name] != value)


def _summary(value: Any) -> Any:
    if isinstance(value, (bool, int, float, np.generic)):
        return repr(value)  # NaN equals itself
    if isinstance(value, str):
        return value
    if isinstance(value, np.ndarray):
        return value.tobytes() if value.nbytes <= _MAX_BYTES else None
    return len(value) if isinstance(value, (list, tuple, dict, set, deque)) else None
