"""A replay buffer for stacked frames that stores each frame once, and rebuilds stacks when they are sampled.

The rings are those of `Replay`, but a cell holds only the newest frame of its observation. The others are in the cells
before it, as far as its episode goes back: `age` counts them. Frames before an episode are zeros, as the wrapper pads
them. So a transition needs the n − 1 cells before its own, and is lost as soon as the first of them is overwritten; the
rings are n − 1 cells longer, and keep as many transitions as those of whole stacks. Samples are the same, bit for bit.
"""

from __future__ import annotations

import torch
from torch import Tensor

from unidle.buffers.frames import Frames
from unidle.buffers.replay import Replay, gather_obs
from unidle.errors import UsageError


class FrameReplay(Replay):
    """A `Replay` of stacked observations."""

    def __init__(
        self,
        capacity: int,
        n_envs: int,
        frames: Frames,
        width: int,
        device: torch.device,
        gamma: float,
        n_steps: int = 1,
    ) -> None:
        """The arguments of `Replay`, with `frames` of observations instead of their size."""
        self._frames, self._older = frames, frames.n - 1
        self._require_capacity(capacity, n_envs, n_steps)
        longer = capacity // n_envs * n_envs + self._older * n_envs
        super().__init__(longer, n_envs, frames.frame_bytes, width, device, gamma, n_steps)
        # [cell] observations of the same episode before it, at most n − 1.
        self.age = torch.zeros(self.n_cells, dtype=torch.int16, device=device)
        self._back = torch.arange(self._older, -1, -1, device=device)  # [n] steps back, of the frames of a stack

    @staticmethod
    def bytes_per_transition(obs_bytes: int, width: int) -> int:
        """Bytes per unit of capacity; `obs_bytes` are those of a frame."""
        return Replay.bytes_per_transition(obs_bytes, width) + 2  # age

    def lost(self, cells: Tensor) -> Tensor:
        """The cells whose transitions can no longer be sampled once these are overwritten."""
        return self.after(cells, self._older)

    def start(self, obs: Tensor, restarted: Tensor | None = None) -> None:
        """As `Replay.start`."""
        is_empty = self.n_added == 0  # [N] the frames before are only in this observation, if its episode began earlier
        super().start(obs, restarted)
        begins = torch.ones_like(is_empty) if restarted is None else restarted
        age = self.age[self.cursor].masked_fill(begins, 0).masked_fill(is_empty, self._older)
        self.age.index_copy_(0, self.cursor, age)
        frames = self._frames.of_stacks(obs)
        for number, back in enumerate(range(self._older, 0, -1)):
            cells = self.after(self.cursor, -back)
            kept = torch.where(is_empty.unsqueeze(1), frames[:, number], self.obs[cells])
            self.obs.index_copy_(0, cells, kept)

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
        here = self.cursor.clone()
        super().add(actions, rewards, terminated, truncated, next_obs, final_obs)
        age = (self.age[here] + 1).clamp(max=self._older)
        self.age.index_copy_(0, self.after(here), age)
        self.age.index_copy_(0, self.cursor, age.masked_fill(terminated | truncated, 0))

    def _write_obs(self, cells: Tensor, obs: Tensor) -> None:
        super()._write_obs(cells, self._frames.newest(obs))

    def _obs_at(self, cells: Tensor) -> Tensor:
        steps = cells.unsqueeze(1) - self._back * self.n_envs  # [B, n]
        frames = gather_obs(self.obs, (steps % self.n_cells).flatten()).view(*steps.shape, -1)
        is_before_episode = self._back > self.age[cells].unsqueeze(1)
        return self._frames.stacked(frames.masked_fill_(is_before_episode.unsqueeze(2), 0))

    def state_dict(self) -> dict[str, Tensor]:
        """As `Replay.state_dict`."""
        return {**super().state_dict(), "age": self.age}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Copy a checkpoint's values into the existing tensors."""
        if "age" not in state:
            raise UsageError(
                "The checkpoint's replay buffer is of an earlier version, which stored whole stacks of frames; resume "
                "with that version, or start a new run with --init-from."
            )
        super().load_state_dict(state)
