"""Fills rollouts from host environments, serving whichever slices of them are ready first."""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np
import torch

from unidle.algos.capturing import Capturer, as_it_is
from unidle.engine.episodes import EpisodeLog, as_arrays, as_tensors
from unidle.engine.service import Service, Where
from unidle.envs.host import HostEnvs
from unidle.memory.rollout import Rollout
from unidle.nn.policy import Policy
from unidle.streams import keyed_generator
from unidle.timeline import ENVIRONMENT, INFERENCE, OTHER, Timeline


class _Notes:
    """What the host keeps of a rollout while it is filled, and copies to the device once, when it is whole."""

    def __init__(self, rollout: Rollout) -> None:
        (steps, n_envs), width = rollout.shape, rollout.actions.shape[2]
        self.rewards = np.zeros((steps, n_envs), np.float32)
        self.terminated = np.zeros((steps, n_envs), np.bool_)
        self.truncated = np.zeros((steps, n_envs), np.bool_)
        self.starts = np.zeros((steps + 1, n_envs), np.bool_)
        self.actions = np.zeros((steps, n_envs, width), np.float32)  # as the environments got them
        self.last_rows = np.zeros(rollout.rows.shape[1:], np.uint8)  # the observations after the last step
        self.final_rows: list[np.ndarray] = []  # of truncated episodes
        self.final_at: list[np.ndarray] = []  # t × N + environment
        self.episodes: list[np.ndarray] = []  # [t × N + environment, return, length] of those that ended


class Collector:
    """Acts in the environments and keeps what happened, rollout after rollout."""

    def __init__(
        self,
        envs: HostEnvs,
        policy: Policy,
        rollout: Rollout,
        seed: int,
        timeline: Timeline,
        capture: Capturer = as_it_is,
    ) -> None:
        self.envs, self.policy, self.rollout = envs, policy, rollout
        self._seed, self._timeline = seed, timeline
        self._device = rollout.rows.device
        self._steps, n_envs = rollout.shape
        # A quarter of the slices at a time: some are stepped while others are served, and each service is worth it.
        self._at_least = max(1, len(envs.bounds) // 4)
        self._state = torch.zeros(n_envs, policy.state_size, device=self._device)
        self._service = Service(policy, rollout, envs.block, self._state, capture)
        self._notes = _Notes(rollout)
        self._lines = [np.arange(first, end) for first, end in envs.bounds]
        self._done = [0] * len(envs.bounds)  # steps of the rollout that each slice has behind it
        self._begins = np.ones(n_envs, np.bool_)  # the observation in the block is the first of its episode
        self.log = EpisodeLog(n_envs, rollout.actions.shape[2])
        self.recent_returns: deque[float] = deque(maxlen=100)
        self.recent_lengths: deque[int] = deque(maxlen=100)
        self.episodes = 0

    def close(self) -> None:
        """End all environments."""
        self._service.close()
        self.envs.close()

    def start(self) -> None:
        """Begin episode 0 everywhere."""
        self.envs.start(np.zeros(self.envs.n_envs, np.int64))

    def collect(self, iteration: int) -> None:
        """Fill the rollout with the next T steps of every environment."""
        envs, notes, timeline = self.envs, self._notes, self._timeline
        self._draw_noise(iteration)
        notes.final_rows, notes.final_at, notes.episodes = [], [], []
        self._done = [0] * len(envs.bounds)
        waiting = list(range(len(envs.bounds)))  # slices whose observations wait for actions
        in_flight = 0
        while True:
            if waiting:
                timeline.enter(INFERENCE)
                self._serve(waiting)
                envs.send(waiting)
                in_flight += len(waiting)
            if not in_flight:
                break
            timeline.enter(ENVIRONMENT)
            stepped = envs.recv(min(self._at_least, in_flight))
            in_flight -= len(stepped)
            timeline.enter(OTHER)
            waiting = self._take_in(stepped)
        self._hand_over()
        self.log.extend(notes.actions, notes.terminated | notes.truncated)

    def _where(self, slices: list[int], behind: int) -> Where:
        """[step, environment] of each slice's current observation, or `behind` steps before it."""
        if len(slices) == 1:
            return self._done[slices[0]] - behind, slice(*self.envs.bounds[slices[0]])
        lines = [self._lines[number] for number in slices]
        steps = np.repeat([self._done[number] - behind for number in slices], [len(part) for part in lines])
        return steps, np.concatenate(lines)

    def _serve(self, slices: list[int]) -> None:
        """Give these slices their actions."""
        where = self._where(slices, 0)
        self._notes.starts[where] = self._begins[where[1]]
        actions = self._service.serve(where, self._begins if self.policy.state_size else None)[where[1]]
        self.envs.block.actions[where[1]] = actions
        self._notes.actions[where] = actions

    def _take_in(self, slices: list[int]) -> list[int]:
        """Note what a step of these slices brought; returns those that go on in this rollout."""
        block, notes = self.envs.block, self._notes
        for number in slices:
            self._done[number] += 1
        where = self._where(slices, 1)
        lines = where[1]
        terminated, truncated = block.terminated[lines], block.truncated[lines]
        notes.rewards[where], notes.terminated[where], notes.truncated[where] = (
            block.reward[lines],
            terminated,
            truncated,
        )
        ended = terminated | truncated
        self._begins[lines] = ended
        if ended.any():
            envs = np.arange(self.envs.n_envs)[lines]
            at = np.broadcast_to(where[0], ended.shape) * self.envs.n_envs + envs
            notes.final_rows.append(block.final_rows[envs[truncated]])
            notes.final_at.append(at[truncated])
            returns, lengths = block.episode_return[envs[ended]], block.episode_length[envs[ended]]
            notes.episodes.append(np.stack([at[ended], returns, lengths]))
        going_on = []
        for number in slices:
            if self._done[number] < self._steps:
                going_on.append(number)
            else:
                self._finish(self._lines[number])
        return going_on

    def _finish(self, lines: np.ndarray) -> None:
        """These environments have all their steps of the rollout behind them."""
        block, notes = self.envs.block, self._notes
        notes.last_rows[lines] = block.rows[lines]
        notes.starts[-1, lines] = self._begins[lines]

    def _draw_noise(self, iteration: int) -> None:
        """What sampling needs for the whole rollout, a function of seed and iteration alone."""
        generator = keyed_generator(self._device, self._seed, 1, iteration)
        self._service.noise[:-1].copy_(self.policy.distribution.noise(self.rollout.shape, generator))

    def _hand_over(self) -> None:
        """The rollout is whole: bring to the device what the host noted."""
        rollout, notes, device = self.rollout, self._notes, self._device
        for tensor, noted in (
            (rollout.rewards, notes.rewards),
            (rollout.terminated, notes.terminated),
            (rollout.truncated, notes.truncated),
            (rollout.starts, notes.starts),
            (rollout.rows[-1], notes.last_rows),
        ):
            tensor.copy_(torch.from_numpy(noted))
        rollout.states[-1].copy_(self._state)
        final_rows = np.concatenate([notes.last_rows[:0], *notes.final_rows])
        final_at = np.concatenate([np.zeros(0, np.int64), *notes.final_at])
        # By time, then environment: the order in which slices became ready must leave no trace.
        order = np.argsort(final_at)
        rollout.final_rows = torch.from_numpy(final_rows[order]).to(device)
        rollout.final_at = torch.from_numpy(final_at[order]).to(device)
        episodes = np.concatenate([np.zeros((3, 0)), *notes.episodes], 1)
        _, returns, lengths = episodes[:, np.argsort(episodes[0])]
        self.episodes += len(returns)
        self.recent_returns.extend(returns.tolist())
        self.recent_lengths.extend(lengths.tolist())

    # -- what a checkpoint holds ---------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Where each environment stands, and the running statistics of episodes."""
        block = self.envs.block
        return {
            "episode": torch.from_numpy(block.episode.copy()),
            "rows": torch.from_numpy(block.rows.copy()),
            "starts": torch.from_numpy(self._begins.copy()),
            "states": self._state.cpu(),
            "actions": [torch.from_numpy(self.log.actions(env)) for env in range(self.envs.n_envs)],
            "env_states": [_savable(state) for state in self.envs.states()],
            "recent_returns": list(self.recent_returns),
            "recent_lengths": list(self.recent_lengths),
            "episodes": self.episodes,
        }

    def load_state_dict(self, state: dict[str, Any]) -> list[int]:
        """Bring every environment back to where it stood; returns those whose episode had to start anew."""
        actions = [piece.numpy() for piece in state["actions"]]
        env_states = [as_arrays(part) for part in state["env_states"]]
        points = list(zip(state["episode"].tolist(), actions, state["rows"].numpy(), env_states))
        repeated = self.envs.resume(points)
        lost = [env for env, same in enumerate(repeated) if not same]
        self._begins[:] = state["starts"].numpy()
        self._begins[lost] = True
        self._state.copy_(state["states"])
        for env in range(self.envs.n_envs):
            self.log.restart(env, actions[env][:0] if env in lost else actions[env])
        self.recent_returns.extend(state["recent_returns"])
        self.recent_lengths.extend(state["recent_lengths"])
        self.episodes = state["episodes"]
        return lost


def _savable(state: dict[str, Any] | None) -> Any:
    """An environment's state for the checkpoint; None, so that the episode is replayed, if it is not all data."""
    try:
        return as_tensors(state)
    except TypeError:
        return None
