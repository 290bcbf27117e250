"""Gradient of DQN's loss on a CPU, for a small MLP.

The formulas of `algos.dqn` and `nn.q_policy`, differentiated by hand; `d_x` is the gradient of the loss with respect to
x.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from unidle.kernels.numpy.mlp import Inputs, Layer, Trunk
from unidle.kernels.numpy.product import product
from unidle.kernels.off_policy_types import TransitionBatch
from unidle.spaces.distributions import LOG_ZERO


@dataclass
class QNetwork:
    """Values of all categories of each discrete action; with `value_head`, a dueling network."""

    inputs: Inputs
    trunk: Trunk
    head: Layer
    value_head: Layer | None
    nvec: tuple[int, ...]

    def columns(self) -> Iterator[tuple[int, slice]]:
        """Each discrete action, and the columns of its values."""
        start = 0
        for head, categories in enumerate(self.nvec):
            yield head, slice(start, start + categories)
            start += categories

    def __call__(self, obs: np.ndarray) -> tuple[list[np.ndarray], np.ndarray, np.ndarray | None]:
        """The trunk's activations, the values [n, Σ nvec], and which of them are masked."""
        x, masked_out = self.inputs(obs)
        activations = self.trunk(x)
        q = self.head(activations[-1])
        if self.value_head is not None:
            values = self.value_head(activations[-1])
            for head, columns in self.columns():
                advantages = q[:, columns]
                advantages += values[:, head, None] - advantages.mean(1, keepdims=True)
        if masked_out is not None:
            q[masked_out] = LOG_ZERO
        return activations, q, masked_out

    def backward(self, activations: list[np.ndarray], d_q: np.ndarray) -> None:
        """Write the layers' gradients, given that with respect to the values."""
        latent, d_y = activations[-1], d_q
        d_latent: np.ndarray | float = 0.0
        if self.value_head is not None:
            d_y, d_values = d_q.copy(), np.empty((len(d_q), len(self.nvec)), np.float32)
            for head, columns in self.columns():
                np.add.reduce(d_q[:, columns], 1, out=d_values[:, head])
                d_y[:, columns] -= d_values[:, head, None] / np.float32(columns.stop - columns.start)
            self.value_head.backward(latent, d_values)
            d_latent = product(d_values, self.value_head.weight)
        self.head.backward(latent, d_y)
        self.trunk.backward(activations, product(d_y, self.head.weight) + d_latent)


@dataclass
class DqnGradient:
    """Computes the gradient in place."""

    network: QNetwork
    target: QNetwork
    double_dqn: bool

    def __call__(self, batch: TransitionBatch) -> tuple[Tensor, Tensor]:
        """Returns the loss and the mean Q of the actions [2], and |TD error| [B], averaged over discrete actions."""
        with np.errstate(all="ignore"):  # overflow shows in the metrics, as with torch
            target = batch.returns.numpy() + batch.discounts.numpy() * self._next_value(batch.next_obs.numpy())
            activations, q, masked_out = self.network(batch.obs.numpy())
            heads, rows = len(self.network.nvec), np.arange(len(q))
            taken, d_q = batch.actions.numpy().astype(np.int64), np.zeros(q.shape, np.float32)
            d_error = batch.weights.numpy() / np.float32(len(q) * heads)
            loss = value = 0.0
            each = np.zeros(len(q), np.float32)
            for head, columns in self.network.columns():
                category = columns.start + taken[:, head]
                chosen = q[rows, category]
                error = chosen - target
                size = np.abs(error)
                clipped = np.minimum(size, np.float32(1.0))
                # Huber loss: ½ e² up to 1, then |e| − ½
                loss += float(np.add.reduce(d_error * clipped * (size - 0.5 * clipped)))
                # 0 × error: as in torch, the gradient of an infinite error is NaN
                d_q[rows, category] = d_error * (np.clip(error, -1.0, 1.0) + 0.0 * error)
                value += float(np.add.reduce(chosen)) / (len(q) * heads)
                each += size / np.float32(heads)
            if masked_out is not None:
                d_q[masked_out] = 0.0
            self.network.backward(activations, d_q)
            return torch.tensor([loss, value]), torch.from_numpy(each)

    def _next_value(self, obs: np.ndarray) -> np.ndarray:
        """The maximum of the target network's values, or double DQN's estimate [B]."""
        values = self.target(obs)[1]
        total, rows = np.zeros(len(values), np.float32), np.arange(len(values))
        chooser = self.network(obs)[1] if self.double_dqn else None
        for _, columns in self.network.columns():
            if chooser is None:
                total += np.maximum.reduce(values[:, columns], 1)
            else:
                total += values[rows, columns.start + chooser[:, columns].argmax(1)]
        return total / np.float32(len(self.network.nvec))
