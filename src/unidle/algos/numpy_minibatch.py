"""PPO's minibatches on a CPU, in NumPy.

Through autograd a small minibatch is hundreds of operations, each of which torch takes longer to begin than to do. Here
are the formulas of ppo.py, differentiated by hand; `tests/algos/test_numpy_minibatch.py` compares both.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from unidle.nn.numpy_layers import Inputs, Layer, Trunk, product
from unidle.spaces.distributions import LOG_SQRT_2PI, LOG_ZERO

if TYPE_CHECKING:
    from unidle.algos.ppo import PPO, Batch


@dataclass
class _Choice:
    """What the network says of a head, one choice among some categories, in n samples."""

    columns: slice  # of what the actor gives
    mass: np.ndarray  # [n, categories] probabilities
    log_mass: np.ndarray  # [n, categories]
    chosen: np.ndarray  # [n] the categories taken
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
        """The gradient by the logits, of those by log-probability [n] and by each sample's entropy."""
        by_logits = self.mass * -by_log_prob[:, None]
        by_logits[np.arange(len(self.chosen)), self.chosen] += by_log_prob
        if by_entropy:
            by_logits -= by_entropy * self.mass * (self.log_mass + self.entropy[:, None])
        return by_logits


@dataclass
class _Reals:
    """What the network says of the real numbers in n samples."""

    columns: slice  # of what the actor gives
    z: np.ndarray  # [n, reals] how many deviations what was taken lies above the mean
    std: np.ndarray  # [reals]
    spread: float  # the sum of log std + log √2π
    by_log_std: np.ndarray  # [reals] where that gradient has its place

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
        """The gradient by the means, of those by log-probability [n] and by each sample's entropy."""
        by_mean = self.z * by_log_prob[:, None]
        np.einsum("ij,ij->j", by_mean, self.z, out=self.by_log_std)
        self.by_log_std += by_entropy * len(self.z) - np.add.reduce(by_log_prob)
        by_mean /= self.std
        return by_mean


class NumpyMinibatch:
    """Does what `PPO.gradient` does, and a step along it."""

    def __init__(self, algo: PPO) -> None:
        """`algo`'s policy must be small (see `is_small`)."""
        policy, parameters = algo.policy, algo.parameters
        self._algo, self._recipe = algo, algo.recipe
        self._inputs = Inputs(policy)
        trunks = [policy.actor_trunk] if policy.critic_trunk is None else [policy.actor_trunk, policy.critic_trunk]
        self._trunks = [Trunk.of(trunk, parameters) for trunk in trunks]
        self._heads = [Layer.of(head, parameters) for head in (policy.actor_head, policy.critic_head)]
        self._nvec, self._logits = policy.distribution.nvec, policy.distribution.n_logits
        self._log_std = policy.log_std.detach().numpy()
        self._by_log_std = parameters.grad_of(policy.log_std).numpy()
        self._grad = parameters.grad.numpy()
        self._sums, self._minibatches, self._stopped = (
            tensor.numpy() for tensor in (algo.sums, algo.minibatches, algo.stopped)
        )

    def learn(self, batch: Batch, orders: Tensor) -> None:
        """A step for each of these minibatches."""
        with np.errstate(all="ignore"):  # what overflows is seen in the figures, as with torch
            for order in orders.numpy():
                self._step_along(self._gradient(batch, order))

    def gradient(self, batch: Batch, order: Tensor) -> Tensor:
        """`PPO.gradient`."""
        with np.errstate(all="ignore"):
            return torch.tensor(self._gradient(batch, order.numpy()), dtype=torch.float32)

    def _gradient(self, batch: Batch, order: np.ndarray) -> list[float]:
        """Put the gradient in place; returns the first five of what is logged."""
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

        by_y, by_entropy = np.empty_like(y), -self._recipe.ent_coef / len(order)
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
        """What the actor's outputs [n, outs] say of each part of the actions taken."""
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
        """Gradient of the policy loss by the log-probabilities; that loss, KL, and the share that was clipped."""
        n = len(order)
        advantages = batch.advantages.numpy()[order, 0]
        if self._recipe.normalize_advantage:
            advantages -= np.add.reduce(advantages) / n
            advantages /= np.sqrt(np.add.reduce(np.square(advantages)) / (n - 1)) + 1e-8
        if batch.weights is not None:
            advantages *= batch.weights.numpy()[order, 0]
        log_ratio = log_probs - batch.log_probs.numpy()[order, 0]
        ratio = np.exp(log_ratio)
        clip = float(self._algo.clip_range)
        gain, clipped_gain = ratio * advantages, np.clip(ratio, 1 - clip, 1 + clip) * advantages
        kl = np.add.reduce(ratio - 1.0 - log_ratio) / n
        clipped = np.count_nonzero(np.abs(ratio - 1.0) > clip) / n
        loss = -np.add.reduce(np.minimum(gain, clipped_gain)) / n
        gain[gain > clipped_gain] = 0.0  # so that what is not a number stays in, to be seen
        gain *= -1.0 / n
        return gain, float(loss), float(kl), clipped

    def _value_slopes(self, batch: Batch, order: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, float]:
        """Gradient of the value loss, as it counts, by the values [n, 1]; and that loss."""
        reach, returns = self._recipe.clip_range_vf, batch.returns.numpy()[order, 0]
        if reach is None:
            error = values - returns
            slope = error
        else:
            old = batch.values.numpy()[order, 0]
            moved = values - old
            error = old + np.clip(moved, -reach, reach) - returns
            slope = np.where(np.abs(moved) <= reach, error, np.float32(0.0))
        loss = float(np.add.reduce(np.square(error))) / len(order)
        return (slope * np.float32(2.0 * self._recipe.vf_coef / len(order)))[:, None], loss

    def _step_along(self, logged: list[float]) -> None:
        """`PPO.step_along`."""
        recipe, grad = self._recipe, self._grad
        norm = float(torch.linalg.vector_norm(self._algo.parameters.grad))
        if not norm + 1e-6 <= recipe.max_grad_norm:
            grad *= np.float32(recipe.max_grad_norm / (norm + 1e-6))
        if recipe.target_kl is not None and logged[3] > 1.5 * recipe.target_kl:
            self._stopped[...] = 1.0
        if not self._stopped:
            self._sums += (*logged, norm)
            self._minibatches += 1.0
            self._algo.adam.step()
