"""The replay buffer on a host, in NumPy: for a few environments, torch's overhead per operation exceeds the work."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from unidle.buffers.replay import Replay, Transitions


class NumpyReplay(Replay):
    """A `Replay` on the host, with the same contents and samples; its arrays share memory with the tensors."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self._obs = self.obs.numpy().view(np.int64)  # words: the cost of indexing is per element
        self._actions, self._rewards, self._terminated, self._ended, self._has_transition = (
            field.numpy() for field in (self.actions, self.rewards, self.terminated, self.ended, self.has_transition)
        )
        self._order, self._cursor, self._n_added, self._n_overwritten, self._powers = (
            field.numpy() for field in (self.order, self.cursor, self.n_added, self.n_overwritten, self.powers)
        )
        self._envs, self._offsets = self._env_ids.numpy(), self._step_offsets.numpy()

    def start(self, obs: Tensor, restarted: Tensor | None = None) -> None:
        """As `Replay.start`."""
        self.begin_rollout(obs.numpy(), np.ones(self.n_envs, np.bool_) if restarted is None else restarted.numpy())

    def begin_rollout(self, obs: np.ndarray, restarted: np.ndarray) -> None:
        """`start`, with arrays."""
        here = self._cursor
        if np.count_nonzero(restarted):
            last = self._after(here, -1)
            is_open = self._has_transition[last] & restarted
            self._ended[last] |= restarted
            here[:] = self._after(here, is_open)
            self._n_overwritten += self._has_transition[here]
            self._has_transition[here] = False
        self._obs[here] = obs.view(np.int64)

    def add(
        self,
        actions: Tensor,
        rewards: Tensor,
        terminated: Tensor,
        truncated: Tensor,
        next_obs: Tensor,
        final_obs: Tensor,
    ) -> None:
        """As `Replay.add`."""
        step = (actions, rewards, terminated, truncated, next_obs, final_obs)
        self.add_rollout(*(tensor.numpy()[np.newaxis] for tensor in step))

    def add_rollout(
        self,
        actions: np.ndarray,
        rewards: np.ndarray,
        terminated: np.ndarray,
        truncated: np.ndarray,
        next_obs: np.ndarray,
        final_obs: np.ndarray,
    ) -> None:
        """Add the steps of a rollout, [T, N, ..] each, as one call of `add` for each step would."""
        n_steps, ended = len(rewards), terminated | truncated
        n_cells = np.add.accumulate(1 + ended, 0)  # [T, N] until the cell that each step opens
        if 2 * n_steps >= self._ring_size and n_cells[-1].max() >= self._ring_size:  # it would overwrite itself
            half = n_steps // 2
            arrays = actions, rewards, terminated, truncated, next_obs, final_obs
            self.add_rollout(*(array[:half] for array in arrays))
            self.add_rollout(*(array[half:] for array in arrays))
            return
        opened = self._after(self._cursor, n_cells)
        here = np.concatenate((self._cursor[None], opened[:-1]))
        numbers = self._n_added + np.arange(n_steps)[:, None]
        self._order[numbers % self._ring_size * self.n_envs + self._envs] = here
        self._n_added += n_steps
        overwritten = self._has_transition[opened]
        if np.count_nonzero(overwritten):
            self._n_overwritten += np.count_nonzero(overwritten, 0)
            self._has_transition[opened] = False
        if np.count_nonzero(ended):
            final = self._after(here)
            self._n_overwritten += np.count_nonzero(self._has_transition[final] & ended, 0)
            self._has_transition[final[ended]] = False
            self._obs[final[ended]] = final_obs[ended].view(np.int64)
        self._actions[here] = actions
        self._rewards[here] = rewards
        self._terminated[here] = terminated
        self._ended[here] = ended
        self._has_transition[here] = True
        self._obs[opened] = next_obs.view(np.int64)
        self._cursor[:] = opened[-1]

    def _after(self, cells: np.ndarray, steps: np.ndarray | int = 1) -> np.ndarray:
        after: np.ndarray = (cells + steps * self.n_envs) % self.n_cells
        return after

    def sample_cells(self, batch_size: int, generator: torch.Generator) -> Tensor:
        """As `Replay.sample_cells`, from the same random numbers."""
        n_stored = self._n_added - self._n_overwritten
        cumulative = np.add.accumulate(n_stored)
        draws = torch.rand(batch_size, dtype=torch.float64, generator=generator).numpy()
        pick = np.minimum((draws * cumulative[-1]).astype(np.int64), cumulative[-1] - 1)
        np.maximum(pick, 0, out=pick)
        env = np.minimum(cumulative.searchsorted(pick, "right"), self.n_envs - 1)
        number = (self._n_overwritten - (cumulative - n_stored))[env] + pick
        return torch.from_numpy(self._order[number % self._ring_size * self.n_envs + env].astype(np.int64))

    def gather(self, cells: Tensor) -> Transitions:
        """As `Replay.gather`."""
        start = cells.numpy()
        length: np.ndarray | int = 1
        if len(self._offsets) == 1:
            last, returns = start, self._rewards[start]
        else:
            path = (start[:, None] + self._offsets) % self.n_cells  # [B, n]
            is_open = path == self._cursor[start % self.n_envs][:, None]
            exists = np.ones_like(is_open)
            np.logical_and.accumulate(~(self._ended[path[:, :-1]] | is_open[:, 1:]), 1, out=exists[:, 1:])
            length = exists.sum(1)
            last = self._after(start, length - 1)
            returns = (np.where(exists, self._rewards[path], np.float32(0.0)) * self._powers[:-1]).sum(1)
        discounts = np.where(self._terminated[last], np.float32(0.0), self._powers[length])
        return Transitions(
            obs=self._take_obs(start),
            actions=torch.from_numpy(self._actions[start]),
            returns=torch.from_numpy(returns),
            discounts=torch.from_numpy(discounts),
            next_obs=self._take_obs(self._after(start, length)),
            index=cells,
            weights=torch.from_numpy(self._has_transition[start].astype(np.float32)),
        )

    def _take_obs(self, cells: np.ndarray) -> Tensor:
        return torch.from_numpy(self._obs.take(cells, 0).view(np.uint8))
