"""gymnax: `--env gymnax:CartPole-v1`."""

from __future__ import annotations

import dataclasses
import difflib
from functools import partial
from typing import Any

import torch
from gymnasium import spaces

from unidle.envs.device.jax_env import Array, JaxEnv, JaxTask, Tree, import_package, space_of
from unidle.envs.device.simulators import plain_space
from unidle.envs.make import EnvMaker
from unidle.errors import UsageError

_NEVER = 2**31 - 1  # steps


def backend(name: str, kwargs: dict[str, Any]) -> EnvMaker:
    """The backend of `gymnax:` names."""
    return EnvMaker(name, partial(gymnax_env, name.partition(":")[2]), kwargs, kind="device")


def gymnax_env(
    name: str, n_envs: int, seed: int, device: torch.device | str = "cpu", first_index: int = 0, **kwargs: Any
) -> JaxEnv:
    """N gymnax environments; `kwargs` that are fields of its params go there, the others to the constructor."""
    return JaxEnv(gymnax_task(name, **kwargs), n_envs, seed, device, first_index)


def gymnax_task(name: str, **kwargs: Any) -> JaxTask:
    """One gymnax environment; UsageError if there is none of that name."""
    gymnax = import_package("gymnax", f"gymnax:{name}")
    import jax

    known = gymnax.registered_envs
    if name not in known:
        near = difflib.get_close_matches(name, known, n=1)
        hint = f"did you mean `{near[0]}`?" if near else "gymnax.registered_envs lists them all."
        raise UsageError(f"gymnax has no environment `{name}`; {hint}")
    fields = {field.name for field in dataclasses.fields(type(gymnax.make(name)[1]))}
    env, params = gymnax.make(name, **{key: value for key, value in kwargs.items() if key not in fields})
    params = params.replace(**{key: value for key, value in kwargs.items() if key in fields})
    endless = params.replace(max_steps_in_episode=_NEVER)

    def reset(key: Array) -> tuple[Tree, Array]:
        observation, state = env.reset_env(key, params)
        return state, observation

    def step(key: Array, state: Tree, action: Array) -> tuple[Tree, Array, Array, Array, Array]:
        observation, after, reward, done, _ = env.step_env(key, state, action, params)
        if hasattr(env, "is_truncated"):  # gymnax 1.0: `done` is termination alone
            return after, observation, reward, done, env.is_truncated(after, params)
        # In older versions `done` also means truncation; a step without a time limit shows whether it terminated.
        # XLA shares the work of both steps.
        terminated = env.step_env(key, state, action, endless)[3]
        return after, observation, reward, terminated, done

    obs = jax.eval_shape(reset, jax.random.PRNGKey(0))[1]
    if not hasattr(obs, "shape"):
        raise UsageError(f"gymnax:{name} has several observation arrays; only environments with one can be trained.")
    given = env.observation_space(params)
    # The shape of its Box spaces is not always that of the observation.
    observation = spaces.Discrete(int(given.n)) if hasattr(given, "n") else space_of(obs)
    return JaxTask(observation, plain_space(env.action_space(params)), reset, step)
