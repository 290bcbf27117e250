"""A tanh-squashed Gaussian in NumPy (see `spaces.distributions.squashed`), sampled with reparametrisation."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from unidle.spaces.distributions import LOG_SQRT_2PI, LOG_STD_RANGE


@dataclass
class SquashedSample:
    """Actions of n samples, and what their backward pass needs."""

    actions: np.ndarray  # [n, reals] tanh(mean + std × noise)
    log_probs: np.ndarray  # [n]
    spread: np.ndarray  # [n, reals] std × noise
    in_range: np.ndarray  # [n, reals] whether log_std was not clamped

    @staticmethod
    def of(outputs: np.ndarray, noise: np.ndarray) -> SquashedSample:
        """From a network's outputs [n, 2 × reals], means and log_stds, and standard normal noise [n, reals]."""
        reals = noise.shape[1]
        raw = outputs[:, reals:]
        log_std = np.clip(raw, *LOG_STD_RANGE)
        spread = np.exp(log_std) * noise
        u = outputs[:, :reals] + spread
        # −log N(u) + log (1 − tanh² u), the latter as 2 (log 2 − u − softplus(−2u))
        negative = 0.5 * np.square(noise) + log_std + np.float32(LOG_SQRT_2PI)
        negative += 2.0 * (np.float32(math.log(2)) - u - np.logaddexp(np.float32(0.0), -2.0 * u))
        return SquashedSample(np.tanh(u), -negative.sum(1), spread, raw == log_std)

    def backward(self, d_actions: np.ndarray, d_log_probs: np.ndarray) -> np.ndarray:
        """Gradient with respect to the outputs, given those with respect to actions and log-probabilities [n]."""
        d_log_prob = d_log_probs[:, None]
        # d log(1 − tanh² u) / du = −2 tanh u
        d_u = d_actions * (1.0 - np.square(self.actions)) + 2.0 * self.actions * d_log_prob
        d_log_std = np.where(self.in_range, d_u * self.spread - d_log_prob, np.float32(0.0))
        return np.concatenate((d_u, d_log_std), 1)
