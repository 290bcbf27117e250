"""What the trainer needs to know about an environment."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import gymnasium
import numpy as np

from unidle.spaces.actions import ActionLayout
from unidle.spaces.observations import MASK, ObservationLayout

UNANNOUNCED_MASK = "info['action_mask'] is set by step() but not by reset(); set it in both."


@dataclass(frozen=True)
class EnvSpec:
    """The layout of an environment's observations and actions, and the time of a step."""

    obs_layout: ObservationLayout
    action_layout: ActionLayout
    step_seconds: float  # of a random step, with its share of resets and the write of the observation
    vectorised: bool = False  # a vector environment, stepped by its own library
    on_device: bool = False  # a batched environment of tensors on the policy's device
    ignores_masks: bool = False  # masks that the environment gives are not used
    stateful_wrappers: tuple[
        str, ...
    ] = ()  # wrappers whose state survives an episode and is saved (see carried_state.py)
    has_time_limit: bool = True  # False: no time limit was found
    log_info: tuple[str, ...] = ()  # keys of the numbers in info that are logged at the end of an episode
    unsaved: tuple[str, ...] = ()  # attributes that survive an episode and are not saved


def mask_from(observation: Any, info: dict[str, Any], obs_space: gymnasium.Space) -> Any:
    """The action mask in the Dict observation or in info; None if the environment gives none."""
    if isinstance(obs_space, gymnasium.spaces.Dict) and MASK in obs_space.spaces:
        return observation[MASK]
    return info.get(MASK)


def random_action(actions: ActionLayout, rng: np.random.Generator, mask: np.ndarray | None = None) -> Any:
    """Draw an action uniformly from the space and the mask (from a normal distribution in unbounded dimensions)."""
    return actions.decode(random_flat_action(actions, rng, mask))


def random_flat_action(actions: ActionLayout, rng: np.random.Generator, mask: np.ndarray | None = None) -> np.ndarray:
    """Like `random_action`, in flat form [width]."""
    flat = np.zeros(actions.width, np.float32)
    start = 0
    for head, n in enumerate(actions.nvec):
        allowed = np.arange(n) if mask is None else np.flatnonzero(mask[start : start + n])
        flat[head] = rng.choice(allowed)
        start += n
    if actions.reals:
        bounded = actions.bounded
        low, high = np.where(bounded, actions.low, 0), np.where(bounded, actions.high, 0)
        uniform = rng.uniform(low, high).astype(np.float32)
        free = rng.standard_normal(actions.reals).astype(np.float32)
        flat[actions.heads :] = np.clip(np.where(bounded, uniform, free), actions.low, actions.high)
    return flat
