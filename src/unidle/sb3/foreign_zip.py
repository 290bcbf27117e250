"""Converts the networks of a model that Stable-Baselines3 saved.

Its zip has weights, which torch reads without running code, and JSON. What is pickled in that JSON is never read.
"""

from __future__ import annotations

import json
import re
import zipfile
from typing import Any

from unidle.algos.registry import AnyPolicy
from unidle.errors import UsageError
from unidle.sb3.weights import Weights, from_sb3, is_known
from unidle.sb3.zip_file import read_tensors

_ARGUMENTS = (
    *("n_steps", "batch_size", "n_epochs", "gamma", "gae_lambda", "ent_coef", "vf_coef", "max_grad_norm", "seed"),
    *("normalize_advantage", "target_kl", "use_sde", "learning_rate", "tau", "buffer_size", "learning_starts"),
    *("gradient_steps", "policy_delay", "target_policy_noise", "target_noise_clip", "target_update_interval"),
    *("exploration_fraction", "exploration_final_eps", "policy_kwargs", "clip_range", "clip_range_vf", "train_freq"),
)
_CONSTANT = re.compile(r"ConstantSchedule\(val=([^)]+)\)")


def read_sb3_zip(archive: zipfile.ZipFile, shown: object) -> tuple[dict[str, Any], list[str], Weights]:
    """The arguments that the model was created with, those that are pickled by name, and the weights."""
    names = archive.namelist()
    if "data" not in names or "policy.pth" not in names:
        raise UsageError(f"{shown} is not a model of unidle or Stable-Baselines3; use a zip that `save` wrote.")
    try:
        data = json.loads(archive.read("data"))
        weights: Weights = dict(read_tensors(archive, "policy.pth"))
        variables = read_tensors(archive, "pytorch_variables.pth") if "pytorch_variables.pth" in names else None
    except Exception as error:
        raise UsageError(
            f"{shown} cannot be read without running code ({type(error).__name__}); save it again."
        ) from None
    arguments = {name: _plain(data[name], name) for name in _ARGUMENTS if data.get(name) is not None}
    pickled = [name for name, value in arguments.items() if value is None]
    arguments = {name: value for name, value in arguments.items() if value is not None}
    arguments["policy"] = "CnnPolicy" if any("features_extractor.cnn." in name for name in weights) else "MlpPolicy"
    if isinstance(variables, dict) and "log_ent_coef" in variables:
        arguments["ent_coef"] = "auto"
        weights["log_ent_coef"] = variables["log_ent_coef"]
    return arguments, pickled, weights


def _plain(value: Any, name: str) -> Any:
    """An argument without what is pickled in it; None if there is nothing else."""
    if not isinstance(value, dict) or ":serialized:" not in value:
        return value
    if name == "policy_kwargs":  # its entries are beside the pickled whole, classes as "<class 'a.b.C'>"
        entries = {key: part for key, part in value.items() if not key.startswith(":")}
        return {key: part.split("'")[1] if str(part).startswith("<class '") else part for key, part in entries.items()}
    constant = _CONSTANT.fullmatch(str(value.get("value_schedule")))
    return float(constant[1]) if constant else None


def convert_weights(algo: str, state: dict[str, Any], policy: AnyPolicy, weights: Weights) -> dict[str, Any]:
    """The untrained `state` with these weights; its optimisers are reset."""
    if not is_known(algo, state["algo"], policy):
        raise UsageError(
            "Networks for images in Dict observations cannot be loaded from Stable-Baselines3; train this one again."
        )
    changed: dict[str, Any]
    try:
        changed = dict(from_sb3(algo, state["algo"], policy, weights))
    except KeyError as error:
        raise UsageError(
            f"The model of Stable-Baselines3 has no {error.args[0]}: it has another network; pass the policy_kwargs "
            "that it was created with to load."
        ) from None
    for name, part in changed.items():
        own_part = state["algo"][name]
        for key, value in part.items():
            if value.shape != own_part[key].shape:
                raise UsageError(
                    f"The model of Stable-Baselines3 has other layers ({name}: {tuple(value.shape)}, not "
                    f"{tuple(own_part[key].shape)}); pass the env and the policy_kwargs that it was created with to "
                    "load."
                )
    if "log_ent_coef" in weights:
        changed["log_temperature"] = weights["log_ent_coef"].view(1, 1)
    return {**state, "algo": {**state["algo"], **changed}}
