"""Inference of a small network on a CPU, in NumPy: torch takes longer to begin its operations than to do them."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from unidle.algos.registry import AnyPolicy
from unidle.buffers.rollout import Rollout
from unidle.envs.shared_block import SharedBlock
from unidle.nn.actor_critic import ActorCritic
from unidle.nn.numpy_layers import Inputs, Layer, Trunk, is_small
from unidle.spaces.distributions import LOG_ZERO


class NumpyActor:
    """Acts with one policy into one rollout, as `Service` does."""

    def __init__(
        self, policy: ActorCritic, rollout: Rollout, block: SharedBlock, noise: Tensor, staged: Tensor
    ) -> None:
        """`policy` must be one that has it (see `of`)."""
        chosen = policy.distribution
        self._inputs, self._trunk = Inputs(policy), Trunk.of(policy.actor_trunk)
        self._head, self._log_std = Layer.of(policy.actor_head), policy.log_std.detach().numpy()
        self._nvec, self._logits = chosen.nvec, chosen.n_logits
        ranges = (chosen._scale, chosen._shift, chosen._low, chosen._high)
        self._scale, self._shift, self._low, self._high = (tensor.numpy() for tensor in ranges)
        self._block_obs, self._noise, self._staged = block.obs, noise.numpy(), staged.numpy()
        self._obs, self._actions = rollout.obs.numpy(), rollout.actions_and_trash.numpy()

    @staticmethod
    def of(policy: AnyPolicy, rollout: Rollout, block: SharedBlock, noise: Tensor, staged: Tensor) -> NumpyActor | None:
        """None if there is none for such a policy, or so many environments."""
        if not isinstance(policy, ActorCritic) or not is_small(policy, len(block.obs)):
            return None
        return NumpyActor(policy, rollout, block, noise, staged)

    def __call__(self, at: tuple[int] | tuple[np.ndarray, np.ndarray]) -> None:
        """Store the block's observations `at` [step, environment], and the actions chosen on them."""
        self._obs[at] = self._block_obs
        with np.errstate(all="ignore"):  # what overflows is seen in the actions, as with torch
            x, forbidden = self._inputs(self._block_obs)
            y = self._head(self._trunk(x)[-1])
            if forbidden is not None:
                y[:, : self._logits][forbidden] = LOG_ZERO
            action = self._sample(y, self._noise[at])
        self._actions[at] = action
        reals = action[:, len(self._nvec) :]
        if reals.size:
            reals *= self._scale
            reals += self._shift
            np.clip(reals, self._low, self._high, out=reals)
        self._staged[:] = action

    def _sample(self, y: np.ndarray, noise: np.ndarray) -> np.ndarray:
        """`ActionDistribution.sample`."""
        action, start = np.empty_like(noise), 0
        for head, categories in enumerate(self._nvec):
            logits = y[:, start : start + categories]
            start += categories
            mass = np.exp(logits - logits.max(1, keepdims=True))
            reach = np.cumsum(mass, 1)
            reach *= mass > 0
            action[:, head] = np.argmax(reach > noise[:, head, None] * reach.max(1, keepdims=True), 1)
        reals = action[:, len(self._nvec) :]
        if reals.size:
            np.multiply(noise[:, len(self._nvec) :], np.exp(self._log_std), out=reals)
            reals += y[:, self._logits :]
        return action
