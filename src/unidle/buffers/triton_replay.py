"""Replay buffers that sample with Triton kernels, on a GPU."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from unidle.buffers.multitask import TaskReplay
from unidle.buffers.replay import Replay, Transitions
from unidle.kernels.triton.replay_sample import MAX_ENVS, gather, gather_by_task, sample_cells, sample_cells_by_task


class TritonReplay(Replay):
    """A `Replay` that samples with kernels."""

    def sample_cells(self, batch_size: int, generator: torch.Generator) -> Tensor:
        """[B] cells, uniform among all transitions, with replacement."""
        if self.n_envs > MAX_ENVS:
            return super().sample_cells(batch_size, generator)
        return sample_cells(_uniform(batch_size, generator), self.n_added, self.n_overwritten, self.order)

    def gather(self, cells: Tensor) -> Transitions:
        """The n-step transitions from these cells [B]."""
        flags = self.terminated, self.ended, self.has_transition, self.cursor
        return _transitions(cells, gather(cells, self.obs, self.actions, self.rewards, *flags, self.powers))


class TritonTaskReplay(TaskReplay):
    """A `TaskReplay` that samples with kernels."""

    def sample_cells(self, batch_size: int, generator: torch.Generator) -> Tensor:
        """[B] cells, ordered by task: equally many of each, rounded up or down."""
        shift = self.shift(batch_size, generator)
        return sample_cells_by_task(_uniform(batch_size, generator), shift, self.n_added, self.ring_size)

    def gather(self, cells: Tensor) -> Transitions:
        """The transitions in these cells [B]."""
        stored = self.obs, self.next_obs, self.actions, self.rewards, self.terminated, self.n_added
        return _transitions(cells, gather_by_task(cells, *stored, gamma=self.gamma, ring_size=self.ring_size))


def verify(device: torch.device) -> None:
    """RuntimeError unless small Triton buffers sample the same batches as the plain ones."""
    for kinds in ((TritonReplay, Replay), (TritonTaskReplay, TaskReplay)):
        batch, reference = (_sample(kind, device) for kind in kinds)
        if not all(torch.equal(*pair) for pair in zip(batch.tensors(), reference.tensors())):
            raise RuntimeError("the kernel's batches differ from the reference's")


def _sample(kind: Any, device: torch.device) -> Transitions:
    """A batch after some random steps of three environments."""
    n_envs, obs_bytes, has_tasks = 3, 16, issubclass(kind, TaskReplay)
    buffer = kind(60, *((2,) if has_tasks else ()), n_envs, obs_bytes, 1, device, 0.9)
    draws = torch.Generator(device).manual_seed(0)
    obs = torch.randint(256, (12, n_envs, obs_bytes), dtype=torch.uint8, device=device, generator=draws)
    buffer.start(obs[0])
    for row, chance in zip(obs[1:], torch.rand(11, n_envs, device=device, generator=draws)):
        truncated, terminated = chance < 0.2, chance > 0.8
        tasks = ((chance > 0.5).long(),) if has_tasks else ()
        buffer.add(chance.unsqueeze(1), chance, terminated, truncated, row, obs[0], *tasks)
    batch: Transitions = buffer.sample(50, draws)
    return batch


def _uniform(batch_size: int, generator: torch.Generator) -> Tensor:
    return torch.rand(batch_size, dtype=torch.float64, device=generator.device, generator=generator)


def _transitions(cells: Tensor, fields: tuple[Tensor, ...]) -> Transitions:
    obs, actions, returns, discounts, next_obs, weights = fields
    return Transitions(obs, actions, returns, discounts, next_obs, cells, weights)
