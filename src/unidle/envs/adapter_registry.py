"""Recognises the batched environments of other libraries and names the adapter for each.

A new library is one adapter class and one entry in `_ADAPTERS`. `matches` also runs in worker processes, so it looks at
attributes and class names and imports neither torch nor the library; `load` imports the adapter when it is needed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import gymnasium

from unidle.errors import UsageError


@dataclass(frozen=True)
class Adapter:
    """How one kind of batched environment is recognised and wrapped."""

    matches: Callable[[Any], bool]
    # On the host a VectorAdapter(env, name), on the device a DeviceEnv(env, name, seed, device, first_index,
    # obs_groups).
    load: Callable[[], Callable[..., Any]]
    on_device: bool = False


def adapter_for(env: Any) -> Adapter | None:
    """The adapter of a batched environment; None if `env` is a single one."""
    if hasattr(env, "async_reset") and hasattr(env, "recv"):
        raise UsageError("unidle creates EnvPool environments itself; use --env envpool:CartPole-v1 and --env-kwargs.")
    return next((adapter for adapter in _ADAPTERS if adapter.matches(env)), None)


def is_on_device(env: Any) -> bool:
    """Whether `env` is a batched environment on tensors."""
    return any(adapter.on_device and adapter.matches(env) for adapter in _ADAPTERS)


# -- Gymnasium vector environments on tensors --------------------------------------------------------------------------


def _is_tensor_vector_env(env: Any) -> bool:
    """Tensor environments have an attribute `device`, possibly below wrappers."""
    layer = env if isinstance(env, gymnasium.vector.VectorEnv) else None
    while layer is not None and not hasattr(layer, "device"):
        layer = getattr(layer, "env", None)
    return layer is not None


def _load_tensor_vector_env() -> Callable[..., Any]:
    from unidle.envs.device.simulators import TensorVectorEnv

    return TensorVectorEnv


# -- Isaac Lab, mjlab, Isaac Gym ---------------------------------------------------------------------------------------


def _is_isaac_env(env: Any) -> bool:
    inner = getattr(env, "unwrapped", env)
    is_vector_env = isinstance(env, gymnasium.vector.VectorEnv)
    return not is_vector_env and hasattr(inner, "device") and hasattr(inner, "num_envs")


def _load_isaac_env() -> Callable[..., Any]:
    from unidle.envs.device.simulators import IsaacEnv

    return IsaacEnv


# -- Gymnasium vector environments on NumPy arrays ---------------------------------------------------------------------


def _is_gymnasium_vector_env(env: Any) -> bool:
    return isinstance(env, gymnasium.vector.VectorEnv) and not _is_tensor_vector_env(env)


def _load_gymnasium_vector() -> Callable[..., Any]:
    from unidle.envs.vector.adapters import GymnasiumVector

    return GymnasiumVector


# -- Stable-Baselines3 -------------------------------------------------------------------------------------------------


def _is_sb3_vec_env(env: Any) -> bool:
    kinds = {(kind.__module__.partition(".")[0], kind.__name__) for kind in type(env).__mro__}
    # unidle.sb3 has vector environments with the same interface.
    return bool(kinds & {("stable_baselines3", "VecEnv"), ("unidle", "VecEnv")}) and not _is_isaac_env(env)


def _load_sb3_vector() -> Callable[..., Any]:
    from unidle.envs.vector.adapters import Sb3Vector

    return Sb3Vector


_ADAPTERS = [
    Adapter(_is_tensor_vector_env, _load_tensor_vector_env, on_device=True),
    Adapter(_is_isaac_env, _load_isaac_env, on_device=True),
    Adapter(_is_gymnasium_vector_env, _load_gymnasium_vector),
    Adapter(_is_sb3_vec_env, _load_sb3_vector),
]
