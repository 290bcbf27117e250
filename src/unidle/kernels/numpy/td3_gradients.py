"""Gradients of TD3's critic and actor losses on a CPU, for small MLPs.

The formulas of `algos.td3`, differentiated by hand; `d_x` is the gradient of the loss with respect to x.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from unidle.kernels.numpy.critics import backward, q_values
from unidle.kernels.numpy.mlp import Inputs, Network
from unidle.kernels.off_policy_types import TransitionBatch


@dataclass
class Td3Gradients:
    """Computes both gradients, each in place."""

    inputs: Inputs
    actor: Network
    critics: Sequence[Network]
    target_actor: Network
    target_critics: Sequence[Network]
    noise_std: float  # of the target policy's smoothing
    noise_clip: float

    def critic(
        self,
        batch: TransitionBatch,
        noise: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Gradient of the critic loss; returns its value and the mean Q [2], and |TD error| [B]."""
        with np.errstate(all="ignore"):  # overflow shows in the metrics, as with torch
            next_x = self.inputs(batch.next_obs.numpy())[0]
            next_actions = np.tanh(self.target_actor(next_x)[1])
            next_actions += np.clip(np.float32(self.noise_std) * noise.numpy(), -self.noise_clip, self.noise_clip)
            np.clip(next_actions, -1.0, 1.0, out=next_actions)
            next_q = q_values(self.target_critics, np.concatenate((next_x, next_actions), 1))[1][..., 0]
            target = batch.returns.numpy() + batch.discounts.numpy() * next_q.min(0)

            x = np.concatenate((self.inputs(batch.obs.numpy())[0], batch.actions.numpy()), 1)
            activations, q = q_values(self.critics, x)
            errors = q[..., 0] - target
            loss = np.mean(batch.weights.numpy() * np.square(errors), 1).sum()
            d_q = batch.weights.numpy() * np.float32(2.0 / len(x)) * errors
            backward(self.critics, activations, d_q[..., None])
            return torch.tensor([loss, q.mean()]), torch.from_numpy(np.abs(errors).mean(0))

    def policy(self, batch: TransitionBatch) -> tuple[Tensor, Tensor]:
        """Gradient of the actor loss; returns its value and 1 [2], and an empty tensor."""
        with np.errstate(all="ignore"):
            x = self.inputs(batch.obs.numpy())[0]
            actor_activations, outputs = self.actor(x)
            actions, critic = np.tanh(outputs), self.critics[0]
            activations, q = critic(np.concatenate((x, actions), 1))
            d_q = (batch.weights.numpy() > 0) / np.float32(-len(x))
            loss = np.add.reduce(d_q * q[:, 0])
            columns = slice(x.shape[1], x.shape[1] + actions.shape[1])
            d_actions = critic.input_gradient(activations, d_q[:, None], columns)
            d_actions *= 1.0 - np.square(actions)
            self.actor.backward(actor_activations, d_actions)
            return torch.tensor([loss, 1.0]), torch.empty(0)
