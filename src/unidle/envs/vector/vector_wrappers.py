"""What the wrappers around a vector environment need: true bounds, resets of some environments, and saved statistics.

Recognised by class and attribute names, so that Stable-Baselines3 is not imported.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from gymnasium import spaces
from gymnasium.wrappers.vector import NormalizeObservation, NormalizeReward

Statistics = dict[str, dict[str, Any]]  # "layer.attribute" or "layer.attribute.key" → mean, var and count


def layers(env: Any) -> Iterator[Any]:
    """The wrappers of Gymnasium or Stable-Baselines3 around `env`, the outermost first, and the environment itself."""
    while env is not None:
        yield env
        env = vars(env).get("env", vars(env).get("venv"))


# -- bounds ------------------------------------------------------------------------------------------------------------


def sb3_observation_space(env: Any) -> spaces.Space:
    """The observation space of a VecEnv, with the bounds that it really has.

    VecNormalize declares the bounds before the normalisation, and VecFrameStack repeats those of a vector in the wrong
    order.
    """
    by_name = {type(layer).__name__: layer for layer in layers(env)}
    normaliser = by_name.get("VecNormalize")
    normalised = list[str | None]()  # keys of a Dict; None: the whole observation
    if normaliser is not None and normaliser.norm_obs:
        normalised = normaliser.norm_obs_keys or [None]
    if not normalised and "VecFrameStack" not in by_name:
        space: spaces.Space = env.observation_space
        return space

    def unbounded(leaf: spaces.Space, key: str | None = None) -> spaces.Space:
        if isinstance(leaf, spaces.Dict):
            return spaces.Dict({name: unbounded(part, name) for name, part in leaf.spaces.items()})
        if key in normalised:
            return spaces.Box(-np.inf, np.inf, leaf.shape, np.float32)
        if isinstance(leaf, spaces.Box) and leaf.dtype.kind == "f":
            return spaces.Box(-np.inf, np.inf, leaf.shape, leaf.dtype)
        return leaf

    return unbounded(env.observation_space)


# -- resets of some environments ---------------------------------------------------------------------------------------


def allow_partial_resets(env: Any) -> None:
    """Let Gymnasium's normalisers reset some environments: one refuses to, the other forgets all open returns."""
    for layer in layers(env):
        if isinstance(layer, NormalizeObservation):
            layer.reset = _resetting_observations(layer)  # type: ignore[method-assign]
        elif isinstance(layer, NormalizeReward):
            layer.reset = _resetting_rewards(layer)  # type: ignore[method-assign]


def _resetting_observations(layer: NormalizeObservation) -> Any:
    full_reset = layer.reset

    def reset(*, seed: Any = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        if options is None or "reset_mask" not in options:
            return full_reset(seed=seed, options=options)
        reset_mask, updates = options["reset_mask"].copy(), layer.update_running_mean
        observations, infos = layer.env.reset(seed=seed, options=options)
        if updates:
            layer.obs_rms.update(observations[reset_mask])  # the others have been counted in their step
        layer.update_running_mean = False
        try:
            return layer.observations(observations), infos
        finally:
            layer.update_running_mean = updates

    return reset


def _resetting_rewards(layer: NormalizeReward) -> Any:
    full_reset = layer.reset

    def reset(*, seed: Any = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        running = ~options["reset_mask"] if options and "reset_mask" in options else np.zeros(layer.num_envs, np.bool_)
        open_returns = layer.accumulated_reward.copy()
        result = full_reset(seed=seed, options=options)
        layer.accumulated_reward[running] = open_returns[running]
        return result

    return reset


# -- statistics --------------------------------------------------------------------------------------------------------


def statistics(env: Any) -> Statistics:
    """The running means and variances in the wrappers, as plain values for a checkpoint."""
    return {
        name: {"mean": np.asarray(part.mean).tolist(), "var": np.asarray(part.var).tolist(), "count": float(part.count)}
        for name, part in _running_means(env)
    }


def load_statistics(env: Any, state: Statistics, *, freeze: bool) -> None:
    """Continue from the running means in `state`; with `freeze`, they stay as they are and rewards are not scaled."""
    for name, part in _running_means(env):
        if name in state:
            part.mean, part.var = (
                np.asarray(state[name][field], np.asarray(vars(part)[field]).dtype) for field in ("mean", "var")
            )
            part.count = state[name]["count"]
    for layer in layers(env) if freeze else ():
        if type(layer).__name__ == "VecNormalize":
            layer.training = layer.norm_reward = False
        elif isinstance(layer, NormalizeObservation | NormalizeReward):
            layer.update_running_mean = False
            if isinstance(layer, NormalizeReward):
                layer.return_rms.var = np.asarray(1.0 - layer.epsilon)  # divides by 1


def _running_means(env: Any) -> Iterator[tuple[str, Any]]:
    for depth, layer in enumerate(layers(env)):
        for name, value in vars(layer).items():
            parts = {f".{key}": part for key, part in value.items()} if isinstance(value, dict) else {"": value}
            for key, part in parts.items():
                if hasattr(part, "__dict__") and {"mean", "var", "count"} <= vars(part).keys():
                    yield f"{depth}.{name}{key}", part
