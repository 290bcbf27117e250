"""PPO's minibatches on a CPU, for a small MLP.

Through autograd, a small minibatch is hundreds of operations whose overhead exceeds their work. Here the formulas of
`algos.ppo` are differentiated by hand; `d_x` is the gradient of the loss with respect to x.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from unidle.kernels.numpy.mlp import ActorCritic
from unidle.kernels.numpy.product import product
from unidle.kernels.ppo_types import Batch, Coefficients, Counters
from unidle.spaces.distributions import LOG_SQRT_2PI, LOG_ZERO


@dataclass
class _Categorical:
    """One discrete action of n samples."""

    columns: slice  # of the actor's outputs
    probs: np.ndarray  # [n, categories]
    all_log_probs: np.ndarray  # [n, categories]
    taken: np.ndarray  # [n] the categories that were taken
    entropy: np.ndarray  # [n]

    @staticmethod
    def of(y: np.ndarray, columns: slice, taken: np.ndarray) -> _Categorical:
        all_log_probs = y[:, columns] - y[:, columns].max(1, keepdims=True)
        probs = np.exp(all_log_probs)
        total = probs.sum(1, keepdims=True)
        probs /= total
        all_log_probs -= np.log(total)
        return _Categorical(columns, probs, all_log_probs, taken, -np.einsum("ij,ij->i", probs, all_log_probs))

    def log_probs(self) -> np.ndarray:
        return self.all_log_probs[np.arange(len(self.taken)), self.taken]

    def mean_entropy(self) -> float:
        return float(self.entropy.mean())

    def backward(self, d_log_prob: np.ndarray, d_entropy: float) -> np.ndarray:
        """Gradient with respect to the logits, given those with respect to log-probability [n] and entropy."""
        d_logits = self.probs * -d_log_prob[:, None]
        d_logits[np.arange(len(self.taken)), self.taken] += d_log_prob
        if d_entropy:
            d_logits -= d_entropy * self.probs * (self.all_log_probs + self.entropy[:, None])
        return d_logits


@dataclass
class _Gaussian:
    """The continuous actions of n samples."""

    columns: slice  # of the actor's outputs
    z: np.ndarray  # [n, reals] (action − mean) / std
    std: np.ndarray  # [reals]
    log_normaliser: float  # Σ (log std + log √2π)
    d_log_std: np.ndarray  # [reals] where the gradient with respect to log_std is written

    @staticmethod
    def of(
        columns: slice, mean: np.ndarray, taken: np.ndarray, log_std: np.ndarray, d_log_std: np.ndarray
    ) -> _Gaussian:
        std, z = np.exp(log_std), taken - mean
        z /= std
        return _Gaussian(columns, z, std, float(np.add.reduce(log_std)) + len(std) * LOG_SQRT_2PI, d_log_std)

    def log_probs(self) -> np.ndarray:
        return np.einsum("ij,ij->i", self.z, self.z) * np.float32(-0.5) - np.float32(self.log_normaliser)

    def mean_entropy(self) -> float:
        return self.log_normaliser + 0.5 * len(self.std)

    def backward(self, d_log_prob: np.ndarray, d_entropy: float) -> np.ndarray:
        """Gradient with respect to the means, given those with respect to log-probability [n] and entropy."""
        d_mean = self.z * d_log_prob[:, None]
        np.einsum("ij,ij->j", d_mean, self.z, out=self.d_log_std)
        self.d_log_std += d_entropy * len(self.z) - np.add.reduce(d_log_prob)
        d_mean /= self.std
        return d_mean


class NumpyMinibatch:
    """Computes gradients of minibatches and steps along them."""

    def __init__(
        self,
        network: ActorCritic,
        grad: Tensor,
        counters: Counters,
        coefficients: Coefficients,
        clip_range: Tensor,
        optimiser_step: Callable[[], None],
    ) -> None:
        """`grad` is the flat gradient, which the network's gradients are views of; `optimiser_step` steps along it."""
        actor = network.actor
        self._inputs, self._nvec, self._logits, self._log_std = (
            actor.inputs,
            actor.nvec,
            actor.n_logits,
            actor.log_std,
        )
        self._d_log_std = network.log_std_grad
        self._trunks = [actor.trunk] if network.critic_trunk is None else [actor.trunk, network.critic_trunk]
        self._heads = [actor.head, network.critic_head]
        self._flat_grad, self._grad = grad, grad.numpy()
        self._coefficients, self._clip_range, self._optimiser_step = coefficients, clip_range, optimiser_step
        self._sums, self._minibatches, self._stopped = (
            tensor.numpy() for tensor in (counters.sums, counters.minibatches, counters.stopped)
        )

    def learn(self, batch: Batch, orders: Tensor) -> None:
        """Take one step for each minibatch `orders` [minibatches, samples] of `batch`."""
        with np.errstate(all="ignore"):  # overflow shows in the metrics, as with torch
            for order in orders.numpy():
                self._step(self._gradient(batch, order))

    def gradient(self, batch: Batch, order: Tensor) -> Tensor:
        """Compute the gradient of the samples `order` of `batch` in place; returns the metrics [5]."""
        with np.errstate(all="ignore"):
            return torch.tensor(self._gradient(batch, order.numpy()), dtype=torch.float32)

    def _gradient(self, batch: Batch, order: np.ndarray) -> list[float]:
        """Compute the gradient in place; returns the metrics."""
        x, masked_out = self._inputs(batch.obs.numpy()[order, 0])
        activations = [trunk(x) for trunk in self._trunks]
        latents = activations[0][-1], activations[-1][-1]  # the same one if actor and critic share a trunk
        y, values = (head(latent) for head, latent in zip(self._heads, latents))
        if masked_out is not None:
            y[:, : self._logits][masked_out] = LOG_ZERO
        parts = self._parts(y, batch.actions.numpy()[order, 0])

        log_probs = sum((part.log_probs() for part in parts), np.zeros(len(order), np.float32))
        d_log_prob, policy_loss, kl, clipped = self._policy_gradient(batch, order, log_probs)
        d_value, value_loss = self._value_gradient(batch, order, values[:, 0])

        d_y, d_entropy = np.empty_like(y), -self._coefficients.ent_coef / len(order)
        for part in parts:
            d_y[:, part.columns] = part.backward(d_log_prob, d_entropy)
        if masked_out is not None:
            d_y[:, : self._logits][masked_out] = 0.0
        d_latents = []
        for head, latent, d_out in zip(self._heads, latents, (d_y, d_value)):
            head.backward(latent, d_out)
            d_latents.append(product(d_out, head.weight))
        if len(self._trunks) == 1:
            d_latents = [d_latents[0] + d_latents[1]]
        for trunk, layer_activations, d_latent in zip(self._trunks, activations, d_latents):
            trunk.backward(layer_activations, d_latent)
        return [policy_loss, value_loss, sum(part.mean_entropy() for part in parts), kl, clipped]

    def _parts(self, y: np.ndarray, actions: np.ndarray) -> list[_Categorical | _Gaussian]:
        """The actor's outputs [n, outs] and the actions that were taken: a part per discrete action, one for reals."""
        parts: list[_Categorical | _Gaussian] = []
        start = 0
        for head, categories in enumerate(self._nvec):
            parts.append(_Categorical.of(y, slice(start, start + categories), actions[:, head].astype(np.int64)))
            start += categories
        if self._log_std.size:
            taken = actions[:, len(self._nvec) :]
            parts.append(_Gaussian.of(slice(start, None), y[:, start:], taken, self._log_std, self._d_log_std))
        return parts

    def _policy_gradient(
        self, batch: Batch, order: np.ndarray, log_probs: np.ndarray
    ) -> tuple[np.ndarray, float, float, float]:
        """Gradient of the policy loss with respect to the log-probabilities, the policy loss, KL, clip fraction."""
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
        surrogate, clipped_surrogate = ratio * advantages, np.clip(ratio, 1 - clip, 1 + clip) * advantages
        kl = np.add.reduce(ratio - 1.0 - log_ratio) / n
        clipped = np.count_nonzero(np.abs(ratio - 1.0) > clip) / n
        loss = -np.add.reduce(np.minimum(surrogate, clipped_surrogate)) / n
        surrogate[surrogate > clipped_surrogate] = 0.0  # written so that NaN propagates
        surrogate *= -1.0 / n
        return surrogate, float(loss), float(kl), clipped

    def _value_gradient(self, batch: Batch, order: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, float]:
        """Gradient of `vf_coef` × the value loss with respect to the values [n, 1], and the value loss."""
        clip, returns = self._coefficients.clip_range_vf, batch.returns.numpy()[order, 0]
        if clip is None:
            error = values - returns
            d_value = error
        else:
            old = batch.values.numpy()[order, 0]
            change = values - old
            error = old + np.clip(change, -clip, clip) - returns
            d_value = np.where(np.abs(change) <= clip, error, np.float32(0.0))
        loss = float(np.add.reduce(np.square(error))) / len(order)
        return (d_value * np.float32(2.0 * self._coefficients.vf_coef / len(order)))[:, None], loss

    def _step(self, metrics: list[float]) -> None:
        """Clip, step and count, as `algos.ppo.PPO.step` does."""
        coefficients, grad = self._coefficients, self._grad
        norm = float(torch.linalg.vector_norm(self._flat_grad))
        if not norm + 1e-6 <= coefficients.max_grad_norm:
            grad *= np.float32(coefficients.max_grad_norm / (norm + 1e-6))
        if coefficients.max_kl is not None and metrics[3] > coefficients.max_kl:
            self._stopped[...] = 1.0
        if not self._stopped:
            self._sums += (*metrics, norm)
            self._minibatches += 1.0
            self._optimiser_step()
