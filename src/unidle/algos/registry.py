"""What the engine asks of an algorithm, whichever it is."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any, Protocol

import torch
from torch import Tensor

from unidle.buffers.rollout import Rollout
from unidle.config import Recipe
from unidle.nn.actor_critic import ActorCritic, NetworkFactory
from unidle.nn.optim.flat_parameters import FlatParameters
from unidle.nn.q_policy import QPolicy
from unidle.nn.sac_policy import SACPolicy
from unidle.spaces.actions import ActionLayout
from unidle.spaces.observations import ObservationLayout

AnyPolicy = ActorCritic | SACPolicy | QPolicy
_POLICIES: dict[str, type[AnyPolicy]] = {"ppo": ActorCritic, "sac": SACPolicy, "dqn": QPolicy}


def new_policy(
    obs_layout: ObservationLayout, action_layout: ActionLayout, recipe: Recipe, network: NetworkFactory | None = None
) -> AnyPolicy:
    """What acts, untrained, for the recipe's algorithm."""
    return _POLICIES[recipe.algo](obs_layout, action_layout, recipe, network)


class Algorithm(Protocol):
    """A policy, and how a fragment of experience improves it."""

    policy: Any
    parameters: FlatParameters  # of the policy

    def set_progress(self, progress: float) -> None:
        """From 0 to 1 of the run: what follows a schedule."""

    def learning(
        self, rollout: Rollout, shuffle: torch.Generator, behaviour: Any = None
    ) -> Generator[None, None, dict[str, Tensor]]:
        """Learn from `rollout`, pausing after each piece of the work; returns metrics as tensors."""

    def state_dict(self) -> dict[str, Any]:
        """Everything that learning depends on, as tensors and plain values."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Put a checkpoint's values into the tensors that are already here."""
