"""Inference of a small MLP on a CPU."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from unidle.spaces.distributions import LOG_STD_RANGE, MASKED_BELOW

Outputs = Callable[[np.ndarray], np.ndarray]  # observations [n, obs_bytes] → outputs of the network, masked
Sample = Callable[[np.ndarray, np.ndarray], np.ndarray]  # outputs and noise [n, width] → actions [n, width]


@dataclass(frozen=True)
class ActArrays:
    """The arrays that an inference reads and writes, always the same ones."""

    obs: np.ndarray  # [N, obs_bytes]
    env_actions: np.ndarray  # [N, width]
    rollout_obs: np.ndarray  # [T + 1, N, obs_bytes]
    rollout_actions: np.ndarray  # [T + 1, N, width]
    noise: np.ndarray  # [T + 1, N, width]
    action_scale: np.ndarray  # [reals]
    action_shift: np.ndarray
    action_low: np.ndarray
    action_high: np.ndarray


class NumpyActor:
    """Acts with one policy into one rollout buffer."""

    def __init__(self, outputs: Outputs, sample: Sample, arrays: ActArrays) -> None:
        self._outputs, self._sample, self._arrays = outputs, sample, arrays
        self._heads = arrays.noise.shape[2] - len(arrays.action_scale)

    def __call__(self, at: tuple[int] | tuple[np.ndarray, np.ndarray]) -> None:
        """Store the observations at [step, env] `at` of the rollout, choose actions, and store these too."""
        arrays = self._arrays
        arrays.rollout_obs[at] = arrays.obs
        with np.errstate(all="ignore"):  # as in torch, an overflow shows in the actions only
            action = self._sample(self._outputs(arrays.obs), arrays.noise[at])
        arrays.rollout_actions[at] = action
        reals = action[:, self._heads :]
        if reals.size:
            reals *= arrays.action_scale
            reals += arrays.action_shift
            np.clip(reals, arrays.action_low, arrays.action_high, out=reals)
        arrays.env_actions[:] = action


# -- how actions are sampled (see `spaces.distributions`) --------------------------------------------------------------


def _categories(logits: np.ndarray, nvec: tuple[int, ...], uniform: np.ndarray, action: np.ndarray) -> None:
    """Write the categories that `uniform` [n, heads] selects to `action`."""
    start = 0
    for head, categories in enumerate(nvec):
        own = logits[:, start : start + categories]
        start += categories
        probs = np.exp(own - own.max(1, keepdims=True))
        cdf = np.cumsum(probs, 1)
        cdf *= probs > 0
        action[:, head] = np.argmax(cdf > uniform[:, head, None] * cdf.max(1, keepdims=True), 1)


def _all_equal(logits: np.ndarray) -> np.ndarray:
    """Logits of a uniform choice; masked categories stay masked."""
    return np.where(logits > MASKED_BELOW, np.float32(0.0), logits)


def _uniform_reals(noise: np.ndarray) -> np.ndarray:
    """Uniform in [-1, 1], from standard normal noise."""
    uniform: np.ndarray = torch.erf(torch.from_numpy(noise) / math.sqrt(2)).numpy()
    return uniform


@dataclass
class GaussianSample:
    """Categories, and Gaussians whose standard deviations do not depend on the observation."""

    nvec: tuple[int, ...]
    log_std: np.ndarray  # [reals]

    def __call__(self, y: np.ndarray, noise: np.ndarray) -> np.ndarray:
        """The action that `noise` selects."""
        action, heads = np.empty_like(noise), len(self.nvec)
        _categories(y, self.nvec, noise, action)
        reals = action[:, heads:]
        if reals.size:
            np.multiply(noise[:, heads:], np.exp(self.log_std), out=reals)
            reals += y[:, y.shape[1] - reals.shape[1] :]
        return action


@dataclass
class SquashedSample:
    """SAC's actions: categories, or tanh of a Gaussian; uniform while `at_random` is 1."""

    nvec: tuple[int, ...]
    at_random: np.ndarray  # []

    def __call__(self, y: np.ndarray, noise: np.ndarray) -> np.ndarray:
        """The action that `noise` selects."""
        if self.nvec:
            action = np.empty_like(noise)
            _categories(_all_equal(y) if self.at_random > 0 else y, self.nvec, noise, action)
            return action
        if self.at_random > 0:
            return _uniform_reals(noise)
        reals = noise.shape[1]
        u = np.exp(np.clip(y[:, reals:], *LOG_STD_RANGE))
        u *= noise
        u += y[:, :reals]
        return np.tanh(u, out=u)


@dataclass
class NoisySample:
    """TD3's actions: tanh of the outputs plus clipped Gaussian noise; uniform while `at_random` is 1."""

    std: float
    at_random: np.ndarray  # []

    def __call__(self, y: np.ndarray, noise: np.ndarray) -> np.ndarray:
        """The action that `noise` selects."""
        if self.at_random > 0:
            return _uniform_reals(noise)
        action = np.tanh(y)
        action += np.float32(self.std) * noise
        return np.clip(action, -1.0, 1.0, out=action)


@dataclass
class EpsilonGreedySample:
    """DQN's actions: the category with the highest value; with probability `epsilon` a random allowed one."""

    nvec: tuple[int, ...]
    epsilon: np.ndarray  # []

    def __call__(self, y: np.ndarray, noise: np.ndarray) -> np.ndarray:
        """The action that `noise` selects."""
        action, start = np.empty_like(noise), 0
        for head, categories in enumerate(self.nvec):
            action[:, head] = y[:, start : start + categories].argmax(1)
            start += categories
        explores = noise < self.epsilon
        if np.count_nonzero(explores):
            random = np.empty_like(noise)
            _categories(_all_equal(y), self.nvec, noise / np.maximum(self.epsilon, 1e-9), random)
            np.copyto(action, random, where=explores)
        return action
