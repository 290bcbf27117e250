"""Running mean and variance, constant within an iteration and updated once from its batch."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from unidle.distributed.ranks import Ranks

_EPSILON = 1e-8


class RunningNorm(nn.Module):
    """Mean and variance per feature, merged batch by batch (Chan et al. 1979) in float64.

    Before the first update it is the identity.
    """

    def __init__(self, n_features: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(n_features, dtype=torch.float64))
        self.register_buffer("var", torch.ones(n_features, dtype=torch.float64))
        self.register_buffer("count", torch.zeros((), dtype=torch.float64))
        # In float32, for `forward`.
        self.register_buffer("shift", torch.zeros(n_features))
        self.register_buffer("scale", torch.ones(n_features))

    mean: Tensor
    var: Tensor
    count: Tensor
    shift: Tensor
    scale: Tensor

    @torch.no_grad()
    def update(self, batch: Tensor, ranks: Ranks | None = None) -> None:
        """Update the statistics in place with a batch [n, n_features], and with those of the other `ranks`."""
        batch = batch.double()
        mean, var, n = batch.mean(0), batch.var(0, unbiased=False), len(batch)
        if ranks is not None:
            mean, var, n = ranks.merged(mean, var, n)
        total = self.count + n
        delta = mean - self.mean
        square = self.var * self.count + var * n + delta.square() * self.count * n / total
        self.mean += delta * n / total
        self.var.copy_(square / total)
        self.count.copy_(total)
        self.shift.copy_(self.mean)
        self.scale.copy_((self.var + _EPSILON).rsqrt())

    def forward(self, values: Tensor) -> Tensor:
        """Normalise to mean 0 and standard deviation 1."""
        return (values - self.shift) * self.scale
