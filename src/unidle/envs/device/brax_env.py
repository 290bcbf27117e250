"""Brax: `--env brax:ant`."""

from __future__ import annotations

import difflib
from functools import partial
from typing import Any

import numpy as np
import torch
from gymnasium import spaces

from unidle.envs.device.jax_env import Array, JaxEnv, JaxTask, Tree, import_package, space_of
from unidle.envs.make import EnvMaker
from unidle.errors import UsageError


def backend(name: str, kwargs: dict[str, Any]) -> EnvMaker:
    """The backend of `brax:` names."""
    return EnvMaker(name, partial(brax_env, name.partition(":")[2]), kwargs, kind="device")


def brax_env(
    name: str, n_envs: int, seed: int, device: torch.device | str = "cpu", first_index: int = 0, **kwargs: Any
) -> JaxEnv:
    """N Brax environments; `kwargs` go to the constructor, except `episode_length` (1000)."""
    return JaxEnv(brax_task(name, **kwargs), n_envs, seed, device, first_index)


def brax_task(name: str, episode_length: int = 1000, **kwargs: Any) -> JaxTask:
    """One Brax environment without its wrappers: those reset to a cached state and drop the final observation."""
    envs = import_package("brax.envs", f"brax:{name}")
    import jax
    import jax.numpy as jnp

    if name not in envs._envs:
        near = difflib.get_close_matches(name, envs._envs, n=1)
        hint = f"did you mean `{near[0]}`?" if near else f"choose one of {', '.join(envs._envs)}."
        raise UsageError(f"Brax has no environment `{name}`; {hint}")
    env = envs.get_environment(name, **kwargs)

    def reset(key: Array) -> tuple[Tree, Array]:
        state = env.reset(key)
        return state, state.obs

    def step(key: Array, state: Tree, action: Array) -> tuple[Tree, Array, Array, Array, Array]:
        state = env.step(state, action)
        return state, state.obs, state.reward, state.done > 0.5, jnp.zeros((), bool)

    obs = jax.eval_shape(reset, jax.random.PRNGKey(0))[1]
    if not hasattr(obs, "shape"):
        raise UsageError(f"brax:{name} has several observation arrays; only environments with one can be trained.")
    actions = spaces.Box(-1.0, 1.0, (env.action_size,), np.float32)
    return JaxTask(space_of(obs), actions, reset, step, limit=episode_length)
