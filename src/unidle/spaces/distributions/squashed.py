"""SAC's actions: a Gaussian squashed into the action range, or a categorical choice."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from unidle.spaces.actions import ActionLayout
from unidle.spaces.distributions.action import MASKED_BELOW, ActionDistribution
from unidle.spaces.distributions.gaussian import Params, SquashedGaussian, log_slope, negative_log_density
from unidle.spaces.distributions.state_dependent import SquashedStateDependent

LOG_STD_RANGE = (-20.0, 2.0)
_MAX_ACTION = 1 - 1e-6  # atanh(1) is infinite


class _SquashedByNetwork(SquashedGaussian):
    """The standard deviations are outputs of the network too."""

    n_outputs, n_packed, n_free = 2, 2, 0

    def params(
        self, logits: Tensor, outputs: tuple[Tensor, ...], free: tuple[Tensor, ...], latent: Tensor | None = None
    ) -> Params:
        """The network's outputs are the mean and the log standard deviation, which is clamped."""
        mean, log_std = outputs
        return Params(logits, mean, log_std.clamp(*LOG_STD_RANGE))

    def unpack(self, logits: Tensor, columns: tuple[Tensor, ...], free: tuple[Tensor, ...]) -> Params:
        """The columns are the mean and the log standard deviation."""
        return Params(logits, *columns)


class SquashedActions(ActionDistribution):
    """tanh(u) with Gaussian u, or categories. Samples are tanh(u): critics get actions in [-1, 1].

    While `at_random` is 1, `sample` draws uniformly and ignores the network's outputs; the other methods do not.
    """

    def __init__(self, layout: ActionLayout, real: SquashedStateDependent | None = None) -> None:
        """`real` is the distribution of the real dimensions; default: independent noise at every step."""
        super().__init__(layout, _SquashedByNetwork() if real is None else real)
        self.register_buffer("at_random", torch.zeros(()))

    at_random: Tensor

    def sample(self, params: Params, noise: Tensor) -> Tensor:
        """The action that `noise` selects."""
        if self.heads:
            uniform = torch.where(params.logits > MASKED_BELOW, 0.0, params.logits)  # masked categories stay masked
            return self.sample_categories(torch.where(self.at_random > 0, uniform, params.logits), noise)
        squashed = torch.tanh(self.real.sample(params, noise))
        uniform = torch.erf(noise[..., : self.reals] / math.sqrt(2))  # erf of a normal is uniform
        return torch.where(self.at_random > 0, uniform, squashed)

    def sample_with_log_prob(self, params: Params, noise: Tensor) -> tuple[Tensor, Tensor]:
        """A reparametrised action [.., reals], and its log-probability [..]; gradients pass through both."""
        u = params.mean + params.log_std.exp() * noise
        slope = log_slope(u)  # before tanh: the order in which gradients of u are summed decides their last bits
        return torch.tanh(u), -(negative_log_density(noise, params.log_std) + slope).sum(-1)

    def mode(self, params: Params) -> Tensor:
        """The most likely category, or the median of the squashed Gaussian."""
        return super().mode(params) if self.heads else torch.tanh(params.mean)

    def _log_prob(self, params: Params, action: Tensor, table: Tensor | None) -> Tensor:
        return super()._log_prob(
            params, action if self.heads else action.clamp(-_MAX_ACTION, _MAX_ACTION).atanh(), table
        )

    def to_env(self, action: Tensor) -> Tensor:
        """The flat action as the environment takes it: reals scaled to their range, categories as is."""
        return self.scale_reals(action) if self.reals else action
