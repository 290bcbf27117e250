"""Inference of a small MLP on a CPU."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from unidle.kernels.numpy.mlp import Actor
from unidle.spaces.distributions import LOG_ZERO


@dataclass(frozen=True)
class ActArrays:
    """What an inference reads and writes, changed in place only."""

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
        """Store the observations at [step, env] of the rollout, and the actions chosen for them."""
        actor, arrays = self._actor, self._arrays
        arrays.rollout_obs[at] = arrays.obs
        with np.errstate(all="ignore"):  # overflow shows in the actions, as with torch
            x, forbidden = actor.inputs(arrays.obs)
            y = actor.head(actor.trunk(x)[-1])
            if forbidden is not None:
                y[:, : actor.n_logits][forbidden] = LOG_ZERO
            action = self._sample(y, arrays.noise[at])
        arrays.rollout_actions[at] = action
        reals = action[:, len(actor.nvec) :]
        if reals.size:
            reals *= arrays.action_scale
            reals += arrays.action_shift
            np.clip(reals, arrays.action_low, arrays.action_high, out=reals)
        arrays.env_actions[:] = action

    def _sample(self, y: np.ndarray, noise: np.ndarray) -> np.ndarray:
        """The action that `noise` picks (see `spaces.distributions`)."""
        nvec = self._actor.nvec
        action, start = np.empty_like(noise), 0
        for head, categories in enumerate(nvec):
            logits = y[:, start : start + categories]
            start += categories
            mass = np.exp(logits - logits.max(1, keepdims=True))
            reach = np.cumsum(mass, 1)
            reach *= mass > 0
            action[:, head] = np.argmax(reach > noise[:, head, None] * reach.max(1, keepdims=True), 1)
        reals = action[:, len(nvec) :]
        if reals.size:
            np.multiply(noise[:, len(nvec) :], np.exp(self._actor.log_std), out=reals)
            reals += y[:, self._actor.n_logits :]
        return action
