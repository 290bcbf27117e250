"""The multi-task replay buffer: one ring per task, and equally many transitions of each task in every batch.

Both observations of a transition are stored: several environments may play the same task, so neighbouring cells need
not belong to the same episode. Everything except checkpoints can be captured in a CUDA graph.
"""

from __future__ import annotations

import torch
from torch import Tensor

from unidle.buffers.replay import Transitions, gather_obs, restore, uniform_integers
from unidle.errors import UsageError


class TaskReplay:
    """A ring of P = capacity // K transitions for each of K tasks; samples are one-step transitions."""

    def __init__(
        self, capacity: int, n_tasks: int, n_envs: int, obs_bytes: int, width: int, device: torch.device, gamma: float
    ) -> None:
        ring_size = capacity // n_tasks
        if ring_size < n_envs:  # all environments may play the same task
            raise UsageError(
                f"A replay buffer of {capacity:,} transitions is too small for {n_tasks:,} tasks and {n_envs:,} "
                f"environments; set --buffer-size to at least {n_tasks * n_envs:,}."
            )

        def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self.ring_size, self.gamma = ring_size, gamma
        n_cells = n_tasks * ring_size  # a cell is task × P + position
        self.obs = zeros(n_cells, obs_bytes, dtype=torch.uint8)
        self.next_obs = zeros(n_cells, obs_bytes, dtype=torch.uint8)  # the final one where an episode ended
        self.actions = zeros(n_cells, width)
        self.rewards = zeros(n_cells)
        self.terminated = zeros(n_cells, dtype=torch.bool)
        self.current_obs = zeros(n_envs, obs_bytes, dtype=torch.uint8)
        self._tasks = torch.arange(n_tasks, device=device)
        self.n_added = torch.zeros_like(self._tasks)  # [K] transitions added so far

    @staticmethod
    def bytes_per_transition(obs_bytes: int, width: int) -> int:
        """Bytes per unit of capacity."""
        return 2 * obs_bytes + 4 * width + 4 + 1

    @property
    def counts(self) -> Tensor:
        """[K] number of stored transitions of each task."""
        return self.n_added.clamp(max=self.ring_size)

    @property
    def counters(self) -> list[Tensor]:
        """Tensors to restore after the warm-up of a captured `add`."""
        return [self.n_added, self.current_obs]

    def start(self, obs: Tensor, restarted: Tensor | None = None) -> None:
        """Set the current observations [N, obs_bytes]; `restarted` is not used, because transitions are independent."""
        self.current_obs.copy_(obs)

    def add(
        self,
        actions: Tensor,
        rewards: Tensor,
        terminated: Tensor,
        truncated: Tensor,
        next_obs: Tensor,
        final_obs: Tensor,
        tasks: Tensor,
    ) -> None:
        """Add one step of every environment, as `Replay.add` does; `tasks` [N] (long)."""
        has_task = (tasks.unsqueeze(1) == self._tasks).long()  # [N, K]
        # Environments with the same task take consecutive positions in its ring, in the order of their indices.
        number = (self.n_added + has_task.cumsum(0) - 1).gather(1, tasks.unsqueeze(1)).squeeze(1)
        cells = tasks * self.ring_size + number % self.ring_size
        ended = (terminated | truncated).unsqueeze(1)
        self.obs.index_copy_(0, cells, self.current_obs)
        self.next_obs.index_copy_(0, cells, torch.where(ended, final_obs, next_obs))
        self.actions.index_copy_(0, cells, actions)
        self.rewards.index_copy_(0, cells, rewards)
        self.terminated.index_copy_(0, cells, terminated)
        self.n_added.add_(has_task.sum(0))
        self.current_obs.copy_(next_obs)

    def sample(self, batch_size: int, generator: torch.Generator) -> Transitions:
        """Equally many transitions of each task, ordered by task, uniform within each; an empty task has weight 0."""
        return self.gather(self.sample_cells(batch_size, generator))

    def sample_cells(self, batch_size: int, generator: torch.Generator) -> Tensor:
        """[B] cells, ordered by task: B / K of each task, rounded up or down.

        Sample i is of task ⌊(K i + shift) / B⌋. For any shift from 0 to K − 1 the counts differ by at most one, and
        averaged over all shifts each task has exactly B / K (Hermite's identity).
        """
        shift = self.shift(batch_size, generator)
        tasks = (torch.arange(batch_size, device=shift.device) * len(self._tasks) + shift) // batch_size
        return tasks * self.ring_size + uniform_integers(self.counts[tasks], (batch_size,), generator)

    def shift(self, batch_size: int, generator: torch.Generator) -> Tensor:
        """[1] A random integer from 0 to K − 1; 0 if K divides the batch size."""
        if batch_size % len(self._tasks) == 0:
            return self._tasks[:1]
        return torch.randint(len(self._tasks), (1,), generator=generator, device=self._tasks.device)

    def gather(self, cells: Tensor) -> Transitions:
        """The transitions in these cells [B]."""
        return Transitions(
            obs=gather_obs(self.obs, cells),
            actions=self.actions.index_select(0, cells),
            returns=self.rewards[cells],
            discounts=self.gamma * (~self.terminated[cells]).float(),
            next_obs=gather_obs(self.next_obs, cells),
            index=cells,
            weights=(self.n_added[cells // self.ring_size] > 0).float(),
        )

    def state_dict(self) -> dict[str, Tensor]:
        """All fields and counters; some have other names than in the code, for checkpoints of earlier versions."""
        names = "obs next_obs actions rewards terminated"
        fields = {name: getattr(self, name) for name in names.split()}
        return {**fields, "open_obs": self.current_obs, "entered": self.n_added}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Copy a checkpoint's values into the existing tensors."""
        restore(self.state_dict(), state)
