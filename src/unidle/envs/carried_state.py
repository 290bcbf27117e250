"""State that wrappers carry from one episode to the next: to replay an episode, they need it as it was at its start.
The statistics of Gymnasium's wrappers are supported, and any wrapper that has `state_dict` and `load_state_dict`.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import Any

import gymnasium
import numpy as np
from gymnasium.wrappers import NormalizeObservation, NormalizeReward

# Wrapper → its statistics, and its other attributes that survive an episode.
_KNOWN: dict[type, tuple[str, tuple[str, ...]]] = {
    NormalizeObservation: ("obs_rms", ()),
    NormalizeReward: ("return_rms", ("discounted_reward",)),
}
_STATISTICS = ("mean", "var", "count")


def layers(env: gymnasium.Env) -> Iterator[gymnasium.Env]:
    """The wrappers of an environment, outermost first, and the environment itself."""
    while isinstance(env, gymnasium.Wrapper):
        yield env
        env = env.env
    yield env


def stateful_wrappers(env: gymnasium.Env) -> list[gymnasium.Wrapper]:
    """The wrappers whose state `carried_state` returns, outermost first."""
    return [layer for layer in layers(env) if isinstance(layer, gymnasium.Wrapper) and _is_stateful(layer)]


def _is_stateful(wrapper: gymnasium.Wrapper) -> bool:
    return has_state_dict(wrapper) or isinstance(wrapper, tuple(_KNOWN))


def has_state_dict(layer: gymnasium.Env) -> bool:
    """Whether an environment or wrapper can save and restore its state."""
    return hasattr(layer, "state_dict") and hasattr(layer, "load_state_dict")


def carried_state(wrappers: Sequence[gymnasium.Wrapper]) -> list[dict[str, Any]]:
    """The current state of each of these wrappers."""
    return [_state_of(wrapper) for wrapper in wrappers]


def load_carried_state(wrappers: Sequence[gymnasium.Wrapper], states: Sequence[dict[str, Any]]) -> None:
    """Restore what `carried_state` returned; ValueError if the wrappers have changed since."""
    if len(wrappers) != len(states):
        raise ValueError(f"the checkpoint has the state of {len(states)} wrappers, and there are {len(wrappers)}")
    for wrapper, state in zip(wrappers, states):
        _load(wrapper, state)


def _state_of(wrapper: Any) -> dict[str, Any]:
    if has_state_dict(wrapper):
        return copy.deepcopy(wrapper.state_dict())
    statistics, others = _names_of(wrapper)
    running = getattr(wrapper, statistics)
    state = {name: getattr(running, name) for name in _STATISTICS} | {name: getattr(wrapper, name) for name in others}
    # Scalars of NumPy as arrays: they keep their dtype in a checkpoint.
    return {name: np.array(value) if isinstance(value, np.generic) else value for name, value in state.items()}


def _load(wrapper: Any, state: dict[str, Any]) -> None:
    if has_state_dict(wrapper):
        wrapper.load_state_dict(state)
        return
    statistics, others = _names_of(wrapper)
    running = getattr(wrapper, statistics)
    for name in _STATISTICS:
        setattr(running, name, state[name])
    for name in others:
        setattr(wrapper, name, state[name])


def _names_of(wrapper: gymnasium.Wrapper) -> tuple[str, tuple[str, ...]]:
    return next(names for kind, names in _KNOWN.items() if isinstance(wrapper, kind))
