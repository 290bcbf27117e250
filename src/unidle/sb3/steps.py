"""The steps of a rollout, as callbacks see them in `locals`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from unidle.algos.registry import AnyPolicy
from unidle.buffers.rollout import Rollout
from unidle.envs.vector.decode import decode_batch
from unidle.nn.encoder import leaf_tensor
from unidle.spaces.actions import ActionLayout
from unidle.spaces.observations import ObservationLayout
from unidle.spaces.tree import rebuild


class Step(NamedTuple):
    """A step of all environments."""

    rewards: np.ndarray  # [N]
    terminated: np.ndarray  # [N]
    truncated: np.ndarray  # [N]
    actions: Any  # [N, …]
    new_obs: Any  # [N, …]; where an episode ended, the first of the next


def steps_of(
    rollout: Rollout, policy: AnyPolicy, obs_layout: ObservationLayout, action_layout: ActionLayout
) -> Iterator[Step]:
    """The steps in order. Arrays are converted once for the whole rollout."""
    n_steps, n_envs = rollout.shape
    rewards = rollout.rewards.cpu().numpy()
    terminated, truncated = rollout.terminated.cpu().numpy(), rollout.truncated.cpu().numpy()
    flat = policy.distribution.to_env(rollout.actions).reshape(n_steps * n_envs, -1).cpu().numpy()
    actions = decode_batch(action_layout, flat)
    new_obs = rollout.obs[1:].cpu()  # [time, env, obs_bytes]
    leaves = {leaf.path: leaf_tensor(new_obs, leaf).numpy() for leaf in obs_layout.leaves}
    for step in range(n_steps):
        rows = slice(step * n_envs, (step + 1) * n_envs)
        observation = rebuild(obs_layout.space, {path: values[step] for path, values in leaves.items()})
        yield Step(rewards[step], terminated[step], truncated[step], _part(actions, rows), observation)


def _part(actions: Any, rows: slice) -> Any:
    """Rows of a batch of actions in the structure of their space."""
    if isinstance(actions, dict):
        return {key: _part(part, rows) for key, part in actions.items()}
    return tuple(_part(part, rows) for part in actions) if isinstance(actions, tuple) else actions[rows]
