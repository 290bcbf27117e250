"""Gradients of SAC's critic and actor losses on a CPU, for small MLPs and continuous actions.

The formulas of `algos.sac`, differentiated by hand; `d_x` is the gradient of the loss with respect to x.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from unidle.kernels.numpy.critics import backward, minimum_gradient, q_values
from unidle.kernels.numpy.mlp import Inputs, Network
from unidle.kernels.numpy.squashed import SquashedSample
from unidle.kernels.off_policy_types import TransitionBatch


@dataclass
class SacGradients:
    """Computes both gradients, each in place."""

    inputs: Inputs
    actor: Network
    critics: Sequence[Network]
    targets: Sequence[Network]
    value_limit: float | None
    target_entropy: float

    def critic(
        self,
        batch: TransitionBatch,
        alpha: Tensor,
        noise: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Gradient of the critic loss; returns its value and the mean Q [2], and |TD error| [B]."""
        with np.errstate(all="ignore"):  # overflow shows in the metrics, as with torch
            next_x = self.inputs(batch.next_obs.numpy())[0]
            chosen = SquashedSample.of(self.actor(next_x)[1], noise.numpy())
            next_q = q_values(self.targets, np.concatenate((next_x, chosen.actions), 1))[1][..., 0]
            next_value = next_q.min(0) - alpha.numpy() * chosen.log_probs
            target = batch.returns.numpy() + batch.discounts.numpy() * next_value

            x = np.concatenate((self.inputs(batch.obs.numpy())[0], batch.actions.numpy()), 1)
            activations, q = q_values(self.critics, x)
            q, d_q = q[..., 0], batch.weights.numpy() / np.float32(len(x))
            if self.value_limit is not None:
                limit, unlimited = np.float32(self.value_limit), q
                q, target = np.clip(q, -limit, limit), np.clip(target, -limit, limit)
                d_q = np.where(q == unlimited, d_q, np.float32(0.0))
            errors = q - target
            loss = 0.5 * np.mean(batch.weights.numpy() * np.square(errors), 1).sum()
            backward(self.critics, activations, (d_q * errors)[..., None])
            return torch.tensor([loss, q.mean()]), torch.from_numpy(np.abs(errors).mean(0))

    def policy(self, batch: TransitionBatch, alpha: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        """Gradient of the actor loss; returns its value and the entropy [2], and log π + H̄ [B]."""
        with np.errstate(all="ignore"):
            x = self.inputs(batch.obs.numpy())[0]
            n_inputs, temperature = x.shape[1], alpha.numpy()
            d_loss = (batch.weights.numpy() > 0) / np.float32(len(x))  # of each transition
            actor_activations, outputs = self.actor(x)
            sample = SquashedSample.of(outputs, noise.numpy())
            activations, q = q_values(self.critics, np.concatenate((x, sample.actions), 1))
            q = q[..., 0]
            loss = np.add.reduce(d_loss * (temperature * sample.log_probs - q.min(0)))
            columns = slice(n_inputs, n_inputs + sample.actions.shape[1])
            d_actions = minimum_gradient(self.critics, activations, q, -d_loss, columns)
            d_outputs = sample.backward(d_actions, temperature * d_loss)
            self.actor.backward(actor_activations, d_outputs)
            entropy = -sample.log_probs.mean()
            return torch.tensor([loss, entropy]), torch.from_numpy(sample.log_probs + np.float32(self.target_entropy))
