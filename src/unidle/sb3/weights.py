"""Networks under Stable-Baselines3's names: one table per algorithm, which is read in both directions."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from gymnasium import spaces
from torch import Tensor

from unidle.algos.registry import AnyPolicy
from unidle.errors import UsageError

Weights = dict[str, Tensor]

_CNN = {"convolutions.0": "cnn.0", "convolutions.2": "cnn.2", "convolutions.4": "cnn.4", "project.0": "linear.0"}
_OWN_CNN, _OWN_EXTRACTOR = "encoder.cnns.0.", "encoder.module.module."


@dataclass
class _Network:
    """One of the algorithm's networks: how its tensors are called in Stable-Baselines3's policy."""

    part: str  # in the algorithm's state
    tensors: dict[str, str] = field(default_factory=dict)  # ours → theirs
    critics: str | None = None  # theirs: the module with qf0, qf1, … for our [E, in, out]
    joint_head: tuple[str, str] | None = None  # theirs: two layers for our `actor_head`
    copies: tuple[str, ...] = ()  # further names of theirs for the features extractor


def to_sb3(algo: str, state: dict[str, Any], policy: AnyPolicy) -> Weights:
    """The weights in an algorithm's `state` as the state dict of Stable-Baselines3's policy."""
    require_known(algo, state, policy)
    found: Weights = {}
    for network in _networks(algo, state):
        own: Weights = state[network.part]
        found |= {theirs: own[ours] for ours, theirs in network.tensors.items()}
        if network.joint_head is not None:
            for kind in ("weight", "bias"):
                halves = own[f"actor_head.{kind}"].chunk(2)
                found |= {f"{name}.{kind}": half for name, half in zip(network.joint_head, halves)}
        if network.critics is not None:
            for layer in range(_layer_count(own)):
                for member, weight in enumerate(own[f"ensemble.weights.{layer}"]):
                    name = f"{network.critics}.qf{member}.{2 * layer}"
                    found[f"{name}.weight"] = weight.T
                    found[f"{name}.bias"] = own[f"ensemble.biases.{layer}"][member, 0]
        for copy in network.copies:
            prefix = "features_extractor."
            found |= {copy + name: value for name, value in found.items() if name.startswith(prefix)}
    reals = policy.distribution.reals
    if algo == "sac" and "log_std" in state["policy"]:  # gSDE
        found["actor.log_std"] = state["policy"]["log_std"].view(-1, reals)
    if algo == "ppo" and reals:
        # Theirs are in units of actions, ours of half the action range.
        device = found["action_net.bias"].device
        scale, shift = policy.distribution.scale.to(device), policy.distribution.shift.to(device)
        found["action_net.weight"] = found["action_net.weight"] * scale[:, None]
        found["action_net.bias"] = found["action_net.bias"] * scale + shift
        log_std = state["policy"]["log_std"]
        found["log_std"] = (log_std if len(log_std) == reals else log_std.view(-1, reals)) + scale.log()
    return {name: value.detach().clone() for name, value in found.items()}


def from_sb3(algo: str, state: dict[str, Any], policy: AnyPolicy, weights: Weights) -> dict[str, Weights]:
    """The networks of an algorithm's `state` with these weights; KeyError names one that is missing."""
    require_known(algo, state, policy)
    changed: dict[str, Weights] = {}
    for network in _networks(algo, state):
        own: Weights = dict(state[network.part])
        own |= {ours: weights[theirs] for ours, theirs in network.tensors.items()}
        if network.joint_head is not None:
            for kind in ("weight", "bias"):
                own[f"actor_head.{kind}"] = torch.cat([weights[f"{name}.{kind}"] for name in network.joint_head])
        if network.critics is not None:
            members = range(len(own["ensemble.weights.0"]))
            for layer in range(_layer_count(own)):
                names = [f"{network.critics}.qf{member}.{2 * layer}" for member in members]
                own[f"ensemble.weights.{layer}"] = torch.stack([weights[f"{name}.weight"].T for name in names])
                own[f"ensemble.biases.{layer}"] = torch.stack([weights[f"{name}.bias"][None] for name in names])
        changed[network.part] = own
    if algo == "sac" and "log_std" in state["policy"]:
        changed["policy"]["log_std"] = weights["actor.log_std"].flatten()
    if algo == "ppo" and policy.distribution.reals:
        device = weights["action_net.bias"].device
        scale, shift = policy.distribution.scale.to(device), policy.distribution.shift.to(device)
        in_our_units = {
            "action_net.weight": ("actor_head.weight", lambda weight: weight / scale[:, None]),
            "action_net.bias": ("actor_head.bias", lambda bias: (bias - shift) / scale),
            "log_std": ("log_std", lambda log_std: (log_std - scale.log()).flatten()),
        }
        before = to_sb3(algo, state, policy)
        for theirs, (ours, converted) in in_our_units.items():
            is_same = torch.equal(weights[theirs].cpu(), before[theirs].cpu())  # then without rounding
            changed["policy"][ours] = state["policy"][ours] if is_same else converted(weights[theirs])
    return changed


def is_known(algo: str, state: dict[str, Any], policy: AnyPolicy) -> bool:
    """Whether Stable-Baselines3 has networks with the same layers, and observations in the same order."""
    for network in _networks(algo, state):
        own: Weights = state[network.part]
        known = {*network.tensors, *(("log_std",) if algo in ("ppo", "sac") else ())}
        if network.joint_head is not None:
            known |= {"actor_head.weight", "actor_head.bias"}
        left = [name for name in own if name not in known and not name.startswith(("distribution.", "ensemble."))]
        if left or not own.keys() >= network.tensors.keys():
            return False
    leaves = policy.obs_layout.leaves
    is_vector = all(isinstance(leaf.space, spaces.Box) and not leaf.is_image for leaf in leaves)
    return len(leaves) == 1 or is_vector


def require_known(algo: str, state: dict[str, Any], policy: AnyPolicy) -> None:
    """UsageError if not."""
    if not is_known(algo, state, policy):
        raise UsageError(
            "Stable-Baselines3 has no policy with these networks (images in Dict observations, an LSTM, or settings of "
            "unidle such as normalize_obs); use predict, get_parameters and set_parameters."
        )


# -- the tables --------------------------------------------------------------------------------------------------------


def _networks(algo: str, state: dict[str, Any]) -> list[_Network]:
    return _TABLES[algo](state)


def _layers(pairs: dict[str, str]) -> dict[str, str]:
    """The tensors of layers, ours → theirs."""
    return {f"{name}.{kind}": f"{theirs}.{kind}" for name, theirs in pairs.items() for kind in ("weight", "bias")}


def _sequence(own: Weights, name: str, theirs: str, head: str | None = None) -> dict[str, str]:
    """Linear layers `name`.0, `name`.2, … of ours, and `head` after them if it is the last of theirs."""
    count = sum(key.startswith(f"{name}.") and key.endswith(".weight") for key in own)
    pairs = {f"{name}.{2 * index}": f"{theirs}.{2 * index}" for index in range(count)}
    return _layers(pairs if head is None else {**pairs, head: f"{theirs}.{2 * count}"})


def _features(own: Weights, theirs: str) -> dict[str, str]:
    """The features extractor: a CNN, or the user's."""
    found = {name: f"{theirs}{name.removeprefix(_OWN_EXTRACTOR)}" for name in own if name.startswith(_OWN_EXTRACTOR)}
    if any(name.startswith(_OWN_CNN) for name in own):
        found = _layers({f"{_OWN_CNN}{name}": f"{theirs}{other}" for name, other in _CNN.items()})
    return found


def _layer_count(own: Weights) -> int:
    return sum(name.startswith("ensemble.weights.") for name in own)


def _critics(state: dict[str, Any], part: str, theirs: str) -> _Network:
    return _Network(part, _features(state[part], f"{theirs}.features_extractor."), critics=theirs)


def _ppo(state: dict[str, Any]) -> list[_Network]:
    own = state["policy"]
    tensors = {
        **_features(own, "features_extractor."),
        **_sequence(own, "actor_trunk", "mlp_extractor.policy_net"),
        **_sequence(own, "critic_trunk", "mlp_extractor.value_net"),
        **_layers({"actor_head": "action_net", "critic_head": "value_net"}),
    }
    return [_Network("policy", tensors, copies=("pi_", "vf_"))]


def _sac(state: dict[str, Any]) -> list[_Network]:
    own = state["policy"]
    tensors = _features(own, "actor.features_extractor.") | _sequence(own, "actor_trunk", "actor.latent_pi")
    actor = _Network("policy", tensors, joint_head=("actor.mu", "actor.log_std"))
    if "log_std" in own:  # gSDE
        actor = _Network("policy", tensors | _layers({"actor_head": "actor.mu.0"}))
    return [actor, _critics(state, "critics", "critic"), _critics(state, "targets", "critic_target")]


def _td3(state: dict[str, Any]) -> list[_Network]:
    actors = []
    for part, theirs in (("policy", "actor"), ("target_policy", "actor_target")):
        own = state[part]
        tensors = _features(own, f"{theirs}.features_extractor.")
        actors.append(_Network(part, tensors | _sequence(own, "actor_trunk", f"{theirs}.mu", "actor_head")))
    return [*actors, _critics(state, "critics", "critic"), _critics(state, "target_critics", "critic_target")]


def _dqn(state: dict[str, Any]) -> list[_Network]:
    found = []
    for part, theirs in (("policy", "q_net"), ("target", "q_net_target")):
        own = state[part]
        tensors = _features(own, f"{theirs}.features_extractor.")
        found.append(_Network(part, tensors | _sequence(own, "trunk", f"{theirs}.q_net", "head")))
    return found


_TABLES = {"ppo": _ppo, "sac": _sac, "td3": _td3, "dqn": _dqn}
