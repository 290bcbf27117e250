"""What runs in one process share (see turns.py)."""

from __future__ import annotations

import os
from dataclasses import dataclass, field

import torch

from unidle.config.machine import available_cores
from unidle.engine.other_trainers import OtherTrainers
from unidle.engine.turns import Slots
from unidle.envs.pool.shared import SharedPools
from unidle.envs.pool.signals import SharedDoorbell
from unidle.envs.pool.worker_cores import WorkerCores

_INFERENCES_AT_ONCE = 2
_BURSTS_AT_ONCE = 4


@dataclass(frozen=True)
class Sharing:
    """Resources of a group of runs."""

    pools: SharedPools
    # For inference. Kernels with a grid-wide barrier (kernels/triton/act.py) wait for blocks of their own that may find
    # no room, so only as many may run at the same time as there are streams, each with its share of the GPU.
    inference: list[torch.cuda.Stream]
    others: OtherTrainers  # with which the group shares the machine's cores
    # Runs whose environments are on the device: a few fill it, and more of them at the same time disturb each other.
    bursts: Slots = field(default_factory=lambda: Slots(_BURSTS_AT_ONCE))

    @staticmethod
    def among(members: int, device: torch.device, others: OtherTrainers) -> Sharing:
        """The shared resources of so many runs on `device`."""
        on_gpu, cores = device.type == "cuda", os.sched_getaffinity(0)
        # Under a quota, or next to other trainers, other processes use these cores too. Without a GPU the trainer
        # computes as much as its workers.
        has_cores = on_gpu and 1 < len(cores) <= available_cores() and others.share() is None
        n_streams = min(members, _INFERENCES_AT_ONCE) if on_gpu else 0
        streams = [torch.cuda.Stream(device, priority=-1) for _ in range(n_streams)]
        pools = SharedPools(members, SharedDoorbell(), WorkerCores(cores, members) if has_cores else None)
        return Sharing(pools, streams, others)

    def next_stream(self) -> torch.cuda.Stream | None:
        """The stream for the inference of one more run; None without a GPU."""
        if not self.inference:
            return None
        self.inference.append(self.inference.pop(0))
        return self.inference[-1]

    @property
    def members(self) -> int:
        """Runs at a time."""
        return self.pools.count

    def share_of(self, cores: int) -> int:
        """One run's share of `cores`."""
        return -(-cores // self.members)

    def workers_of(self, workers: int) -> int:
        """How many worker processes each run starts, if one alone would start `workers`."""
        return self.share_of(workers) if self.pools.cores is None else min(workers, self.pools.cores.workers)
