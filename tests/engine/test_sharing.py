"""What the runs of a group share, and what each of them gets."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import torch

from unidle.engine.other_trainers import OtherTrainers
from unidle.engine.sharing import Sharing
from unidle.envs.make import env_maker
from unidle.envs.pool.process_pool import ProcessPool
from unidle.envs.pool.shared import SharedPools
from unidle.envs.pool.signals import SharedDoorbell
from unidle.envs.pool.worker_cores import WorkerCores
from unidle.envs.probe import probe


def test_without_a_gpu_the_scheduler_places_the_workers_and_each_run_gets_its_share(tmp_path: Path) -> None:
    sharing = Sharing.among(4, torch.device("cpu"), OtherTrainers(tmp_path))
    with closing(sharing.pools):
        assert sharing.pools.cores is None
        assert sharing.next_stream() is None
        assert [sharing.workers_of(workers) for workers in (0, 1, 8, 9)] == [0, 1, 2, 3]


def test_with_cores_of_their_own_each_run_starts_the_workers_that_have_one(tmp_path: Path) -> None:
    pools = SharedPools(4, SharedDoorbell(), WorkerCores(range(6), 4))
    with closing(pools):
        assert Sharing(pools, [], OtherTrainers(tmp_path)).workers_of(5) == 2  # eight in all, for five cores
        maker = env_maker("CartPole-v1")
        with closing(ProcessPool(maker, probe(maker), 8, 0, 5, shared=pools)) as pool:
            assert pool.workers == 2
            assert len(pool.bounds) == 2
