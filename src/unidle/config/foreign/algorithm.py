"""Which algorithm a Stable-Baselines3 or rl-zoo config file is for: by its name, else by its settings."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from unidle.config.settings import RECIPES
from unidle.errors import UsageError

_OTHERS = ("a2c", "ars", "crossq", "ddpg", "her", "ppg", "qrdqn", "tqc", "trpo")
# Settings that only one algorithm has.
_KEYS = {
    "dqn": {"exploration_fraction", "exploration_initial_eps", "exploration_final_eps"},
    "td3": {"policy_delay", "target_policy_noise", "target_noise_clip"},
    "ppo": {"n_epochs", "clip_range", "clip_range_vf", "target_kl", "n_minibatches"},
    "a2c": {"use_rms_prop", "rms_prop_eps"},
    "trpo": {"cg_max_steps", "cg_damping", "line_search_max_iter", "n_critic_updates", "sub_sampling_factor"},
    "ars": {"n_delta", "n_top", "delta_std", "alive_bonus_offset"},
    "tqc": {"top_quantiles_to_drop_per_net"},
}
_OFF_POLICY_KEYS = {"buffer_size", "learning_starts", "train_freq", "gradient_steps", "tau", "replay_buffer_class"}


def algorithm_of(path: Path, tree: dict[str, Any], chosen: str | None) -> str:
    """The algorithm that the file is for, or `chosen`, that of --algo; UsageError if they differ or it is unclear."""
    found = _in_name(path) or tree.get("algo") or _in_settings(tree)
    if found in _OTHERS:
        raise UsageError(
            f"{path} is for {str(found).upper()}, which unidle does not have; use a file for one of "
            f"{', '.join(RECIPES).upper()}."
        )
    if found and chosen and found != chosen:
        raise UsageError(f"{path} is for {str(found).upper()}; remove --algo {chosen}, or use a file for it.")
    if found or chosen:
        return str(found or chosen)
    if _OFF_POLICY_KEYS & tree.keys():
        raise UsageError(f"{path} does not say whether it is for SAC, TD3 or DQN; add --algo sac, td3 or dqn.")
    return "ppo"


def is_recurrent(path: Path) -> bool:
    """Whether the file is named after RecurrentPPO, as rl-zoo's ppo_lstm.yml."""
    return "lstm" in _words(path)


def _words(path: Path) -> list[str]:
    return re.split(r"[^a-z0-9]+", path.stem.lower())


def _in_name(path: Path) -> str | None:
    return next((word for word in _words(path) if word in RECIPES or word in _OTHERS), None)


def _in_settings(tree: dict[str, Any]) -> str | None:
    found = [algo for algo, keys in _KEYS.items() if keys & tree.keys()]
    if len(found) == 1:
        return found[0]
    return "sac" if str(tree.get("ent_coef", "")).startswith("auto") else None
