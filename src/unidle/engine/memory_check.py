"""Checks before a run starts that networks and rollouts fit in memory. Allocates nothing.

The replay buffer has its own check (`buffers.placement`).
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from unidle.buffers.placement import usable_memory
from unidle.buffers.prefetch import in_gib
from unidle.buffers.rollout import Rollout
from unidle.config import Recipe
from unidle.engine.collect.rollout_noise import RolloutNoise
from unidle.errors import UsageError
from unidle.spaces.distributions import ActionDistribution
from unidle.spaces.observations import ObservationLayout

_COPIES = {"adam": 4, "adamw": 4, "rmsprop": 3, "sgd": 2}  # of all parameters: weights, gradient, optimiser state
_GATES = {"gru": 3, "lstm": 4}  # matrices from state to state
_BATCH_FLOATS = 4  # of each transition of PPO: log-probability, value, advantage, return


def require_memory_for_networks(recipe: Recipe, obs_layout: ObservationLayout, device: torch.device) -> None:
    """UsageError if hidden and recurrent layers alone, with gradient and optimiser state, do not fit on the device."""
    settings: dict[str, Any] = vars(recipe)
    critic = settings.get("critic_arch")
    archs = [recipe.net_arch]
    if "critic_arch" in settings and not settings.get("share_trunk"):
        archs += [recipe.net_arch if critic is None else critic] * settings.get("n_critics", 1)
    # A custom network or a recurrent layer may give fewer inputs than the observation has numbers.
    plain = recipe.network is None and recipe.recurrent == "none" and recipe.obs_groups is None
    inputs = sum(math.prod(leaf.shape) for leaf in obs_layout.leaves if not leaf.is_image) if plain else 0
    parameters = sum(wide * wider for arch in archs for wide, wider in pairwise((inputs, *arch)))
    flags = "--net-arch or --critic-arch" if critic else "--net-arch"
    if recipe.recurrent != "none":
        parameters += len(archs) * _GATES[recipe.recurrent] * settings["recurrent_size"] ** 2
        flags += " or --recurrent-size"
    needed, room = 4 * _COPIES[recipe.optimizer] * parameters, usable_memory(device)
    if needed > room:
        raise UsageError(
            f"The networks have at least {parameters:,} parameters, which need {in_gib(needed)} with gradient and "
            f"optimiser state, but {_owner(device)} has {in_gib(room)} free; use narrower layers "
            f"({flags})."
        )


def require_memory_for_rollouts(
    recipe: Recipe,
    sizes: tuple[int, int, int],
    device: torch.device,
    count: int,
    distribution: ActionDistribution | None = None,
) -> None:
    """UsageError if `count` rollouts do not fit on the device; `sizes` are `Rollout`'s obs_bytes, width, state_size.

    `distribution` is the policy's: its exploration matrices, if it has any, count too.
    """
    rollout = Rollout(recipe.n_steps, recipe.n_envs, *sizes, torch.device("meta"))
    tensors = [tensor for tensor in vars(rollout).values() if isinstance(tensor, Tensor) and not tensor._is_view()]
    if distribution is not None:
        tensors.append(RolloutNoise(distribution, rollout).matrices)
    batch = 4 * _BATCH_FLOATS * recipe.total_batch if recipe.on_policy else 0
    needed, room = count * (batch + sum(tensor.nbytes for tensor in tensors)), usable_memory(device)
    if needed > room:
        rollouts = "The rollout" if count == 1 else f"{count} rollouts (--overlap strict)"
        each = "" if count == 1 else " each"
        raise UsageError(
            f"{rollouts} of n_envs × n_steps = {recipe.n_envs:,} × {recipe.n_steps:,} transitions{each} "
            f"need{'s' * (count == 1)} {in_gib(needed)}, but {_owner(device)} has {in_gib(room)} free; "
            f"set --n-steps to at most {max(1, recipe.n_steps * room // needed):,}, or lower --n-envs."
        )


def _owner(device: torch.device) -> str:
    return "the GPU" if device.type == "cuda" else "the host"
