"""How cores are divided among jobs."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unidle.errors import UsageError
from unidle.packing import cores as cores_module
from unidle.packing.cores import CoreDivision, usable_cores
from unidle.packing.jobs import Job


def job(cores: int | None = None, name: str = "a") -> Job:
    return Job(name, ("x",), cores)


def test_cores_are_divided_evenly_and_the_rest_goes_to_the_first_jobs() -> None:
    jobs = [job() for _ in range(3)]
    division = CoreDivision(range(8), jobs, 3)
    assert [division.take(each) for each in jobs] == [(0, 1, 2), (3, 4, 5), (6, 7)]


def test_jobs_without_a_number_share_what_the_others_leave() -> None:
    jobs = [job(), job(5), job()]
    division = CoreDivision(range(8), jobs, 3)
    assert [division.take(each) for each in jobs] == [(0, 1), (2, 3, 4, 5, 6), (7,)]


def test_job_that_waits_gets_the_cores_of_one_that_ended() -> None:
    jobs = [job() for _ in range(3)]
    division = CoreDivision(range(4), jobs, 2)
    first, second = division.take(jobs[0]), division.take(jobs[1])
    assert (first, second) == ((0, 1), (2, 3))
    assert division.take(jobs[2]) is None
    division.give_back(jobs[0], first)
    assert division.take(jobs[2]) == (0, 1)


def test_job_waits_until_as_many_cores_are_free_as_it_asks_for() -> None:
    small, large = job(1), job(4)
    division = CoreDivision(range(4), [small, large], 1)
    taken = division.take(small)
    assert division.take(large) is None
    division.give_back(small, taken or ())
    assert division.take(large) == (0, 1, 2, 3)


@pytest.mark.parametrize(
    ("jobs", "at_once", "sentence"),
    [
        ([job()] * 3, 3, "3 jobs at once need a core each, but this process may use 2 cores; .* --at-once 2"),
        ([job(3, "big")], 1, "Job `big` asks for 3 cores, but this process may use 2 cores; lower its `cores`"),
        ([job(2), job()], 2, "2 jobs at once need 3 cores, but this process may use 2 cores; lower `cores`, or"),
        ([job(2), job(1)], 2, "2 jobs at once need 3 cores"),
    ],
)
def test_too_few_cores_are_an_error_that_says_what_to_do(jobs: list[Job], at_once: int, sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence):
        CoreDivision(range(2), jobs, at_once)


@given(
    total=st.integers(1, 32),
    asked=st.lists(st.none() | st.integers(1, 12), min_size=1, max_size=12),
    at_once=st.integers(1, 12),
    data=st.data(),
)
def test_no_core_is_used_twice_and_every_job_has_its_turn(
    total: int, asked: list[int | None], at_once: int, data: st.DataObject
) -> None:
    jobs = [job(cores, str(number)) for number, cores in enumerate(asked)]
    at_once = min(at_once, len(jobs))
    try:
        division = CoreDivision(range(total), jobs, at_once)
    except UsageError:
        return
    running: list[tuple[Job, tuple[int, ...]]] = []
    waiting = list(jobs)
    while waiting or running:
        taken = division.take(waiting[0]) if waiting and len(running) < at_once else None
        if taken is not None:
            assert taken
            assert waiting[0].cores in (None, len(taken))
            running.append((waiting.pop(0), taken))
            used = [core for _, cores in running for core in cores]
            assert len(used) == len(set(used)) <= total
        else:
            assert running, "the first job can always start when none runs"
            division.give_back(*running.pop(data.draw(st.integers(0, len(running) - 1))))


def test_physical_cores_are_kept_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for core in range(4):  # core 0 and 2 are threads of one physical core, and 1 and 3 of another
        topology = tmp_path / f"cpu{core}/topology"
        topology.mkdir(parents=True)
        (topology / "core_id").write_text(f"{core % 2}\n")
        (topology / "physical_package_id").write_text("0\n")
    monkeypatch.setattr(cores_module, "_CPUS", tmp_path)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2, 3})
    monkeypatch.setattr(cores_module, "available_cores", lambda: 4)
    assert usable_cores() == [0, 2, 1, 3]


def test_quota_takes_the_least_busy_cores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stat = tmp_path / "stat"
    first = "cpu  9 9 9\ncpu0 0 0 0 0\ncpu1 0 0 0 0\ncpu2 0 0 0 0\nintr 5"
    readings = iter([first, "cpu0 20 0 0\ncpu1 1 0 1\ncpu2 9 0 0"])
    monkeypatch.setattr(cores_module, "_CPUS", tmp_path)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2})
    monkeypatch.setattr(cores_module, "available_cores", lambda: 2)
    monkeypatch.setattr(cores_module, "_STAT", stat)
    monkeypatch.setattr(cores_module.time, "sleep", lambda seconds: None)
    before = cores_module._busy_ticks
    monkeypatch.setattr(cores_module, "_busy_ticks", lambda: stat.write_text(next(readings)) and before())
    assert usable_cores() == [1, 2]
