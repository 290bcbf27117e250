"""Converts Stable-Baselines3's settings of state-dependent exploration (gSDE) to unidle's."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from unidle.config.fields import coerce, owners_of
from unidle.errors import UsageError

_ONLY_WITH_SDE = {"sde_sample_freq", "use_expln", "use_sde_at_warmup"}


def _use_sde(value: Any, source: str, notes: list[str], algo: str) -> dict[str, Any]:
    if algo in owners_of("use_sde"):
        return {"use_sde": value}
    if value:
        raise UsageError(f"{source}: `use_sde: {value}` needs PPO or SAC; {algo.upper()} has its own exploration.")
    return {}


def _sample_freq(value: Any, source: str, notes: list[str], algo: str) -> dict[str, Any]:
    """Stable-Baselines3 writes -1 for: only at the start of a rollout."""
    steps = coerce("sde_sample_freq", value, source)
    return _if_owned("sde_sample_freq", steps if steps is not None and steps > 0 else None, source, notes, algo)


def _if_owned(key: str, value: Any, source: str, notes: list[str], algo: str) -> dict[str, Any]:
    return {key: value} if algo in owners_of(key) else {}


READERS: dict[str, Callable[[Any, str, list[str], str], dict[str, Any]]] = {
    "use_sde": _use_sde,
    "sde_sample_freq": _sample_freq,
    "use_expln": partial(_if_owned, "use_expln"),
    "use_sde_at_warmup": partial(_if_owned, "use_sde_at_warmup"),
}


def without_effect(values: dict[str, Any], algo: str) -> set[str]:
    """The settings in `values` that have no effect, because gSDE is off; PPO's `log_std_init` always has one."""
    if values.get("use_sde"):
        return set()
    return values.keys() & (_ONLY_WITH_SDE | (set() if algo == "ppo" else {"log_std_init"}))
