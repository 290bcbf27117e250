"""The batch that kernels of off-policy algorithms take."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class TransitionBatch(Protocol):
    """A batch of transitions, as in `buffers.replay.Transitions`."""

    @property
    def obs(self) -> Tensor:
        """[B, obs_bytes] uint8."""

    @property
    def actions(self) -> Tensor:
        """[B, width]."""

    @property
    def returns(self) -> Tensor:
        """[B]."""

    @property
    def discounts(self) -> Tensor:
        """[B]; 0 where the episode terminated."""

    @property
    def next_obs(self) -> Tensor:
        """[B, obs_bytes] uint8."""

    @property
    def weights(self) -> Tensor:
        """[B] in the loss; 0: not a real transition."""
