"""PPO's minibatches on a CPU, for a small MLP.

Through autograd, a small minibatch is hundreds of operations whose overhead exceeds their work. Here the formulas of
`algos.ppo` are differentiated by hand.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from unidle.kernels.numpy.mlp import ActorCritic, product
from unidle.kernels.ppo_types import Batch, Coefficients, Counters
from unidle.spaces.distributions import LOG_SQRT_2PI, LOG_ZERO


@dataclass
class _Choice:
    """A discrete action of n samples: one choice among some categories."""

    columns: slice  # of the actor's outputs
    mass: np.ndarray  # [n, categories] probabilities
    log_mass: np.ndarray  # [n, categories]
    chosen: np.ndarray  # [n] the categories chosen
    entropy: np.ndarray  # [n]

    @staticmethod
    def of(y: np.ndarray, columns: slice, chosen: np.ndarray) -> _Choice:
        log_mass = y[:, columns] - y[:, columns].max(1, keepdims=True)
        mass = np.exp(log_mass)
        total = mass.sum(1, keepdims=True)
        mass /= total
        log_mass -= np.log(total)
        return _Choice(columns, mass, log_mass, chosen, -np.einsum("ij,ij->i", mass, log_mass))

    def log_probs(self) -> np.ndarray:
        return self.log_mass[np.arange(len(self.chosen)), self.chosen]

    def mean_entropy(self) -> float:
        return float(self.entropy.mean())

    def back(self, by_log_prob: np.ndarray, by_entropy: float) -> np.ndarray:
        """Gradient with respect to the logits, given those with respect to log-probability [n] and entropy."""
        by_logits = self.mass * -by_log_prob[:, None]
        by_logits[np.arange(len(self.chosen)), self.chosen] += by_log_prob
        if by_entropy:
            by_logits -= by_entropy * self.mass * (self.log_mass + self.entropy[:, None])
        return by_logits


@dataclass
class _Reals:
    """The continuous actions of n samples."""

    columns: slice  # of the actor's outputs
    z: np.ndarray  # [n, reals] (action − mean) / std
    std: np.ndarray  # [reals]
    spread: float  # the sum of log std + log √2π
    by_log_std: np.ndarray  # [reals] where the gradient with respect to log_std is written

    @staticmethod
    def of(columns: slice, mean: np.ndarray, taken: np.ndarray, log_std: np.ndarray, by_log_std: np.ndarray) -> _Reals:
        std, z = np.exp(log_std), taken - mean
        z /= std
        return _Reals(columns, z, std, float(np.add.reduce(log_std)) + len(std) * LOG_SQRT_2PI, by_log_std)

    def log_probs(self) -> np.ndarray:
        return np.einsum("ij,ij->i", self.z, self.z) * np.float32(-0.5) - np.float32(self.spread)

    def mean_entropy(self) -> float:
        return self.spread + 0.5 * len(self.std)

    def back(self, by_log_prob: np.ndarray, by_entropy: float) -> np.ndarray:
        """Gradient with respect to the means, given those with respect to log-probability [n] and entropy."""
        by_mean = self.z * by_log_prob[:, None]
        np.einsum("ij,ij->j", by_mean, self.z, out=self.by_log_std)
        self.by_log_std += by_entropy * len(self.z) - np.add.reduce(by_log_prob)
        by_mean /= self.std
        return by_mean


class NumpyMinibatch:
    """Gradients and steps of minibatches."""

    def __init__(
        self,
        network: ActorCritic,
        grad: Tensor,
        counters: Counters,
        coefficients: Coefficients,
        clip_range: Tensor,
        adam_step: Callable[[], None],
    ) -> None:
        """`grad` is the flat gradient, of which the network's are views; `adam_step` steps along it."""
        actor = network.actor
        self._inputs, self._nvec, self._logits, self._log_std = (
            actor.inputs,
            actor.nvec,
            actor.n_logits,
            actor.log_std,
        )
        self._by_log_std = network.log_std_grad
        self._trunks = [actor.trunk] if network.critic_trunk is None else [actor.trunk, network.critic_trunk]
        self._heads = [actor.head, network.critic_head]
        self._flat_grad, self._grad = grad, grad.numpy()
        self._coefficients, self._clip_range, self._adam_step = coefficients, clip_range, adam_step
        self._sums, self._minibatches, self._stopped = (
            tensor.numpy() for tensor in (counters.sums, counters.minibatches, counters.stopped)
        )

    def learn(self, batch: Batch, orders: Tensor) -> None:
        """Take one step for each minibatch `orders` [minibatches, samples] of `batch`."""
        with np.errstate(all="ignore"):  # overflow shows in the metrics, as with torch
            for order in orders.numpy():
                self._step_along(self._gradient(batch, order))

    def gradient(self, batch: Batch, order: Tensor) -> Tensor:
        """Compute the gradient of the samples `order` of `batch` in place; returns the metrics [5]."""
        with np.errstate(all="ignore"):
            return torch.tensor(self._gradient(batch, order.numpy()), dtype=torch.float32)

    def _gradient(self, batch: Batch, order: np.ndarray) -> list[float]:
        """Compute the gradient in place; returns the metrics."""
        x, forbidden = self._inputs(batch.obs.numpy()[order, 0])
        passed = [trunk(x) for trunk in self._trunks]
        latents = passed[0][-1], passed[-1][-1]  # the same one, if they share a trunk
        y, values = (head(latent) for head, latent in zip(self._heads, latents))
        if forbidden is not None:
            y[:, : self._logits][forbidden] = LOG_ZERO
        parts = self._parts(y, batch.actions.numpy()[order, 0])

        log_probs = sum((part.log_probs() for part in parts), np.zeros(len(order), np.float32))
        by_log_prob, policy_loss, kl, clipped = self._policy_slopes(batch, order, log_probs)
        by_value, value_loss = self._value_slopes(batch, order, values[:, 0])

        by_y, by_entropy = np.empty_like(y), -self._coefficients.ent_coef / len(order)
        for part in parts:
            by_y[:, part.columns] = part.back(by_log_prob, by_entropy)
        if forbidden is not None:
            by_y[:, : self._logits][forbidden] = 0.0
        by_latents = []
        for head, latent, by_out in zip(self._heads, latents, (by_y, by_value)):
            head.back(latent, by_out)
            by_latents.append(product(by_out, head.weight))
        if len(self._trunks) == 1:
            by_latents = [by_latents[0] + by_latents[1]]
        for trunk, through, by_latent in zip(self._trunks, passed, by_latents):
            trunk.back(through, by_latent)
        return [policy_loss, value_loss, sum(part.mean_entropy() for part in parts), kl, clipped]

    def _parts(self, y: np.ndarray, actions: np.ndarray) -> list[_Choice | _Reals]:
        """The actor's outputs [n, outs] and the actions taken, one part per kind of action."""
        parts: list[_Choice | _Reals] = []
        start = 0
        for head, categories in enumerate(self._nvec):
            parts.append(_Choice.of(y, slice(start, start + categories), actions[:, head].astype(np.int64)))
            start += categories
        if self._log_std.size:
            taken = actions[:, len(self._nvec) :]
            parts.append(_Reals.of(slice(start, None), y[:, start:], taken, self._log_std, self._by_log_std))
        return parts

    def _policy_slopes(
        self, batch: Batch, order: np.ndarray, log_probs: np.ndarray
    ) -> tuple[np.ndarray, float, float, float]:
        """Gradient of the policy loss with respect to the log-probabilities; that loss, KL, and the clip fraction."""
        n = len(order)
        advantages = batch.advantages.numpy()[order, 0]
        if self._coefficients.normalize_advantage:
            advantages -= np.add.reduce(advantages) / n
            advantages /= np.sqrt(np.add.reduce(np.square(advantages)) / (n - 1)) + self._coefficients.advantage_eps
        if batch.weights is not None:
            advantages *= batch.weights.numpy()[order, 0]
        log_ratio = log_probs - batch.log_probs.numpy()[order, 0]
        ratio = np.exp(log_ratio)
        clip = float(self._clip_range)
        gain, clipped_gain = ratio * advantages, np.clip(ratio, 1 - clip, 1 + clip) * advantages
        kl = np.add.reduce(ratio - 1.0 - log_ratio) / n
        clipped = np.count_nonzero(np.abs(ratio - 1.0) > clip) / n
        loss = -np.add.reduce(np.minimum(gain, clipped_gain)) / n
        gain[gain > clipped_gain] = 0.0  # written so that NaN propagates
        gain *= -1.0 / n
        return gain, float(loss), float(kl), clipped

    def _value_slopes(self, batch: Batch, order: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, float]:
        """Gradient of the weighted value loss with respect to the values [n, 1]; and that loss."""
        clip, returns = self._coefficients.clip_range_vf, batch.returns.numpy()[order, 0]
        if clip is None:
            error = values - returns
            slope = error
        else:
            old = batch.values.numpy()[order, 0]
            moved = values - old
            error = old + np.clip(moved, -clip, clip) - returns
            slope = np.where(np.abs(moved) <= clip, error, np.float32(0.0))
        loss = float(np.add.reduce(np.square(error))) / len(order)
        return (slope * np.float32(2.0 * self._coefficients.vf_coef / len(order)))[:, None], loss

    def _step_along(self, metrics: list[float]) -> None:
        """Clip, step and count (see `algos.ppo`)."""
        coefficients, grad = self._coefficients, self._grad
        norm = float(torch.linalg.vector_norm(self._flat_grad))
        if not norm + 1e-6 <= coefficients.max_grad_norm:
            grad *= np.float32(coefficients.max_grad_norm / (norm + 1e-6))
        if coefficients.max_kl is not None and metrics[3] > coefficients.max_kl:
            self._stopped[...] = 1.0
        if not self._stopped:
            self._sums += (*metrics, norm)
            self._minibatches += 1.0
            self._adam_step()
