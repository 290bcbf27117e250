"""What the runs of a group share, and what each of them gets."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest
import torch

from unidle.engine.other_trainers import OtherTrainers
from unidle.engine.sharing import Sharing
from unidle.envs.pool.seats import WorkerCores
from unidle.envs.pool.shared import SharedPools
from unidle.envs.pool.signals import SharedDoorbell


def test_without_a_gpu_the_scheduler_places_the_workers_and_each_run_gets_its_share(tmp_path: Path) -> None:
    sharing = Sharing.among(4, torch.device("cpu"), OtherTrainers(tmp_path))
    with closing(sharing.pools):
        assert sharing.pools.cores is None
        assert sharing.inference is None
        assert [sharing.workers_of(workers) for workers in (0, 1, 8, 9)] == [0, 1, 2, 3]


@pytest.mark.parametrize(("members", "workers", "each"), [(1, 15, 30), (4, 15, 8), (8, 15, 4), (64, 15, 1)])
def test_with_cores_of_their_own_two_workers_share_each(tmp_path: Path, members: int, workers: int, each: int) -> None:
    pools = SharedPools(members, SharedDoorbell(), WorkerCores({0, 1, 2}))
    with closing(pools):
        assert Sharing(pools, None, OtherTrainers(tmp_path)).workers_of(workers) == each
