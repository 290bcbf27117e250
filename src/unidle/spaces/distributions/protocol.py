"""The interfaces of distributions over actions, for policies, algorithms and collectors."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

# Parameters of a distribution: a NamedTuple. The first field is `logits`, then come parameters that depend on the
# observation, each [.., reals], then those that do not, each [reals].
Parameters = Any


class Distribution(Protocol):
    """A distribution over flat actions [.., heads + reals]. It may have buffers but no learned parameters.

    Samples are in coordinates in which their log-probability is exact; `to_env` maps them to the action space.
    """

    heads: int  # categorical choices
    reals: int  # real dimensions
    n_outputs: int  # network outputs for each observation
    n_free: int  # learned parameters that do not depend on the observation
    n_matrix: int  # entries of an exploration matrix, which several steps share; 0 if the noise of steps is independent

    @property
    def name(self) -> str:
        """Name of the formulas. A kernel supports only the names it knows."""

    def params(self, outputs: Tensor, free: Tensor, mask: Tensor | None, latent: Tensor | None = None) -> Parameters:
        """Parameters from the network's outputs [.., n_outputs], `free` [n_free] and an action mask.

        `latent` [.., features] is what the output layer computed the outputs from.
        """

    def noise(self, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        """Noise of single steps, [*shape, heads + reals]."""

    def matrices(self, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        """Noise that several steps share, [*shape, n_matrix]."""

    def all_noise(self, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        """Everything that `sample` needs, with a new matrix for each entry: [*shape, heads + reals + n_matrix]."""

    def sample(self, params: Parameters, noise: Tensor) -> Tensor:
        """The action that `noise` [.., heads + reals + n_matrix] selects: the same noise gives the same action."""

    def mode(self, params: Parameters) -> Tensor:
        """The most likely action."""

    def log_prob(self, params: Parameters, action: Tensor) -> Tensor:
        """Log-probability [..] of `action`."""

    def entropy(self, params: Parameters) -> Tensor:
        """Entropy [..]."""

    def kl(self, params: Parameters, other: Parameters) -> Tensor:
        """KL divergence [..] of `other` from `params`: KL(params ‖ other)."""

    def to_env(self, action: Tensor) -> Tensor:
        """The flat action as the environment takes it."""

    def export(self, params: Parameters) -> Tensor:
        """The deterministic action as the environment takes it: what an exported policy computes."""


class RealDistribution(Protocol):
    """A distribution over the real dimensions of an action, independent of each other."""

    name: str
    n_outputs: int  # network outputs for each dimension
    n_packed: int  # parameters for each dimension that depend on the observation
    n_free: int  # learned parameters for each dimension that do not depend on the observation
    n_matrix: int  # entries of an exploration matrix for each dimension, 0 without one
    matrix_steps: int | None  # steps after which a new exploration matrix is drawn; None: only for each rollout
    bounded: bool  # whether every dimension must have finite bounds

    def params(
        self, logits: Tensor, outputs: tuple[Tensor, ...], free: tuple[Tensor, ...], latent: Tensor | None = None
    ) -> Parameters:
        """Parameters, from `n_outputs` tensors [.., reals], `free`, one tensor [n_free × reals] or none, and `latent`.

        `latent` is as for `Distribution.params`.
        """

    def unpack(self, logits: Tensor, columns: tuple[Tensor, ...], free: tuple[Tensor, ...]) -> Parameters:
        """Parameters, given the values of their fields."""

    def std(self, free: Tensor) -> Tensor:
        """The standard deviations that the learned parameters stand for; empty if there are none."""

    def sample(self, params: Parameters, noise: Tensor) -> Tensor:
        """The point [.., reals] that standard normal `noise` [.., reals + n_matrix × reals] selects."""

    def mode(self, params: Parameters) -> Tensor:
        """The most likely point [.., reals]."""

    def log_prob(self, params: Parameters, point: Tensor) -> Tensor:
        """Log-probability [..]."""

    def entropy(self, params: Parameters) -> Tensor:
        """Entropy [..]; [] if it does not depend on the observation."""

    def kl(self, params: Parameters, other: Parameters) -> Tensor:
        """KL(params ‖ other), [..]."""

    def to_range(self, point: Tensor) -> Tensor:
        """The point in units in which the range of a bounded dimension is [-1, 1]."""
