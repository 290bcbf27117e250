"""Whether a policy and an algorithm fit the environment's spaces: checked when a model is created."""

from __future__ import annotations

from typing import Any

from gymnasium import spaces

from unidle.envs.adapter_registry import adapter_for
from unidle.errors import UsageError, wrap_errors
from unidle.sb3.envs import Envs
from unidle.sb3.errors import ArgumentError
from unidle.spaces.observations import ObservationLayout

_ACTIONS: dict[str, tuple[type[spaces.Space], ...]] = {
    "dqn": (spaces.Discrete,),
    "sac": (spaces.Box, spaces.Discrete),
    "td3": (spaces.Box,),
}


def refuse_reset_result(observation: Any, space: spaces.Space) -> None:
    """An error if it is what `reset` of a gymnasium.Env returns."""
    is_result = isinstance(observation, tuple) and len(observation) == 2 and isinstance(observation[1], dict)
    if is_result and not isinstance(space, spaces.Tuple):
        raise ArgumentError(
            "predict got a tuple (observation, info), as reset of a gymnasium.Env returns it: you are mixing Gym API "
            "and VecEnv API; pass its first item."
        )


def check_spaces(algo: str, policy: Any, envs: Envs) -> None:
    """UsageError if the algorithm cannot choose the environment's actions, or `policy` not see its observations."""
    if envs.maker.kind not in ("gymnasium", "unknown"):
        return
    with wrap_errors("The environment could not be created"), envs.maker.probed() as env:
        adapter = adapter_for(env)
        if adapter is not None and adapter.on_device:
            return
        observations, actions = env.observation_space, env.action_space
    known = _ACTIONS.get(algo)
    if known is not None and not isinstance(actions, known):
        others = " or ".join(
            each.upper() for each in ("ppo", *_ACTIONS) if isinstance(actions, _ACTIONS.get(each, (object,)))
        )
        names = " or ".join(kind.__name__ for kind in known)
        raise UsageError(f"{algo.upper()} needs {names} actions, but the environment has {actions}; use {others}.")
    if policy == "CnnPolicy" and not any(leaf.is_image for leaf in ObservationLayout.of(observations).leaves):
        instead = "MultiInputPolicy" if isinstance(observations, spaces.Dict) else "MlpPolicy"
        raise UsageError(
            f"{algo.upper()}: 'CnnPolicy' needs images, which are uint8 Boxes such as (84, 84, 3), but the observation "
            f"is {observations}; use '{instead}'."
        )
