"""What the trainer needs to know of an environment, found out by making one and stepping it a few times."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import gymnasium
import numpy as np

from unidle.envs.check import check_mask, check_observation, check_outcome, check_spaces
from unidle.envs.make import EnvMaker, on_device_kind, vector_kind
from unidle.errors import UsageError, reported
from unidle.spaces.actions import ActionLayout
from unidle.spaces.observations import MASK, ObservationLayout

PROBE_STEPS = 32
PROBE_SECONDS = 1.0  # or fewer steps, if they take long
UNANNOUNCED_MASK = "info['action_mask'] is there after step() but not after reset(); give it from both."


@dataclass(frozen=True)
class EnvSpec:
    """How an environment's observations and actions are laid out, and what it costs to step."""

    obs_layout: ObservationLayout
    action_layout: ActionLayout
    step_seconds: float  # median of a few random steps, each with what it takes to write its observation down
    vectorised: bool = False  # the factory makes environments that step together
    on_device: bool = False  # and those are tensors on the policy's device


def mask_from(observation: Any, info: dict[str, Any], rows_space: gymnasium.Space) -> Any:
    """The action mask an environment gave, in its Dict observation or in info; None if it gives none."""
    if isinstance(rows_space, gymnasium.spaces.Dict) and MASK in rows_space.spaces:
        return observation[MASK]
    return info.get(MASK)


def probe(maker: EnvMaker, discretize: int | None = None, seed: int = 0) -> EnvSpec:
    """Make an environment, check a few of its steps, time them, and close it again."""
    from unidle.envs.vector.adapters import EnvPoolVector
    from unidle.envs.vector.host_envs import as_vector, probe_vector  # which know the contract themselves

    with reported("The environment failed while it was tried out"):
        if maker.makes == "device":
            return _contract_on_device(maker.on_device(1, seed), maker.name, discretize)
        if maker.makes == "many":
            with contextlib.closing(EnvPoolVector(maker, 1)) as pool:
                return probe_vector(pool, discretize, seed)
        with maker.tried() as env:
            if on_device_kind(env):
                if maker.makes == "one":
                    raise UsageError(
                        f"{maker.name} makes many environments at once; give a function that returns it, module:name."
                    )
                from unidle.envs.device.simulators import (
                    as_device_env,  # loads torch, which worker processes do without
                )

                return _contract_on_device(as_device_env(env, maker.name, seed), maker.name, discretize)
            if vector_kind(env):
                return probe_vector(as_vector(env, maker.name), discretize, seed)
            return _probe_one(env, discretize, seed)


def _contract_on_device(env: Any, name: str, discretize: int | None) -> EnvSpec:
    from unidle.envs.device.device_env import MaskedDeviceEnv  # loads torch too

    if discretize is not None:
        raise UsageError(f"{name} takes its actions on the device, where --discretize does not apply; leave it out.")
    actions = ActionLayout.of(env.action_space)
    obs_layout = ObservationLayout.of(
        env.observation_space, actions.mask_width if isinstance(env, MaskedDeviceEnv) else 0
    )
    return EnvSpec(obs_layout, actions, step_seconds=0.0, on_device=True)


def _probe_one(env: gymnasium.Env, discretize: int | None, seed: int) -> EnvSpec:
    check_spaces(env)
    actions = ActionLayout.of(env.action_space, discretize)
    ObservationLayout.of(env.observation_space)  # an unsupported space is said before anything is stepped
    observation, info = check_outcome(_seeded_reset(env, seed), 2, "reset")
    check_observation(env.observation_space, observation, "reset")
    mask = mask_from(observation, info, env.observation_space)
    obs_layout = ObservationLayout.of(env.observation_space, actions.mask_width if mask is not None else 0)
    mask = mask if obs_layout.mask_width else None  # nothing to mask where every action is a real number
    seconds = []
    write = obs_layout.writer(np.zeros((1, obs_layout.obs_bytes), np.uint8))
    rng = np.random.default_rng(seed)
    for _ in range(PROBE_STEPS):
        allowed = check_mask(actions, mask) if obs_layout.mask_width else None
        action = random_action(actions, rng, allowed)
        began = perf_counter()
        outcome = env.step(action)
        seconds.append(perf_counter() - began)
        observation, reward, terminated, truncated, info = check_outcome(outcome, 5, "step")
        check_observation(env.observation_space, observation, "step", reward)
        began = perf_counter()
        write(0, observation)
        seconds[-1] += perf_counter() - began
        if terminated or truncated:
            observation, info = env.reset()
        mask = mask_from(observation, info, env.observation_space)
        if mask is not None and actions.mask_width and not obs_layout.mask_width:
            raise UsageError(UNANNOUNCED_MASK)
        if sum(seconds) > PROBE_SECONDS:
            break
    return EnvSpec(obs_layout, actions, float(np.median(seconds)))


def _seeded_reset(env: gymnasium.Env, seed: int) -> Any:
    try:
        return env.reset(seed=seed)
    except TypeError as error:
        if "seed" not in str(error):
            raise
        raise UsageError(
            "reset() must take seed and options by name: def reset(self, *, seed=None, options=None)."
        ) from None


def random_action(actions: ActionLayout, rng: np.random.Generator, mask: np.ndarray | None = None) -> Any:
    """An action drawn uniformly from what the space and the mask allow (normal where a dimension is unbounded)."""
    return actions.decode(random_row(actions, rng, mask))


def random_row(actions: ActionLayout, rng: np.random.Generator, mask: np.ndarray | None = None) -> np.ndarray:
    """Such an action as a flat row [width]."""
    row = np.zeros(actions.width, np.float32)
    start = 0
    for head, n in enumerate(actions.nvec):
        allowed = np.arange(n) if mask is None else np.flatnonzero(mask[start : start + n])
        row[head] = rng.choice(allowed)
        start += n
    if actions.reals:
        bounded = actions.bounded
        low, high = np.where(bounded, actions.low, 0), np.where(bounded, actions.high, 0)
        uniform = rng.uniform(low, high).astype(np.float32)
        free = rng.standard_normal(actions.reals).astype(np.float32)
        row[actions.heads :] = np.clip(np.where(bounded, uniform, free), actions.low, actions.high)
    return row
