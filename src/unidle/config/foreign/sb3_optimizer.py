"""Converts Stable-Baselines3's `optimizer_class` and `optimizer_kwargs` to unidle's settings."""

from __future__ import annotations

import typing
from typing import Any

from unidle.config.settings import OptimizerName
from unidle.errors import UsageError

KEYS = ("optimizer_class", "optimizer_kwargs")
_RENAMED = {
    "eps": "adam_eps",
    "betas": "adam_betas",
    "alpha": "rmsprop_alpha",
    "momentum": "momentum",
    "weight_decay": "weight_decay",
}
_ONLY_SPEED = {"foreach", "fused", "capturable", "differentiable"}
_TORCH_EPS, _SB3_EPS = 1e-8, 1e-5


def optimizer(given: dict[str, Any], source: str, algo: str) -> dict[str, Any]:
    """Unidle's settings for the keys in `KEYS` in `given`, which are `policy_kwargs`."""
    if not any(key in given for key in KEYS):
        return {}
    name, kwargs = str(given.get("optimizer_class", "Adam")), given.get("optimizer_kwargs")
    kind = name.rpartition(".")[2].lower()  # th.optim.AdamW
    known = typing.get_args(OptimizerName)
    if kind not in known:
        _refuse("optimizer_class", name, source, f"unidle has {', '.join(known)}")
    if kwargs is not None and not isinstance(kwargs, dict):
        raise UsageError(f"{source}: `optimizer_kwargs` must be a mapping or dict(…), not {kwargs!r}.")
    values: dict[str, Any] = {} if kind == "adam" else {"optimizer": kind}
    if kind != "sgd":
        # Stable-Baselines3's PPO sets the epsilon only of Adam without any arguments.
        is_default = algo == "ppo" and kind == "adam" and kwargs is None
        values["adam_eps"] = _SB3_EPS if is_default else _TORCH_EPS
    for key, value in (kwargs or {}).items():
        if key in _RENAMED:
            values[_RENAMED[key]] = value
        elif value and key not in _ONLY_SPEED:
            _refuse(f"optimizer_kwargs.{key}", value, source, "unidle has no such setting")
    return values


def _refuse(key: str, value: Any, source: str, reason: str) -> None:
    raise UsageError(
        f"{source}: `policy_kwargs.{key}: {value}` is not supported: {reason}; remove it to train without."
    )
