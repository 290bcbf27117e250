"""Beta distributions over bounded actions (Chou et al. 2017): no mass outside the range, so nothing is clipped."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import logsigmoid, softplus

_MODE_EPSILON = 1e-7  # added to α − 1 and β − 1, so that the mode of the uniform distribution is the middle

# Sampling inverts the CDF of u = logit(x), whose density is smooth and log-concave. A grid of cells around its mode,
# narrower towards the mode, covers the density down to e⁻³⁴ of its maximum. Gauss-Legendre quadrature gives the mass of
# each cell, and Newton's method the point inside a cell. The error of the CDF is below 2e-8.
_DROP = 34.0
_CELLS, _NARROWING, _NODES, _NEWTON_STEPS = 32, 2.5, 4, 6


class BetaParams(NamedTuple):
    """Parameters of categories and Beta distributions."""

    logits: Tensor  # [.., Σ nvec], masked where a mask applies
    alpha: Tensor  # [.., reals], above 1, so that the density has one peak
    beta: Tensor  # [.., reals], above 1


class Beta(nn.Module):
    """x ~ Beta(α, β), where 0 and 1 are the ends of the range. Samples are logit(x), which stays finite."""

    name = "beta"
    n_outputs, n_packed, n_free, n_matrix = 2, 2, 0, 0
    matrix_steps: int | None = None
    bounded = True

    def __init__(self) -> None:
        super().__init__()
        edges = np.sinh(np.linspace(-_NARROWING, _NARROWING, _CELLS + 1)) / math.sinh(_NARROWING)
        nodes, weights = np.polynomial.legendre.leggauss(_NODES)
        for name, table in (("_edges", edges), ("_nodes", 0.5 + 0.5 * nodes), ("_weights", 0.5 * weights)):
            self.register_buffer(name, torch.from_numpy(table), persistent=False)

    _edges: Tensor  # [cells + 1] from -1 to 1
    _nodes: Tensor  # of quadrature over [0, 1]
    _weights: Tensor

    def params(
        self, logits: Tensor, outputs: tuple[Tensor, ...], free: tuple[Tensor, ...], latent: Tensor | None = None
    ) -> BetaParams:
        """α and β are 1 + softplus of the network's outputs."""
        return BetaParams(logits, *(1 + softplus(output) for output in outputs))

    def unpack(self, logits: Tensor, columns: tuple[Tensor, ...], free: tuple[Tensor, ...]) -> BetaParams:
        """The columns are α and β."""
        return BetaParams(logits, *columns)

    def std(self, free: Tensor) -> Tensor:
        """Empty: α and β are outputs of the network."""
        return free

    def sample(self, params: BetaParams, noise: Tensor) -> Tensor:
        """The quantile of Φ(noise): inverse CDF sampling from standard normal noise.

        A fixed number of tensor operations, so that it can be captured: no branch on a value, no sync.
        """
        # The upper half is computed as the lower half of the mirrored distribution, where Φ does not round to 1.
        upper = noise > 0
        a = torch.where(upper, params.beta, params.alpha).double()
        b = torch.where(upper, params.alpha, params.beta).double()
        share = torch.special.ndtr(-noise.double().abs())
        # Upper bounds of the distances from the mode at which the log-density has dropped by _DROP: the lower of two
        # bounds, one for a Gaussian peak with exponential tails, one for the tail alone.
        peak = math.sqrt(2 * _DROP) * (1 / a + 1 / b).sqrt()
        left = torch.minimum(peak + _DROP / a, (_DROP - (a + b) * (b / (a + b)).log()) / a)
        right = torch.minimum(peak + _DROP / b, (_DROP - (a + b) * (a / (a + b)).log()) / b)
        edges = torch.where(self._edges < 0, left.unsqueeze(-1), right.unsqueeze(-1)) * self._edges
        widths = edges.diff(dim=-1)  # [.., reals, cells]
        masses = self._mass(a[..., None, None], b[..., None, None], edges[..., :-1], widths)
        below = masses.cumsum(-1)
        target = share.unsqueeze(-1) * below[..., -1:]
        cell = (below < target).sum(-1, keepdim=True).clamp(max=_CELLS - 1)
        start, width, mass = (table.gather(-1, cell) for table in (edges, widths, masses))
        target = target - (below.gather(-1, cell) - mass)
        position = target / mass  # within the cell, from 0 to 1
        a_, b_ = a.unsqueeze(-1), b.unsqueeze(-1)
        for _ in range(_NEWTON_STEPS):
            excess = self._mass(a_.unsqueeze(-1), b_.unsqueeze(-1), start, width * position) - target
            position = (position - excess / (width * _density(a_, b_, start + width * position))).clamp(0, 1)
        logit = (start + width * position).squeeze(-1) + (a / b).log()
        return torch.where(upper, -logit, logit).to(noise.dtype)

    def _mass(self, a: Tensor, b: Tensor, start: Tensor, width: Tensor) -> Tensor:
        """Mass between distances `start` and `start + width` from the mode, relative to the density at the mode."""
        points = start.unsqueeze(-1) + width.unsqueeze(-1) * self._nodes
        return (_density(a, b, points) * self._weights).sum(-1) * width

    def mode(self, params: BetaParams) -> Tensor:
        """Logit of (α − 1) / (α + β − 2)."""
        return (params.alpha - 1 + _MODE_EPSILON).log() - (params.beta - 1 + _MODE_EPSILON).log()

    # The following are computed in float64: log B is a difference of large numbers.

    def log_prob(self, params: BetaParams, point: Tensor) -> Tensor:
        """(α − 1) log x + (β − 1) log(1 − x) − log B(α, β), of x in (0, 1)."""
        alpha, beta, u = params.alpha.double(), params.beta.double(), point.double()
        density = (alpha - 1) * logsigmoid(u) + (beta - 1) * logsigmoid(-u)
        return (density - _log_beta(alpha, beta)).sum(-1).to(point.dtype)

    def entropy(self, params: BetaParams) -> Tensor:
        """Log B(α, β) − (α − 1) ψ(α) − (β − 1) ψ(β) + (α + β − 2) ψ(α + β), of x in (0, 1)."""
        alpha, beta = params.alpha.double(), params.beta.double()
        both = (alpha + beta - 2) * (alpha + beta).digamma()
        terms = (alpha - 1) * alpha.digamma() + (beta - 1) * beta.digamma() - both
        return (_log_beta(alpha, beta) - terms).sum(-1).to(params.alpha.dtype)

    def kl(self, params: BetaParams, other: BetaParams) -> Tensor:
        """KL(params ‖ other)."""
        alpha, beta, other_alpha, other_beta = (x.double() for x in (*params[1:], *other[1:]))
        both = (alpha + beta).digamma()
        by_alpha = (alpha - other_alpha) * (alpha.digamma() - both)
        by_beta = (beta - other_beta) * (beta.digamma() - both)
        terms = _log_beta(other_alpha, other_beta) - _log_beta(alpha, beta) + by_alpha + by_beta
        return terms.sum(-1).to(params.alpha.dtype)

    def to_range(self, point: Tensor) -> Tensor:
        """2 x − 1."""
        return torch.tanh(0.5 * point)


def _log_beta(alpha: Tensor, beta: Tensor) -> Tensor:
    return alpha.lgamma() + beta.lgamma() - (alpha + beta).lgamma()


def _density(a: Tensor, b: Tensor, distance: Tensor) -> Tensor:
    """Density of logit(x) at a distance from its mode log(a / b), relative to that at the mode."""
    return (a * distance - (a + b) * torch.log1p(a / (a + b) * distance.expm1())).exp()
