"""Inference of a small MLP on a CPU."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from unidle.kernels.numpy.mlp import Actor
from unidle.spaces.distributions import LOG_ZERO


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

    def __init__(self, actor: Actor, arrays: ActArrays) -> None:
        self._actor, self._arrays = actor, arrays

    def __call__(self, at: tuple[int] | tuple[np.ndarray, np.ndarray]) -> None:
        """Store the observations at [step, env] `at` of the rollout, choose actions, and store these too."""
        actor, arrays = self._actor, self._arrays
        arrays.rollout_obs[at] = arrays.obs
        with np.errstate(all="ignore"):  # as in torch, an overflow shows in the actions only
            x, masked_out = actor.inputs(arrays.obs)
            y = actor.head(actor.trunk(x)[-1])
            if masked_out is not None:
                y[:, : actor.n_logits][masked_out] = LOG_ZERO
            action = self._sample(y, arrays.noise[at])
        arrays.rollout_actions[at] = action
        reals = action[:, len(actor.nvec) :]
        if reals.size:
            reals *= arrays.action_scale
            reals += arrays.action_shift
            np.clip(reals, arrays.action_low, arrays.action_high, out=reals)
        arrays.env_actions[:] = action

    def _sample(self, y: np.ndarray, noise: np.ndarray) -> np.ndarray:
        """The action that `noise` selects (see `spaces.distributions`)."""
        nvec = self._actor.nvec
        action, start = np.empty_like(noise), 0
        for head, categories in enumerate(nvec):
            logits = y[:, start : start + categories]
            start += categories
            probs = np.exp(logits - logits.max(1, keepdims=True))
            cdf = np.cumsum(probs, 1)
            cdf *= probs > 0
            action[:, head] = np.argmax(cdf > noise[:, head, None] * cdf.max(1, keepdims=True), 1)
        reals = action[:, len(nvec) :]
        if reals.size:
            np.multiply(noise[:, len(nvec) :], np.exp(self._actor.log_std), out=reals)
            reals += y[:, self._actor.n_logits :]
        return action
