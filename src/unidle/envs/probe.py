"""Measures an environment's spec: creates one and steps it a few times."""

from __future__ import annotations

import contextlib
from time import perf_counter
from typing import Any

import gymnasium
import numpy as np

from unidle.envs.adapter_registry import adapter_for
from unidle.envs.carried_state import stateful_wrappers
from unidle.envs.check import check_mask, check_observation, check_return_value, check_spaces
from unidle.envs.frame_stack import FrameStack
from unidle.envs.make import EnvMaker
from unidle.envs.spec import UNANNOUNCED_MASK, EnvSpec, mask_from, random_action
from unidle.envs.step_times import StepTimes
from unidle.envs.surviving_state import plain_attributes, surviving
from unidle.envs.vector.host_envs import probe_vector
from unidle.errors import UsageError, wrap_errors
from unidle.spaces.actions import ActionLayout
from unidle.spaces.observations import ObservationLayout


def probe(maker: EnvMaker, discretize: int | None = None, seed: int = 0) -> EnvSpec:
    """Create an environment, check and time a few of its steps, and close it."""
    with wrap_errors("The environment failed in the test steps before training"):
        if maker.kind == "device":
            return _device_spec(maker.device_env(1, seed), maker, discretize)
        if maker.native is not None:
            with contextlib.closing(maker.native(maker, 1)) as vector:
                return probe_vector(vector, discretize, seed, use_masks=maker.action_masks)
        with maker.probed() as env:
            adapter = adapter_for(env)
            if adapter is None:
                return _probe_one(env, discretize, seed, use_masks=maker.action_masks)
            if not adapter.on_device:
                vector = adapter.load()(env, maker.name)
                return probe_vector(vector, discretize, seed, use_masks=maker.action_masks)
            if maker.kind == "gymnasium":
                raise UsageError(
                    f"{maker.name} is a batched environment; pass a function that returns it, as module:name."
                )
            adapted = adapter.load()(env, maker.name, seed, obs_groups=maker.obs_groups)
            return _device_spec(adapted, maker, discretize)


def _device_spec(env: Any, maker: EnvMaker, discretize: int | None) -> EnvSpec:
    from unidle.envs.device.device_env import MaskedDeviceEnv  # imports torch, which worker processes do not need

    if discretize is not None:
        raise UsageError(f"--discretize does not apply to {maker.name}, a device environment; leave it out.")
    actions = ActionLayout.of(env.action_space)
    has_masks = isinstance(env, MaskedDeviceEnv) and maker.action_masks
    obs_layout = ObservationLayout.of(env.observation_space, actions.mask_width if has_masks else 0)
    return EnvSpec(obs_layout, actions, step_seconds=0.0, on_device=True, ignores_masks=not maker.action_masks)


def _probe_one(env: gymnasium.Env, discretize: int | None, seed: int, *, use_masks: bool) -> EnvSpec:
    check_spaces(env)
    actions = ActionLayout.of(env.action_space, discretize)
    ObservationLayout.of(env.observation_space)  # reject an unsupported space before the first step
    observation, info = check_return_value(_seeded_reset(env, seed), 2, "reset")
    check_observation(env.observation_space, observation, "reset")
    mask = mask_from(observation, info, env.observation_space) if use_masks else None
    obs_layout = ObservationLayout.of(env.observation_space, actions.mask_width if mask is not None else 0)
    if isinstance(env, FrameStack):
        obs_layout = env.described_in(obs_layout)
    mask = mask if obs_layout.mask_width else None  # continuous actions have no mask
    attributes, times = plain_attributes(env), StepTimes()
    write = obs_layout.writer(np.zeros((1, obs_layout.obs_bytes), np.uint8))
    rng = np.random.default_rng(seed)
    while not times.is_enough:
        allowed = check_mask(actions, mask) if obs_layout.mask_width else None
        action = random_action(actions, rng, allowed)
        began = perf_counter()
        outcome = env.step(action)
        seconds = perf_counter() - began
        observation, reward, terminated, truncated, info = check_return_value(outcome, 5, "step")
        check_observation(env.observation_space, observation, "step", reward)
        began = perf_counter()
        write(0, observation)
        times.add_step(seconds + perf_counter() - began)
        if terminated or truncated:
            began = perf_counter()
            observation, info = env.reset()
            times.add_reset(perf_counter() - began)
        mask = mask_from(observation, info, env.observation_space) if use_masks else None
        if mask is not None and actions.mask_width and not obs_layout.mask_width:
            raise UsageError(UNANNOUNCED_MASK)
    unsaved: tuple[str, ...] = ()
    if attributes:
        env.reset(seed=seed)
        unsaved = surviving(attributes, plain_attributes(env))
    names = tuple(type(wrapper).__name__ for wrapper in stateful_wrappers(env))
    return EnvSpec(
        obs_layout,
        actions,
        times.per_step(),
        ignores_masks=not use_masks,
        stateful_wrappers=names,
        has_time_limit=_has_time_limit(env),
        unsaved=unsaved,
    )


def _has_time_limit(env: gymnasium.Env) -> bool:
    """Whether `env` is registered with a time limit, or wrapped in one."""
    if env.spec is not None and env.spec.max_episode_steps is not None:
        return True
    while isinstance(env, gymnasium.Wrapper):
        if isinstance(env, gymnasium.wrappers.TimeLimit):
            return True
        env = env.env
    return False


def _seeded_reset(env: gymnasium.Env, seed: int) -> Any:
    try:
        return env.reset(seed=seed)
    except TypeError as error:
        if "seed" not in str(error):
            raise
        raise UsageError(
            "reset() must accept seed and options as keywords: def reset(self, *, seed=None, options=None)."
        ) from None
