"""Converts the networks of a model that Stable-Baselines3 saved.

Its zip has weights, which torch reads without running code, and JSON. What is pickled in that JSON is never read.
"""

from __future__ import annotations

import json
import re
import zipfile
from typing import Any

import torch
from gymnasium import spaces
from torch import Tensor

from unidle.algos.registry import AnyPolicy
from unidle.errors import UsageError
from unidle.sb3.zip_file import read_tensors

Weights = dict[str, Tensor]

_ARGUMENTS = (
    *("n_steps", "batch_size", "n_epochs", "gamma", "gae_lambda", "ent_coef", "vf_coef", "max_grad_norm", "seed"),
    *("normalize_advantage", "target_kl", "use_sde", "learning_rate", "tau", "buffer_size", "learning_starts"),
    *("gradient_steps", "policy_delay", "target_policy_noise", "target_noise_clip", "target_update_interval"),
    *("exploration_fraction", "exploration_final_eps", "policy_kwargs", "clip_range", "clip_range_vf", "train_freq"),
)
_CONSTANT = re.compile(r"ConstantSchedule\(val=([^)]+)\)")
_CNN = {"convolutions.0": "cnn.0", "convolutions.2": "cnn.2", "convolutions.4": "cnn.4", "project.0": "linear.0"}


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
    leaves = policy.obs_layout.leaves
    if len(leaves) != 1 or isinstance(policy.obs_layout.space, spaces.Dict) or "actor.log_std" in weights:
        raise UsageError(
            "Only networks for a single observation (no Dict), without gSDE, can be loaded from Stable-Baselines3; "
            "train this one again."
        )
    own = {name: dict(part) for name, part in state["algo"].items() if isinstance(part, dict)}
    try:
        changed = _CONVERTERS[algo](own, weights, policy)
    except KeyError as error:
        raise UsageError(
            f"The model of Stable-Baselines3 has no {error.args[0]}: it has another network; pass the policy_kwargs "
            "that it was created with to load."
        ) from None
    for name, part in changed.items():
        own_part = state["algo"][name]
        pairs = [(part[key], own_part[key]) for key in part] if isinstance(part, dict) else [(part, own_part)]
        for value, expected in pairs:
            if value.shape != expected.shape:
                raise UsageError(
                    f"The model of Stable-Baselines3 has other layers ({name}: {tuple(value.shape)}, not "
                    f"{tuple(expected.shape)}); pass the env and the policy_kwargs that it was created with to load."
                )
    return {**state, "algo": {**state["algo"], **changed}}


def _layers(ours: Weights, weights: Weights, pairs: dict[str, str]) -> Weights:
    """`ours` with the layers `pairs`, ours → theirs."""
    taken = {
        f"{name}.{part}": weights[f"{theirs}.{part}"] for name, theirs in pairs.items() for part in ("weight", "bias")
    }
    return {**ours, **taken}


def _sequence(ours: Weights, name: str, theirs: str, head: str | None = None) -> dict[str, str]:
    """Linear layers `name`.0, `name`.2, … of ours, and `head` after them if it is the last of theirs."""
    count = sum(key.startswith(f"{name}.") and key.endswith(".weight") for key in ours)
    pairs = {f"{name}.{2 * index}": f"{theirs}.{2 * index}" for index in range(count)}
    return pairs if head is None else {**pairs, head: f"{theirs}.{2 * count}"}


def _cnn(ours: Weights, theirs: str) -> dict[str, str]:
    has_cnn = any(name.startswith("encoder.cnns.0.") for name in ours)
    return {f"encoder.cnns.0.{name}": f"{theirs}.{other}" for name, other in _CNN.items()} if has_cnn else {}


def _ensemble(ours: Weights, weights: Weights, theirs: str) -> Weights:
    """Critics [E, in, out] of qf0, qf1, …."""
    taken = _layers(ours, weights, _cnn(ours, f"{theirs}.features_extractor"))
    members = range(len(ours["ensemble.weights.0"]))
    for layer in range(sum(name.startswith("ensemble.weights.") for name in ours)):
        at = [f"{theirs}.qf{member}.{2 * layer}" for member in members]
        taken[f"ensemble.weights.{layer}"] = torch.stack([weights[f"{name}.weight"].T for name in at])
        taken[f"ensemble.biases.{layer}"] = torch.stack([weights[f"{name}.bias"][None] for name in at])
    return taken


def _ppo(own: dict[str, Weights], weights: Weights, policy: AnyPolicy) -> dict[str, Any]:
    ours = own["policy"]
    pairs = {
        **_cnn(ours, "features_extractor"),
        **_sequence(ours, "actor_trunk", "mlp_extractor.policy_net"),
        **_sequence(ours, "critic_trunk", "mlp_extractor.value_net"),
        "actor_head": "action_net",
        "critic_head": "value_net",
    }
    taken = _layers(ours, weights, pairs)
    if policy.distribution.reals:
        # Theirs are in units of actions, ours of half the action range.
        scale, shift = policy.distribution.scale.cpu(), policy.distribution.shift.cpu()
        taken["actor_head.weight"] = taken["actor_head.weight"] / scale[:, None]
        taken["actor_head.bias"] = (taken["actor_head.bias"] - shift) / scale
        taken["log_std"] = weights["log_std"] - scale.log()
    return {"policy": taken}


def _sac(own: dict[str, Weights], weights: Weights, policy: AnyPolicy) -> dict[str, Any]:
    ours = own["policy"]
    pairs = {**_cnn(ours, "actor.features_extractor"), **_sequence(ours, "actor_trunk", "actor.latent_pi")}
    taken = _layers(ours, weights, pairs)
    for part in ("weight", "bias"):
        taken[f"actor_head.{part}"] = torch.cat([weights[f"actor.{head}.{part}"] for head in ("mu", "log_std")])
    changed: dict[str, Any] = {
        "policy": taken,
        "critics": _ensemble(own["critics"], weights, "critic"),
        "targets": _ensemble(own["targets"], weights, "critic_target"),
    }
    if "log_ent_coef" in weights:
        changed["log_temperature"] = weights["log_ent_coef"].view(1, 1)
    return changed


def _td3(own: dict[str, Weights], weights: Weights, policy: AnyPolicy) -> dict[str, Any]:
    changed: dict[str, Any] = {}
    for name, theirs in (("policy", "actor"), ("target_policy", "actor_target")):
        pairs = _cnn(own[name], f"{theirs}.features_extractor")
        pairs |= _sequence(own[name], "actor_trunk", f"{theirs}.mu", "actor_head")
        changed[name] = _layers(own[name], weights, pairs)
    for name, theirs in (("critics", "critic"), ("target_critics", "critic_target")):
        changed[name] = _ensemble(own[name], weights, theirs)
    return changed


def _dqn(own: dict[str, Weights], weights: Weights, policy: AnyPolicy) -> dict[str, Any]:
    changed: dict[str, Any] = {}
    for name, theirs in (("policy", "q_net"), ("target", "q_net_target")):
        pairs = _cnn(own[name], f"{theirs}.features_extractor")
        pairs |= _sequence(own[name], "trunk", f"{theirs}.q_net", "head")
        changed[name] = _layers(own[name], weights, pairs)
    return changed


_CONVERTERS = {"ppo": _ppo, "sac": _sac, "td3": _td3, "dqn": _dqn}
