"""Environment objects that a user passes instead of a name or a factory."""

from __future__ import annotations

from typing import Any

import gymnasium
from gymnasium.envs.registration import EnvSpec, WrapperSpec

from unidle.envs.adapter_registry import adapter_for
from unidle.errors import UsageError

_HOW = "pass a function that creates one: unidle.train(lambda: …)"


def settings_of(env: Any) -> dict[str, Any]:
    """The settings `env`, `env_kwargs` and `wrappers` that create `env`, a Python object, again; or a UsageError."""
    if env is None or env == "":
        raise UsageError("No environment given; pass an id such as 'CartPole-v1', or a function that creates one.")
    if is_multi_agent(env):
        raise UsageError(MULTI_AGENT.format(type(env).__name__))
    if adapter_for(env) is not None:
        raise UsageError(f"unidle creates its vector environments itself, but got a {type(env).__name__}; {_HOW}.")
    if not isinstance(env, gymnasium.Env):
        raise UsageError(
            f"The environment is {env!r}; pass an id such as 'CartPole-v1', or a function that creates one."
        )
    if env.spec is None:
        raise UsageError(
            f"unidle needs more than one {type(env.unwrapped).__name__}, and an object that gymnasium.make did not "
            f"create cannot be copied; {_HOW}."
        )
    wrappers = [_wrapper(wrapper) for wrapper in env.spec.additional_wrappers]
    given = {"env": env.spec.id, "env_kwargs": _kwargs(env.spec), "wrappers": wrappers}
    return {name: value for name, value in given.items() if value}


def _kwargs(spec: EnvSpec) -> dict[str, Any]:
    """The arguments of gymnasium.make."""
    kwargs = {name: value for name, value in spec.kwargs.items() if name != "render_mode"}
    limit = spec.max_episode_steps
    if limit != gymnasium.spec(spec.id).max_episode_steps:
        kwargs["max_episode_steps"] = -1 if limit is None else limit
    return kwargs


def _wrapper(wrapper: WrapperSpec) -> dict[str, Any] | str:
    if wrapper.kwargs is None:
        raise UsageError(
            f"The wrapper {wrapper.name} does not record its arguments (gymnasium.utils.RecordConstructorArgs), so the "
            f"environment cannot be copied; {_HOW}."
        )
    return {wrapper.entry_point: dict(wrapper.kwargs)} if wrapper.kwargs else wrapper.entry_point


MULTI_AGENT = (
    "{} is a multi-agent environment (PettingZoo), and unidle trains a single agent; pass a gymnasium.Env that plays "
    "the other agents itself."
)


def is_multi_agent(env: Any) -> bool:
    """Whether it is an environment of PettingZoo."""
    return hasattr(env, "possible_agents") and not isinstance(env, gymnasium.Env)
