"""Checks of an environment's spaces, observations, rewards and masks, used by `unidle check-env` and by training."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from gymnasium import spaces

from unidle.errors import UsageError
from unidle.spaces.actions import ActionLayout
from unidle.spaces.observations import MASK, ObservationLayout
from unidle.spaces.tree import Path, describe_path, follow


def check_spaces(env: Any) -> None:
    """Check that both spaces are declared."""
    for name in ("observation_space", "action_space"):
        if not isinstance(getattr(env, name, None), spaces.Space):
            raise UsageError(f"The environment has no {name}; set it in __init__ to one of gymnasium.spaces.")


def check_return_value(outcome: Any, size: int, method: str) -> Any:
    """Return the tuple that `reset` or `step` returned; UsageError if it is malformed."""
    parts = {2: "(observation, info)", 5: "(observation, reward, terminated, truncated, info)"}[size]
    if not isinstance(outcome, tuple) or len(outcome) != size:
        given = f"{len(outcome)} values" if isinstance(outcome, tuple) else type(outcome).__name__
        raise UsageError(f"{method}() must return {parts}, not {given}; see Gymnasium's Env.{method}.")
    if size == 5 and not all(isinstance(flag, (bool, np.bool_)) for flag in outcome[2:4]):
        raise UsageError("step() must return terminated and truncated as bools; wrap them in bool(…).")
    if not isinstance(outcome[-1], dict):
        raise UsageError(f"{method}() must return info as a dict, not {type(outcome[-1]).__name__}.")
    return outcome


def check_observation(space: spaces.Space, observation: Any, method: str, reward: Any = 0.0) -> None:
    """Check that an observation is in its space and the reward is a finite number."""
    _check(space, observation, (), method)
    if np.ndim(reward) != 0 or np.asarray(reward).dtype.kind not in "fiub":
        raise UsageError(f"step() must return the reward as a scalar, not {type(reward).__name__} {reward!r}.")
    if not np.isfinite(float(reward)):
        raise UsageError(f"step() returned the reward {reward}; rewards must be finite.")


def layout_check(layout: ObservationLayout) -> Callable[..., None]:
    """A check for every step, fast: ValueError if a shape is wrong, or an integer is outside its space.

    Such an observation would be broadcast to the right shape, or address another entry of a one-hot vector.
    """
    leaves = [(leaf.path, leaf.shape, _integer_bounds(leaf.space), leaf.space) for leaf in layout.leaves]

    def check(observation: Any, batch: tuple[int, ...] = ()) -> None:
        for path, shape, bounds, space in leaves:
            value = follow(observation, path) if path else observation
            given = value.shape if isinstance(value, np.ndarray) else np.shape(value)
            if given != batch + shape:
                raise ValueError(f"{describe_path('observation', path)} has shape {given}, not {batch + shape}")
            if bounds is not None and not np.all((bounds[0] <= value) & (value < bounds[1])):
                raise ValueError(f"{describe_path('observation', path)} is {value}, outside its space {space}")

    path, shape, bounds, _ = leaves[0]
    if len(leaves) > 1 or path or bounds is not None:
        return check

    def check_array(observation: Any, batch: tuple[int, ...] = ()) -> None:
        """`check` of the most common observation, one array, in less time."""
        if batch or type(observation) is not np.ndarray or observation.shape != shape:
            check(observation, batch)

    return check_array


def _integer_bounds(space: spaces.Space) -> tuple[Any, Any] | None:
    """The smallest value of a Discrete or MultiDiscrete space, and the largest plus one."""
    if isinstance(space, spaces.Discrete):
        return int(space.start), int(space.start) + int(space.n)
    if isinstance(space, spaces.MultiDiscrete):
        return space.start, space.start + space.nvec
    return None


def check_mask(actions: ActionLayout, mask: Any) -> np.ndarray:
    """Return the flat form of an action mask; it must be given and allow at least one action per head."""
    if mask is None:
        raise UsageError(f"info['{MASK}'] is missing after some steps; set it after every reset and step.")
    flat = actions.flatten_mask(mask)
    head = actions.empty_head(flat)
    if head is not None:
        raise UsageError(f"{MASK} allows no action for head {head}; allow at least one.")
    return flat


def _check(space: spaces.Space, value: Any, path: Path, method: str) -> None:
    what = f"{describe_path('observation', path)} from {method}()"
    if isinstance(space, spaces.Dict):
        if not isinstance(value, dict) or set(value) != set(space.spaces):
            given = sorted(value) if isinstance(value, dict) else type(value).__name__
            raise UsageError(f"{what} must be a dict with keys {sorted(space.spaces)}, not {given}.")
        for key, part in space.spaces.items():
            _check(part, value[key], (*path, key), method)
    elif isinstance(space, spaces.Tuple):
        if not isinstance(value, (tuple, list)) or len(value) != len(space.spaces):
            raise UsageError(f"{what} must be a tuple of {len(space.spaces)} values.")
        for index, part in enumerate(space.spaces):
            _check(part, value[index], (*path, index), method)
    elif isinstance(space, spaces.Discrete):
        if np.ndim(value) != 0 or not np.issubdtype(np.asarray(value).dtype, np.integer):
            raise UsageError(f"{what} must be a single integer, because its space is {space}, not {value!r}.")
        if not space.start <= int(value) < space.start + space.n:
            raise UsageError(f"{what} is {value}, outside its space {space}.")
    else:
        _check_array(space, value, what)


def _check_array(space: Any, value: Any, what: str) -> None:
    if not isinstance(value, np.ndarray):
        raise UsageError(
            f"{what} must be a NumPy array, not {type(value).__name__}; return np.asarray(…, {space.dtype})."
        )
    if value.shape != space.shape:
        raise UsageError(f"{what} has shape {value.shape}, but its space has {space.shape}; make them equal.")
    if value.dtype.kind == "f" and not np.isfinite(value).all():
        at = tuple(int(i) for i in np.argwhere(~np.isfinite(value))[0])
        raise UsageError(f"{what} holds {value[at]} at index {at}; observations must be finite.")
    # As in Gymnasium: a Box accepts any dtype that casts safely to its own, other spaces any integer.
    casting: Any = "safe" if isinstance(space, spaces.Box) else "same_kind"
    if not np.can_cast(value.dtype, space.dtype, casting):
        raise UsageError(
            f"{what} has dtype {value.dtype}, but its space has {space.dtype}; return .astype({space.dtype})."
        )
    if not space.contains(value):
        raise UsageError(
            f"{what} is outside its space{_first_outside(space, value)}; widen the space or clip the observation."
        )


def _first_outside(space: spaces.Space, value: np.ndarray) -> str:
    """Describe the first entry outside the Box."""
    if not isinstance(space, spaces.Box):
        return f" {space}"
    outside = np.argwhere((value < space.low) | (value > space.high))
    if not len(outside):
        return ""
    at = tuple(int(i) for i in outside[0])
    return f": {value[at]} at index {at}, whose bounds are {space.low[at]} and {space.high[at]}"
