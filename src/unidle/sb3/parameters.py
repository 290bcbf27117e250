"""What `get_parameters` returns and `set_parameters` takes: weights by Stable-Baselines3's names, and optimisers.

Policies that Stable-Baselines3 does not have keep unidle's names.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from unidle.algos.registry import AnyPolicy
from unidle.engine.checkpoint.snapshot import snapshot
from unidle.sb3.errors import ArgumentError, WeightsError
from unidle.sb3.weights import from_sb3, is_known, to_sb3

_OPTIMISERS = {"actor": "actor.optimizer", "critics": "critic.optimizer", "temperature": "ent_coef_optimizer"}


def parameters_of(algo: str, state: dict[str, Any], policy: AnyPolicy) -> dict[str, Any]:
    """Copies of the weights and the optimisers' states in an algorithm's `state`."""
    if not is_known(algo, state, policy):
        return snapshot({name: value for name, value in state.items() if name != "experience"})
    return snapshot({"policy": to_sb3(algo, state, policy), **_optimisers(state)})


def with_parameters(
    algo: str, state: dict[str, Any], policy: AnyPolicy, given: Mapping[str, Any], *, exact_match: bool
) -> dict[str, Any]:
    """The `state` with parameters as `parameters_of` returns them; some of them without `exact_match`."""
    own = parameters_of(algo, state, policy)
    if given.keys() - own.keys() or (exact_match and own.keys() - given.keys()):
        raise ArgumentError(
            f"The parameters are {', '.join(sorted(given))}, but this model has {', '.join(sorted(own))}; pass those "
            "that get_parameters returns."
        )
    merged = {name: _merged(name, own[name], given.get(name), exact_match) for name in own}
    if not is_known(algo, state, policy):
        return {**state, **snapshot(merged)}
    changed: dict[str, Any] = {**state, **from_sb3(algo, state, policy, merged["policy"])}
    if "optimiser" in state:
        changed["optimiser"] = merged["policy.optimizer"]
    else:
        optimisers = {name: merged[_OPTIMISERS[name]] for name in state["optimisers"]}
        changed["optimisers"] = optimisers
    return snapshot({name: value for name, value in changed.items() if name != "experience"}) | (
        {"experience": state["experience"]} if "experience" in state else {}
    )


def _optimisers(state: dict[str, Any]) -> dict[str, Any]:
    if "optimiser" in state:
        return {"policy.optimizer": state["optimiser"]}
    return {_OPTIMISERS[name]: value for name, value in state["optimisers"].items()}


def _merged(name: str, own: Any, given: Any, exact_match: bool) -> Any:
    """`own` with the tensors in `given`, which have the same shapes."""
    if given is None:
        return own
    if not isinstance(own, dict):
        return given
    unknown, missing = given.keys() - own.keys(), own.keys() - given.keys()
    if exact_match and (unknown or missing):
        raise WeightsError(
            f"`{name}` has {_listed(unknown) or 'no other tensors'} that this model has not, and lacks "
            f"{_listed(missing) or 'none'}; pass what get_parameters returns, or exact_match=False."
        )
    for key in given.keys() & own.keys():
        mine, theirs = own[key], given[key]
        if isinstance(mine, torch.Tensor) and mine.shape != theirs.shape:
            raise WeightsError(
                f"`{name}`: {key} has shape {tuple(theirs.shape)}, but this model has {tuple(mine.shape)}; pass "
                "parameters of the same network."
            )
    return own | {key: _on_device_of(own[key], value) for key, value in given.items() if key in own}


def _on_device_of(mine: Any, value: Any) -> Any:
    return value.to(mine.device) if isinstance(mine, torch.Tensor) else value


def _listed(names: set[str]) -> str:
    return ", ".join(sorted(names)[:3]) + (" …" if len(names) > 3 else "")
