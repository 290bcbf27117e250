"""Gaussians, plain and squashed by tanh."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

LOG_SQRT_2PI = 0.5 * math.log(2 * math.pi)


class Params(NamedTuple):
    """Parameters of categories and Gaussians."""

    logits: Tensor  # [.., Σ nvec], masked where a mask applies
    mean: Tensor  # [.., reals] in units where the action range is [-1, 1]
    log_std: Tensor  # [reals], or [.., reals] if it is an output of the network


class Gaussian(nn.Module):
    """Normal distributions whose standard deviations do not depend on the observation."""

    name = "gaussian"
    n_outputs, n_packed, n_free, n_matrix = 1, 1, 1, 0
    matrix_steps: int | None = None
    bounded = False

    def params(
        self, logits: Tensor, outputs: tuple[Tensor, ...], free: tuple[Tensor, ...], latent: Tensor | None = None
    ) -> Any:
        """The mean is the network's output; the log standard deviation is a learned parameter."""
        return Params(logits, *outputs, *free)

    def unpack(self, logits: Tensor, columns: tuple[Tensor, ...], free: tuple[Tensor, ...]) -> Params:
        """The column is the mean."""
        return Params(logits, *columns, *free)

    def std(self, free: Tensor) -> Tensor:
        """The standard deviations that the learned parameters stand for."""
        return free.exp()

    def sample(self, params: Params, noise: Tensor) -> Tensor:
        """Mean + standard deviation × noise."""
        return params.mean + params.log_std.exp() * noise

    def mode(self, params: Params) -> Tensor:
        """The mean."""
        return params.mean

    def log_prob(self, params: Params, point: Tensor) -> Tensor:
        """Log N(point; mean, std)."""
        z = (point - params.mean) * (-params.log_std).exp()
        return -negative_log_density(z, params.log_std).sum(-1)

    def entropy(self, params: Params) -> Tensor:
        """½ log(2πe std²)."""
        return (params.log_std + 0.5 + LOG_SQRT_2PI).sum(-1)

    def kl(self, params: Params, other: Params) -> Tensor:
        """KL(params ‖ other)."""
        ratio = (2 * (params.log_std - other.log_std)).exp()
        shift = (params.mean - other.mean) * (-other.log_std).exp()
        return (0.5 * (ratio + shift.square() - 1) + other.log_std - params.log_std).sum(-1)

    def to_range(self, point: Tensor) -> Tensor:
        """The point itself; it is clipped to the range later."""
        return point


class SquashedGaussian(Gaussian):
    """tanh(u) with Gaussian u. Samples are u, so that log-probabilities are exact where tanh rounds to ±1."""

    name = "squashed"
    bounded = True

    def __init__(self) -> None:
        super().__init__()
        nodes, weights = np.polynomial.hermite_e.hermegauss(32)
        for name, table in (("_nodes", nodes), ("_weights", weights / weights.sum())):
            self.register_buffer(name, torch.tensor(table, dtype=torch.float32), persistent=False)

    _nodes: Tensor  # of Gauss-Hermite quadrature, for means over a standard normal
    _weights: Tensor

    def log_prob(self, params: Params, point: Tensor) -> Tensor:
        """Log N(u) − log |d tanh(u) / du|."""
        return super().log_prob(params, point) - log_slope(point).sum(-1)

    def entropy(self, params: Params) -> Tensor:
        """H(u) + E[log |d tanh(u) / du|]; the expectation has no closed form, so it is computed by quadrature."""
        u = params.mean.unsqueeze(-1) + params.log_std.exp().unsqueeze(-1) * self._nodes
        return super().entropy(params) + (log_slope(u) * self._weights).sum((-1, -2))

    def to_range(self, point: Tensor) -> Tensor:
        """tanh(u)."""
        return torch.tanh(point)


def negative_log_density(z: Tensor, log_std: Tensor) -> Tensor:
    """−log N(x; mean, std) in each dimension, where z = (x − mean) / std."""
    return 0.5 * z.square() + log_std + LOG_SQRT_2PI


def log_slope(u: Tensor) -> Tensor:
    """log(1 − tanh² u), computed without rounding to log 0."""
    return 2 * (math.log(2) - u - nn.functional.softplus(-2 * u))
