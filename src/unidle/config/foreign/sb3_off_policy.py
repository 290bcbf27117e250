"""Converts settings of Stable-Baselines3's SAC, TD3 and DQN to unidle's."""

from __future__ import annotations

from typing import Any

from unidle.config.fields import coerce
from unidle.config.settings import DQNRecipe, OffPolicyRecipe
from unidle.errors import UsageError

# Stable-Baselines3's defaults, where unidle's differ. Steps of all environments: train_freq, target_update_interval.
DEFAULTS: dict[str, dict[str, Any]] = {
    "sac": {"learning_starts": 100},
    "td3": {"exploration_noise": 0.0},
    "dqn": {
        "learning_rate": 1e-4,
        "buffer_size": 1_000_000,
        "learning_starts": 100,
        "batch_size": 32,
        "exploration_fraction": 0.1,
        "exploration_final_eps": 0.05,
        "double_dqn": False,
    },
}
_TRAIN_FREQ = {"sac": 1, "td3": 1, "dqn": 4}
# Read together by `schedule`.
KEYS = ("train_freq", "gradient_steps", "target_update_interval", "noise_type", "noise_std")


def schedule(algo: str, given: dict[str, Any], n_envs: int, source: str) -> dict[str, Any]:
    """Unidle's settings for the keys in `KEYS` in `given`."""
    train_freq = given.get("train_freq", _TRAIN_FREQ[algo])
    if isinstance(train_freq, (list, tuple)) and len(train_freq) == 2 and train_freq[1] == "step":
        train_freq = train_freq[0]
    if isinstance(train_freq, (list, tuple)):
        raise UsageError(
            f"{source}: `train_freq: {list(train_freq)}` learns after whole episodes, but unidle after a fixed number "
            "of steps; write a number of steps."
        )
    steps = _count("train_freq", train_freq, source)
    updates = coerce("n_steps", given.get("gradient_steps", 1), f"{source}: `gradient_steps`")
    per_iteration = steps * n_envs
    updates = per_iteration if updates < 0 else updates
    values: dict[str, Any] = {"n_steps": steps, "utd_ratio": updates / per_iteration}
    interval = given.get("target_update_interval", 10_000 if algo == "dqn" else 1)
    if algo == "dqn":
        # Stable-Baselines3 counts steps, and looks only between rollouts; unidle counts updates.
        interval = _count("target_update_interval", interval, source)
        values["target_update_interval"] = max(1, round(max(interval, per_iteration) * updates / per_iteration))
    elif interval != 1:
        raise UsageError(
            f"{source}: `target_update_interval` is {interval}, but unidle's {algo.upper()} updates its target "
            "networks with every update; remove it, or lower tau."
        )
    return values | _noise(algo, given, source)


def arguments_of(recipe: OffPolicyRecipe) -> dict[str, Any]:
    """The reverse of `schedule`."""
    found: dict[str, Any] = {"train_freq": recipe.n_steps, "gradient_steps": round(recipe.updates_per_iteration)}
    if isinstance(recipe, DQNRecipe):
        found["target_update_interval"] = round(recipe.target_update_interval / recipe.utd_ratio)
    return found


def _noise(algo: str, given: dict[str, Any], source: str) -> dict[str, Any]:
    kind, deviation = given.get("noise_type"), given.get("noise_std", 0.0)
    if kind in (None, "none"):
        return {}
    if algo != "td3":
        raise UsageError(f"{source}: `noise_type: {kind}` needs TD3; unidle's {algo.upper()} adds no noise to actions.")
    if kind != "normal":
        raise UsageError(f"{source}: `noise_type: {kind}` is not supported; unidle's TD3 has `noise_type: normal`.")
    return {"exploration_noise": deviation}


def _count(key: str, value: Any, source: str) -> int:
    count: int = coerce("n_steps", value, f"{source}: `{key}`")
    if count < 1:
        raise UsageError(f"{source}: `{key}` is {value}; it must be at least 1.")
    return count
