"""What runs in one process share (see turns.py)."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch

from unidle.config.machine import available_cores
from unidle.engine.other_trainers import OtherTrainers
from unidle.envs.pool.seats import WorkerCores
from unidle.envs.pool.shared import SharedPools
from unidle.envs.pool.signals import SharedDoorbell


@dataclass(frozen=True)
class Sharing:
    """Resources of a group of runs."""

    pools: SharedPools
    # For the inference of all members: two kernels with a grid-wide barrier (kernels/triton/act.py) must never run at
    # the same time, because each may wait for blocks that find no room.
    inference: torch.cuda.Stream | None
    others: OtherTrainers  # with which the group shares the machine's cores

    @staticmethod
    def among(members: int, device: torch.device, others: OtherTrainers) -> Sharing:
        """The shared resources of so many runs on `device`."""
        on_gpu, cores = device.type == "cuda", os.sched_getaffinity(0)
        # Under a quota, or next to other trainers, other processes use these cores too. Without a GPU the trainer
        # computes as much as its workers.
        has_cores = on_gpu and 1 < len(cores) <= available_cores() and others.share() is None
        stream = torch.cuda.Stream(device, priority=-1) if on_gpu else None
        pools = SharedPools(members, SharedDoorbell(), WorkerCores(cores, members) if has_cores else None)
        return Sharing(pools, stream, others)

    @property
    def members(self) -> int:
        """Runs at a time."""
        return self.pools.count

    def share_of(self, cores: int) -> int:
        """One run's share of `cores`."""
        return -(-cores // self.members)

    def workers_of(self, workers: int) -> int:
        """How many worker processes each run starts, if one alone would start `workers`."""
        return self.share_of(workers) if self.pools.cores is None else workers  # of which it starts those with a core
