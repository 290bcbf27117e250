"""The algorithms by name. A new one is one file, one settings dataclass and one line in `ALGORITHMS`."""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from unidle.algos.capturing import Capturer
from unidle.algos.dqn import DQN
from unidle.algos.experience_replay import ExperienceReplay
from unidle.algos.metrics import Metrics
from unidle.algos.micro_batches import AfterGradient
from unidle.algos.off_policy import OffPolicy
from unidle.algos.off_policy_numpy import choose_dqn_gradient, choose_sac_gradients, choose_td3_gradients
from unidle.algos.ppo_ops import iteration_nodes, new_ppo
from unidle.algos.sac import SAC
from unidle.algos.sac_kernels import choose_sac_update
from unidle.algos.schedules import Schedule
from unidle.algos.td3 import TD3
from unidle.buffers.rollout import Rollout
from unidle.config import Recipe
from unidle.distributed.ranks import Ranks
from unidle.kernels.dispatch import Report
from unidle.nn.actor_critic import ActorCritic, NetworkFactory
from unidle.nn.optim.flat_parameters import FlatParameters
from unidle.nn.q_policy import QPolicy
from unidle.nn.sac_policy import SACPolicy
from unidle.nn.td3_policy import TD3Policy
from unidle.spaces.actions import ActionLayout
from unidle.spaces.observations import ObservationLayout

AnyPolicy = ActorCritic | SACPolicy | TD3Policy | QPolicy


class Algorithm(Protocol):
    """The interface of an algorithm for the engine: a policy, and its update from a rollout."""

    policy: Any
    parameters: FlatParameters  # of the policy
    after_gradient: AfterGradient | None  # the hook between gradient and step, if there is one
    schedules: dict[str, Schedule]  # setting → its value over the run

    @property
    def experience(self) -> ExperienceReplay | None:
        """The replay buffer and its schedule; None if the algorithm has no replay buffer."""

    def set_progress(self, progress: float) -> None:
        """Update schedules; `progress` is the finished part of the run, 0 to 1."""

    def update_in_parts(
        self, rollout: Rollout, shuffle: torch.Generator, behaviour: Any = None
    ) -> Generator[None, None, Metrics]:
        """Learn from `rollout`, yielding between parts of the work; returns metrics.

        `behaviour` is the policy that acted, if it is not the current one.
        """

    def plasticity(self, seed: int, step: int) -> dict[str, Tensor]:
        """Plasticity metrics of the networks at `step`; empty if the algorithm does not measure them."""

    def state_dict(self) -> dict[str, Any]:
        """Everything that learning depends on, as tensors and plain values."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Copy a checkpoint's values into the existing tensors."""

    @property
    def start_parts(self) -> tuple[str, ...]:
        """The parts of a checkpoint's state that `start_from` takes over, beside `policy`."""

    def start_from(self, state: dict[str, Any]) -> None:
        """Take over the networks in the `state_dict` of another run, as far as it has them; the optimiser stays new.

        ValueError names a part whose tensors have other shapes; then nothing changes.
        """


@dataclass(frozen=True)
class Entry:
    """An algorithm and the policy it trains."""

    algorithm: Callable[..., Algorithm]
    policy: Callable[..., AnyPolicy]
    # CUDA-graph nodes of one iteration's updates; None: the updates cannot be captured together with the rollout.
    iteration_nodes: Callable[[Any], int | None] = lambda recipe: None


ALGORITHMS: dict[str, Entry] = {
    "ppo": Entry(new_ppo, ActorCritic, iteration_nodes),
    "sac": Entry(
        partial(OffPolicy, SAC, choose_update=choose_sac_update, choose_gradients=choose_sac_gradients), SACPolicy
    ),
    "td3": Entry(partial(OffPolicy, TD3, choose_gradients=choose_td3_gradients), TD3Policy),
    "dqn": Entry(partial(OffPolicy, DQN, choose_gradients=choose_dqn_gradient), QPolicy),
}


def new_policy(
    obs_layout: ObservationLayout, action_layout: ActionLayout, recipe: Recipe, network: NetworkFactory | None = None
) -> AnyPolicy:
    """An untrained policy of the recipe's algorithm."""
    return ALGORITHMS[recipe.algo].policy(obs_layout, action_layout, recipe, network)


def new_algorithm(
    policy: Any,
    recipe: Recipe,
    capture: Capturer,
    report: Report,
    after_gradient: AfterGradient | None = None,
    ranks: Ranks | None = None,
) -> Algorithm:
    """The recipe's algorithm for training `policy`, which is already on its device.

    With `ranks`, `recipe` is this rank's share of the job's, and `after_gradient` reduces gradients, in a way at which
    `capture` can split a graph.
    """
    return ALGORITHMS[recipe.algo].algorithm(policy, recipe, capture, report, after_gradient, ranks)
