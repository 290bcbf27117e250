"""Generalised state-dependent exploration, gSDE (Raffin et al. 2020): noise that is a function of the state.

    a = μ(s) + z(s) E,   E ~ N(0, σ²) [latent, reals]       so that   a ~ N(μ(s), z(s)² σ²)

z(s) are the features of the actor's last hidden layer, and σ is learned. The same matrix E is kept for several steps:
while it is, the noise is a smooth function of the state, and the robot does not shake.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from unidle.spaces.distributions.gaussian import Gaussian, Params, SquashedGaussian

_EPSILON = 1e-6  # added to the variance, and to what expln takes the logarithm of, as in Stable-Baselines3
_MAX_MEAN = 2.0  # of SAC, before tanh: with a mean far outside, no noise would change the action


class StateDependentParams(NamedTuple):
    """Parameters of categories and state-dependent Gaussians: those of `Params`, and what samples need."""

    logits: Tensor  # [.., Σ nvec], masked where a mask applies
    mean: Tensor  # [.., reals]
    log_std: Tensor  # [.., reals]
    latent: Tensor  # [.., latent]
    matrix_std: Tensor  # [latent, reals] standard deviations of the exploration matrix


class StateDependent(Gaussian):
    """Normal distributions whose noise is the latent features times an exploration matrix."""

    name = "gsde"
    n_packed = 2
    learns_features = False  # whether the gradient of the noise reaches the features

    def __init__(self, latent: int, matrix_steps: int | None = None, *, use_expln: bool = False) -> None:
        """`latent` is the number of features; `use_expln`: σ grows with log(1 + x) instead of exp(x) above 1."""
        super().__init__()
        self.n_free = self.n_matrix = latent
        self.matrix_steps, self.use_expln = matrix_steps, use_expln

    def params(
        self, logits: Tensor, outputs: tuple[Tensor, ...], free: tuple[Tensor, ...], latent: Tensor | None = None
    ) -> StateDependentParams:
        """The mean is the network's output; the variance is z² σ², where σ is learned."""
        assert latent is not None
        (mean,), (log_std,) = outputs, free
        matrix_std = self.std(log_std).view(self.n_matrix, -1)
        features = latent if self.learns_features else latent.detach()
        variance = features.square() @ matrix_std.square()
        return StateDependentParams(logits, mean, 0.5 * (variance + _EPSILON).log(), features, matrix_std)

    def unpack(self, logits: Tensor, columns: tuple[Tensor, ...], free: tuple[Tensor, ...]) -> Params:
        """The columns are the mean and the log standard deviation; enough for anything but sampling."""
        return Params(logits, *columns)

    def std(self, free: Tensor) -> Tensor:
        """σ: exp, or with `use_expln` above 0 the function log(1 + x) + 1, which grows slowly."""
        if not self.use_expln:
            return free.exp()
        # Each branch gets only values from its own side, so that the other's gradient cannot be NaN.
        return torch.where(free > 0, (free.clamp(min=0.0) + _EPSILON).log1p() + 1.0, free.clamp(max=0.0).exp())

    def sample(self, params: StateDependentParams, noise: Tensor) -> Tensor:  # type: ignore[override]
        """μ + z E; E is the part of `noise` after that of the single step, which is not used."""
        reals = params.mean.shape[-1]
        matrix = noise[..., reals:].unflatten(-1, (self.n_matrix, reals)) * params.matrix_std
        return params.mean + (params.latent.unsqueeze(-2) @ matrix).squeeze(-2)


class SquashedStateDependent(StateDependent, SquashedGaussian):
    """tanh of a state-dependent Gaussian, for SAC. Its gradient reaches the features."""

    name = "squashed gsde"
    learns_features = True

    def params(
        self, logits: Tensor, outputs: tuple[Tensor, ...], free: tuple[Tensor, ...], latent: Tensor | None = None
    ) -> StateDependentParams:
        """As above, with a mean in ±2."""
        (mean,) = outputs
        return super().params(logits, (mean.clamp(-_MAX_MEAN, _MAX_MEAN),), free, latent)
