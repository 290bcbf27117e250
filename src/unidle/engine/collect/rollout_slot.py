"""A lane: everything that one rollout in the making needs, so that two can be in the making side by side.

Rollout k goes through lane k mod (number of lanes). With one lane, collecting and learning take turns. With two, slices
of environments go on in one lane while the rollout in the other is learned from.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from unidle.algos.capturing import Capturer
from unidle.algos.registry import AnyPolicy
from unidle.buffers.rollout import Rollout
from unidle.engine.collect.inference import Service
from unidle.envs.shared_block import SUCCEEDED, SharedBlock, unpack_step_words
from unidle.nn.optim.flat_parameters import FlatParameters
from unidle.rng import NOISE, keyed_generator


class Notes:
    """What the host keeps of a rollout while it is filled, and copies to the device once, when it is whole."""

    def __init__(self, rollout: Rollout) -> None:
        (steps, n_envs), width = rollout.shape, rollout.actions.shape[2]
        self._pinned = rollout.obs.is_cuda
        self.outcomes = self._zeros((steps, n_envs), torch.int64)  # as the block has them
        _, self.terminated, self.truncated = unpack_step_words(self.outcomes)
        self.starts = self._zeros((steps + 1, n_envs), torch.bool)  # made when it is whole
        self.last_obs = self._zeros(rollout.obs.shape[1:], torch.uint8)  # the observations after the last step
        self.last_episode = np.zeros(n_envs, np.int64)  # number of the episode then open
        self.actions = np.zeros((steps, n_envs, width), np.float32)  # as the environments got them
        self.clear()

    def _zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> np.ndarray:
        # Page-locked beside a GPU, so that the copy to the device runs by itself.
        array: np.ndarray = torch.zeros(shape, dtype=dtype, pin_memory=self._pinned).numpy()
        return array

    def clear(self) -> None:
        """Forget what is kept as lists; the arrays are written over."""
        self.final_obs: list[np.ndarray] = []  # of truncated episodes
        self.final_at: list[np.ndarray] = []  # t × N + environment
        self.episodes: list[np.ndarray] = []  # [t × N + environment, return, length, success] of those that ended

    def hand_over(self, rollout: Rollout, starts: np.ndarray) -> None:
        """Bring to the device what the host noted; `starts` [N] says where the first step began an episode."""
        self.starts[0] = starts
        np.logical_or(self.terminated, self.truncated, out=self.starts[1:])
        for tensor, noted in ((rollout.starts, self.starts), (rollout.obs[-1], self.last_obs)):
            tensor.copy_(torch.from_numpy(noted), non_blocking=True)
        outcomes = torch.from_numpy(self.outcomes).to(rollout.obs.device, non_blocking=True)
        rollout.rewards.copy_(outcomes.view(torch.float32)[:, ::2])
        rollout.terminated.copy_(outcomes.view(torch.uint8)[:, 4::8])
        rollout.truncated.copy_(outcomes.view(torch.uint8)[:, 5::8])
        final_obs = np.concatenate([self.last_obs[:0], *self.final_obs])
        final_at = np.concatenate([np.zeros(0, np.int64), *self.final_at])
        # By time, then environment: the order in which slices became ready must leave no trace.
        order = np.argsort(final_at)
        rollout.final_obs = self._to(rollout.obs.device, final_obs[order])
        rollout.final_at = self._to(rollout.obs.device, final_at[order])

    def _to(self, device: torch.device, array: np.ndarray) -> Tensor:
        tensor = torch.from_numpy(array)
        return tensor.pin_memory().to(device, non_blocking=True) if self._pinned else tensor

    def finished_episodes(self) -> tuple[list[float], list[int], list[bool]]:
        """Returns and lengths of the episodes that ended, by time, then environment; and successes that were told."""
        episodes = np.concatenate([np.zeros((4, 0)), *self.episodes], 1)
        _, returns, lengths, successes = episodes[:, np.argsort(episodes[0])]
        return returns.tolist(), lengths.astype(int).tolist(), (successes[successes > 0] == SUCCEEDED).tolist()


@dataclass(frozen=True)
class Whole:
    """A rollout to learn from, and the policy that acted in it where it is another than the one that learns."""

    rollout: Rollout
    behaviour: AnyPolicy | None


class Lane:
    """A rollout, the weights that act in it, their inference, and the host's notes."""

    def __init__(
        self,
        learner: AnyPolicy,
        rollout: Rollout,
        block: SharedBlock,
        state: Tensor,
        capture: Capturer,
        *,
        own_weights: bool,
    ) -> None:
        """`own_weights`: act with a copy of the learner's policy, which may then change meanwhile."""
        self.rollout, self.notes = rollout, Notes(rollout)
        self._learner = learner
        self.policy = learner
        if own_weights:
            self.policy = copy.deepcopy(learner)
            FlatParameters(self.policy)  # one piece of memory, as the learner's are
            self.policy.requires_grad_(False)
        self.service = Service(self.policy, rollout, block, state, capture)
        # The recurrent state after the last step; not in the rollout yet, where that place is also the trash row.
        self.last_states = torch.zeros_like(state)
        self.unfinished = 0  # slices that still have steps to take in this rollout

    @property
    def behaviour(self) -> AnyPolicy | None:
        """The policy that acted, where it is another than the one that learns."""
        return None if self.policy is self._learner else self.policy

    def open(self, slices: int, seed: int, number: int) -> None:
        """Make ready for rollout `number`: with the learner's weights as they are now, and its noise."""
        if self.policy is not self._learner:
            self.load(self._learner.state_dict())
        self.notes.clear()
        self.unfinished = slices
        # What sampling needs for the whole rollout, a function of seed and number alone.
        generator = keyed_generator(self.rollout.obs.device, seed, NOISE, number)
        self.service.noise[:-1].copy_(self.policy.distribution.noise(self.rollout.shape, generator))

    def load(self, weights: dict[str, Any]) -> None:
        """Act with these weights (and normaliser statistics), put into the tensors that a graph already knows."""
        mine = self.policy.state_dict()
        torch._foreach_copy_(list(mine.values()), [weights[name] for name in mine])
