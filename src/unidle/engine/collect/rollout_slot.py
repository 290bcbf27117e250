"""A rollout slot: memory for one rollout, and the policy that acts in it.

Rollout k uses slot k mod (number of slots). With one slot, collecting and learning alternate. With two, slices of
environments act in one slot while the learner uses the other. The rules are in engine/overlap.py.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from unidle.algos.capturing import Capturer
from unidle.algos.registry import AnyPolicy
from unidle.buffers.rollout import Rollout
from unidle.engine.collect.inference import Inference
from unidle.engine.collect.staging import Staging
from unidle.envs.shared_block import SharedBlock
from unidle.nn.optim.flat_parameters import FlatParameters
from unidle.rng import NOISE, keyed_generator


@dataclass(frozen=True)
class FinishedRollout:
    """A complete rollout, and the policy that acted in it if that is not the one being trained."""

    rollout: Rollout
    behaviour: AnyPolicy | None


class RolloutSlot:
    """A rollout, the policy that acts in it, its inference, and host-side staging."""

    def __init__(
        self,
        learner: AnyPolicy,
        rollout: Rollout,
        block: SharedBlock,
        state: Tensor,
        capture: Capturer,
        *,
        own_weights: bool,
        at_once: int = 1,
    ) -> None:
        """`own_weights`: act with a copy of the learner's policy, which the learner may change meanwhile.

        `at_once` as for `Inference`.
        """
        self.rollout, self.staging = rollout, Staging(rollout)
        self._learner = learner
        self.policy = learner
        if own_weights:
            self.policy = copy.deepcopy(learner)
            FlatParameters(self.policy)  # one contiguous tensor, like the learner's
            self.policy.requires_grad_(False)
        self.inference = Inference(self.policy, rollout, block, state, capture, at_once)
        # The recurrent state after the last step, kept here because inference uses its row in the rollout as trash row.
        self.last_states = torch.zeros_like(state)
        self.unfinished = 0  # slices that still have steps to take in this rollout
        self.env_statistics: dict[str, Any] = {}  # at its end, of wrappers around a vector environment

    @property
    def behaviour(self) -> AnyPolicy | None:
        """The policy that acted, if it is not the one being trained."""
        return None if self.policy is self._learner else self.policy

    def open(self, slices: int, seed: int, index: int) -> None:
        """Prepare for rollout `index`: publish the learner's current weights and draw the rollout's noise."""
        if self.policy is not self._learner:
            self.load(self._learner.state_dict())
        self.staging.clear()
        self.unfinished = slices
        # All of the rollout's noise at once, as a function of (seed, index) alone.
        self.inference.noise.draw(keyed_generator(self.rollout.obs.device, seed, NOISE, index))

    def load(self, weights: dict[str, Any]) -> None:
        """Act with these weights (and normaliser statistics), copied in place: captured graphs hold the tensors."""
        mine = self.policy.state_dict()
        torch._foreach_copy_(list(mine.values()), [weights[name] for name in mine])
