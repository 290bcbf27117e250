"""The boundary: where every environment stood at the end of the last finished rollout.

It is what a checkpoint stores of the environments. A resumed run continues there: environments that have saved states
load them, and the open episodes of the others are replayed.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from unidle.engine.collect.episode_log import EpisodeLog, as_arrays, plain_state
from unidle.engine.collect.staging import Staging
from unidle.envs.open_episode import Difference, OpenEpisode
from unidle.envs.protocol import HostEnvs


class Boundary:
    """Observations, episodes and recurrent states at the boundary, and the log of the episodes that are open there."""

    obs: np.ndarray
    starts: np.ndarray  # [N] whether the observation is the first of its episode
    episode: np.ndarray  # [N] index of the open episode
    states: Tensor  # [N, S] recurrent

    def __init__(self, envs: HostEnvs, action_width: int, starts: np.ndarray, states: Tensor) -> None:
        """`starts` [N] and `states` [N, S] are the collector's: of the environments' current observations."""
        self._envs, self._current_starts, self._current_states = envs, starts, states
        self.log = EpisodeLog(envs.n_envs, action_width)

    def set_to_current(self) -> None:
        """Move the boundary to where the environments are now: at the start of a run, or when it is resumed."""
        block = self._envs.block
        self.obs, self.episode = block.obs.copy(), block.episode.copy()
        self.starts, self.states = self._current_starts.copy(), self._current_states.clone()

    def advance(self, staging: Staging, states: Tensor) -> None:
        """Move the boundary to the end of a rollout that was just uploaded; `states` are those after its last step."""
        if np.count_nonzero(staging.starts[0]):
            for env in np.flatnonzero(staging.starts[0]):
                self.log.restart(int(env))  # usually done already, but not after a fault
        self.log.extend(staging.actions, staging.rewards, staging.starts[1:])
        self.obs, self.episode = staging.last_obs.copy(), staging.last_episode.copy()
        self.starts, self.states = staging.starts[-1].copy(), states.clone()
        self._envs.block.oldest_episode[:] = self.episode

    def state_dict(self, env_states: list[dict[str, Any] | None]) -> dict[str, Any]:
        """What a checkpoint stores; `env_states` come from `states_to_save`."""
        episodes = [self.log.open_episode(env) for env in range(self._envs.n_envs)]
        return {
            "episode": torch.from_numpy(self.episode),
            "obs": torch.from_numpy(self.obs),
            "starts": torch.from_numpy(self.starts),
            "states": self.states.cpu(),
            "actions": [torch.from_numpy(actions.copy()) for actions, _ in episodes],
            "rewards": [torch.from_numpy(rewards.copy()) for _, rewards in episodes],
            "env_states": [plain_state(state) for state in env_states],
        }

    def states_to_save(self, states: list[dict[str, Any] | None], *, is_current: bool) -> list[dict[str, Any] | None]:
        """`OpenEpisode.state` of each environment, from `HostEnvs.states`.

        `is_current`: no environment has stepped beyond the boundary. Otherwise only wrapper states can be saved, which
        are kept for each episode.
        """
        # An environment whose worker died has begun another episode: the one at the boundary will be replayed.
        can_load = is_current & (self._envs.block.episode == self.episode)
        return [_to_save(*each) for each in zip(states, self.episode.tolist(), can_load)]

    def load_state_dict(self, state: dict[str, Any]) -> dict[int, Difference]:
        """Restore every environment's open episode; returns the environments that differ from before."""
        actions, rewards = ([part.numpy() for part in state[name]] for name in ("actions", "rewards"))
        env_states = [as_arrays(part) for part in state["env_states"]]
        points = map(OpenEpisode, state["episode"].tolist(), actions, rewards, state["obs"].numpy(), env_states)
        found = self._envs.resume(list(points))
        differences = {env: difference for env, difference in enumerate(found) if difference}
        lost = [env for env, difference in differences.items() if difference.is_lost]
        starts = self._current_starts
        starts[:] = state["starts"].numpy()
        for env in lost:
            if not starts[env] and not len(actions[env]):
                differences[env] = Difference("it is too long to be replayed", is_lost=True)
        starts[lost] = True
        self._current_states.copy_(state["states"])
        for env in range(self._envs.n_envs):
            if env in lost:
                self.log.restart(env)
            else:
                self.log.resume(env, actions[env], rewards[env])
        self.set_to_current()
        return differences


def _to_save(state: dict[str, Any] | None, episode: int, can_load: bool) -> dict[str, Any] | None:
    """The part of `HostEnvs.states` that restores an environment at the boundary, in this episode."""
    if state is not None and "carried" in state:
        return {"carried": state["carried"][episode]} if episode in state["carried"] else None
    return state if can_load else None
