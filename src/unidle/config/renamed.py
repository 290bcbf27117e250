"""Former and other names of settings, and config files from before each algorithm had its own settings."""

from __future__ import annotations

from typing import Any

from unidle.config.fields import owners_of
from unidle.errors import UsageError

RENAMED = {
    "network_arch": "net_arch",
    "return_steps": "n_step",
    "prioritised": "per",
    "priority_alpha": "per_alpha",
    "priority_beta": "per_beta",
    "updates_per_step": "utd_ratio",
    "initial": "weight_init",
    "duelling": "dueling",
    "double": "double_dqn",
    "target_every": "target_update_interval",
    "epsilon_final": "exploration_final_eps",
    "epsilon_fraction": "exploration_fraction",
    "save_replay": "save_replay_buffer",
    "temperature": "ent_coef",
}

# Names that other libraries have for settings: of flags, and of keyword arguments in Python.
ALIASES = {
    "num_envs": "n_envs",
    "n_parallel_envs": "n_envs",
    "total_timesteps": "timesteps",
    "lr": "learning_rate",
}


def without_aliases(settings: dict[str, Any]) -> dict[str, Any]:
    """`settings` with aliases replaced; UsageError if a setting is given under two names."""
    named: dict[str, Any] = {}
    for name, value in settings.items():
        current = ALIASES.get(name, name)
        if current in named:
            other = next(alias for alias in settings if ALIASES.get(alias) == current)
            raise UsageError(f"`{other}` is another name of `{current}`, and both are given; leave out `{other}`.")
        named[current] = value
    return named


def with_current_names(values: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """`values` with former names replaced, and a message for each; a value under the current name wins."""
    current = {RENAMED[name]: value for name, value in values.items() if name in RENAMED}
    current |= {name: value for name, value in values.items() if name not in RENAMED}
    return current, [renaming(name) for name in values if name in RENAMED]


def renaming(name: str) -> str:
    """The message about a former name."""
    return f"`{name}` is now `{RENAMED[name]}`; using it."


def without_other_algorithms(values: dict[str, Any]) -> dict[str, Any]:
    """The values of a config file, without the settings of other algorithms if the file lists those of all.

    Versions in which all algorithms shared one settings class wrote such files.
    """
    if not {"n_epochs", "buffer_size"} <= values.keys():
        return values
    algo = values.get("algo", "ppo")
    values = dict(values)
    if "temperature" in values:
        # `temperature` was SAC's, now `ent_coef`; the file's `ent_coef` was PPO's.
        values.pop("ent_coef" if algo == "sac" else "temperature", None)
    if algo == "ppo":
        values.pop("adam_eps", None)  # PPO ignored it and used 1e-5
    if algo == "sac":
        values.pop("log_std_init", None)  # it was only PPO's
    owners = {name: owners_of(RENAMED.get(name, name)) for name in values}
    return {name: value for name, value in values.items() if algo in owners[name] or not owners[name]}
