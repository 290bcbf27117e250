"""What runs in one process share (see turns.py)."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from unidle.engine.other_trainers import OtherTrainers
from unidle.envs.pool.signals import SharedDoorbell


@dataclass(frozen=True)
class Sharing:
    """Resources of a group of `members` runs."""

    members: int
    ready: SharedDoorbell  # rung by the workers of all members
    # For the inference of all members: two kernels with a grid-wide barrier (kernels/triton/act.py) must never run at
    # the same time, because each may wait for blocks that find no room.
    inference: torch.cuda.Stream | None
    others: OtherTrainers  # with which the group shares the machine's cores

    @staticmethod
    def among(members: int, device: torch.device, others: OtherTrainers) -> Sharing:
        """The shared resources of so many runs on `device`."""
        stream = torch.cuda.Stream(device, priority=-1) if device.type == "cuda" else None
        return Sharing(members, SharedDoorbell(), stream, others)

    def share_of(self, workers: int) -> int:
        """One run's share of `workers` worker processes."""
        return -(-workers // self.members)
