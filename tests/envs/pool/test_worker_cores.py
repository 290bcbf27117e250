"""Which cores the workers of a group of runs have."""

from __future__ import annotations

from collections import Counter

import pytest

from unidle.envs.pool.worker_cores import ROTATE_SECONDS, WorkerCores


@pytest.mark.parametrize(("n_cores", "runs"), [(16, 8), (16, 4), (16, 3), (4, 8), (2, 1), (9, 8)])
def test_workers_fill_all_cores_but_the_trainers_and_share_the_crowded_ones_evenly(n_cores: int, runs: int) -> None:
    cores = WorkerCores(range(3, 3 + n_cores), runs)
    places = [place for _ in range(runs) for place in cores.take(99)]
    assert len(places) == runs * cores.workers >= n_cores - 1
    crowded: Counter[int] = Counter()
    before: list[int] = []
    for turn in range(len(places) * n_cores):
        now = [cores.core_of(place, (turn + 0.5) * ROTATE_SECONDS) for place in places]
        assert sum(one != other for one, other in zip(now, before)) <= 1  # workers move one at a time
        counts, before = Counter(now), now
        assert set(counts) == set(range(4, 3 + n_cores))
        assert max(counts.values()) - min(counts.values()) <= 1
        crowded.update(place for place, core in zip(places, now) if counts[core] > min(counts.values()))
    assert not crowded or max(crowded.values()) - min(crowded.values()) <= n_cores  # all have their turn


def test_places_of_a_run_that_ended_are_taken_again() -> None:
    cores = WorkerCores(range(5), 2)
    first, second = cores.take(2), cores.take(1)
    assert (first, second) == ([0, 1], [2])
    assert cores.take(1) == []
    cores.give_back(first)
    assert cores.take(8) == [0, 1]
