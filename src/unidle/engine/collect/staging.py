"""Host-side staging of a rollout: filled step by step, uploaded to the device once, when the rollout is complete."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from unidle.buffers.rollout import Rollout, RolloutArrays
from unidle.engine.collect.episode_stats import FinishedEpisodes
from unidle.engine.collect.inference import StepEnvIndex
from unidle.envs.shared_block import EPISODE_ENDED, SUCCEEDED, SharedBlock, unpack_step_words


class Staging:
    """The host's part of one rollout of T steps in N environments."""

    def __init__(self, rollout: Rollout) -> None:
        (steps, n_envs), width = rollout.shape, rollout.actions.shape[2]
        self._pinned = rollout.obs.is_cuda
        self._n_envs = n_envs
        self._no_finals = rollout.final_obs, rollout.final_at  # empty
        self.outcomes = self._zeros((steps, n_envs), torch.int64)  # reward, terminated, truncated: as in the block
        self.rewards, self.terminated, self.truncated = unpack_step_words(self.outcomes)
        self.starts = self._zeros((steps + 1, n_envs), torch.bool)  # computed by `upload`
        self.last_obs = self._zeros(rollout.obs.shape[1:], torch.uint8)  # the observations after the last step
        self.last_episode = np.zeros(n_envs, np.int64)  # index of the episode that is then open
        self.actions = np.zeros((steps, n_envs, width), np.float32)  # as the environments received them
        self._arrays = None if rollout.obs.is_cuda else rollout.arrays
        self.clear()

    def _zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> np.ndarray:
        # Page-locked where there is a GPU, so that uploads are asynchronous.
        array: np.ndarray = torch.zeros(shape, dtype=dtype, pin_memory=self._pinned).numpy()
        return array

    def clear(self) -> None:
        """Empty the lists; the arrays need no clearing, because they are overwritten."""
        self.final_obs: list[np.ndarray] = []  # of truncated episodes
        self.final_at: list[np.ndarray] = []  # t × N + env
        self.episodes: list[np.ndarray] = []  # [t × N + env, return, length, success, *info] of episodes that ended

    def store(self, block: SharedBlock, where: StepEnvIndex, starts: np.ndarray | None) -> None:
        """Copy the outcomes of the steps at `where` from the block; `starts` [N] is set where an episode ended."""
        envs = where[1]
        outcomes = block.step_words[envs]
        self.outcomes[where] = outcomes
        ended = outcomes >= EPISODE_ENDED
        if starts is not None:
            starts[envs] = ended
        if np.count_nonzero(ended):
            indices, truncated = np.arange(self._n_envs)[envs], block.truncated[envs]
            at = np.broadcast_to(where[0], ended.shape) * self._n_envs + indices
            self.final_obs.append(block.final_obs[indices[truncated]])
            self.final_at.append(at[truncated])
            ended &= block.episode_length[envs] >= 0  # negative: a fault ended the episode, which is not a result
            results = (block.episode_return, block.episode_length, block.episode_success)
            numbers = (result[indices[ended]] for result in results)
            self.episodes.append(np.stack([at[ended], *numbers, *block.episode_info[indices[ended]].T]))

    def store_last(self, block: SharedBlock, envs: slice) -> None:
        """Copy the observations and episode indices of these environments after their last step."""
        self.last_obs[envs] = block.obs[envs]
        self.last_episode[envs] = block.episode[envs]

    def truncate(self, step: int, env: int, final_obs: np.ndarray) -> None:
        """Truncate the trajectory of `env` at `step`, unless an episode ended there anyway."""
        if not (self.terminated[step, env] or self.truncated[step, env]):
            self.truncated[step, env] = True
            self.final_obs.append(final_obs[np.newaxis].copy())
            self.final_at.append(np.array([step * self._n_envs + env]))

    def upload(self, rollout: Rollout, starts: np.ndarray) -> None:
        """Copy everything to the device; `starts` [N] marks environments whose first step starts an episode."""
        self.starts[0] = starts
        np.logical_or(self.terminated, self.truncated, out=self.starts[1:])
        if self._arrays is None:
            self._upload_to_gpu(rollout)
        else:
            self._copy_to(self._arrays)
        if not self.final_at:
            rollout.final_obs, rollout.final_at = self._no_finals
            return
        final_obs, final_at = np.concatenate(self.final_obs), np.concatenate(self.final_at)
        # Sorted by (time, env), so that the order in which slices became ready has no effect.
        order = np.argsort(final_at)
        rollout.final_obs = self._to(rollout.obs.device, final_obs[order])
        rollout.final_at = self._to(rollout.obs.device, final_at[order])

    def _upload_to_gpu(self, rollout: Rollout) -> None:
        for tensor, staged in ((rollout.starts, self.starts), (rollout.obs[-1], self.last_obs)):
            tensor.copy_(torch.from_numpy(staged), non_blocking=True)
        outcomes = torch.from_numpy(self.outcomes).to(rollout.obs.device, non_blocking=True)
        rollout.rewards.copy_(outcomes.view(torch.float32)[:, ::2])
        rollout.terminated.copy_(outcomes.view(torch.uint8)[:, 4::8])
        rollout.truncated.copy_(outcomes.view(torch.uint8)[:, 5::8])

    def _copy_to(self, arrays: RolloutArrays) -> None:
        arrays.starts[:] = self.starts
        arrays.obs[-1] = self.last_obs
        arrays.rewards[:] = self.rewards
        arrays.terminated[:] = self.terminated
        arrays.truncated[:] = self.truncated

    def _to(self, device: torch.device, array: np.ndarray) -> Tensor:
        tensor = torch.from_numpy(array)
        return tensor.pin_memory().to(device, non_blocking=True) if self._pinned else tensor

    def finished_episodes(self) -> FinishedEpisodes:
        """Returns, lengths, successes (where reported) and info [key, episode] of the episodes that ended.

        Sorted by (time, env).
        """
        if not self.episodes:
            return [], [], [], []
        episodes = np.concatenate(self.episodes, 1)
        _, returns, lengths, successes, *info = episodes[:, np.argsort(episodes[0])]
        known = (successes[successes > 0] == SUCCEEDED).tolist()
        return returns.tolist(), lengths.astype(int).tolist(), known, [numbers.tolist() for numbers in info]
