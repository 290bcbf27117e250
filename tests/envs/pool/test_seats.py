"""Workers that share a core: who is awake, and that no work is forgotten."""

from __future__ import annotations

import mmap
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager

import pytest

from unidle.envs.pool import seats
from unidle.envs.pool.seats import Seat, WorkerCores

LONG = 20.0  # seconds; longer than any test waits


@pytest.fixture
def cores() -> Iterator[WorkerCores]:
    cores = WorkerCores({0, 1}, runs=9)  # one core for all
    yield cores
    cores.close()


def taken(cores: WorkerCores) -> Seat:
    [(_, seat)] = cores.take(1)
    seat.reset()
    return seat


class Sleeper:
    """A worker in a thread, which waits until it has work."""

    def __init__(self, seat: Seat, spin: float = 0.0) -> None:
        self.seat, self.has_work, self.looks = seat, threading.Event(), 0
        self._thread = threading.Thread(target=self._run, args=(spin,), daemon=True)
        self._thread.start()

    def _run(self, spin: float) -> None:
        while not self._look():
            self.seat.wait(self._look, LONG, spin)

    def _look(self) -> bool:
        self.looks += 1
        return self.has_work.is_set()

    def give_work(self) -> None:
        self.has_work.set()
        self.seat.ring()

    def has_ended(self, seconds: float) -> bool:
        self._thread.join(seconds)
        return not self._thread.is_alive()


@pytest.fixture
def long_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers that sleep do not look for work by themselves: what is not woken is found out."""
    monkeypatch.setattr(seats, "_LOOK_SECONDS", LONG)


def wait_until(condition: Callable[[], bool]) -> None:
    until = time.monotonic() + LONG
    while not condition():
        assert time.monotonic() < until
        time.sleep(1e-3)


def is_asleep(seat: Seat) -> bool:
    return bool(seat._memory[seat._asleep])


@pytest.mark.usefixtures("long_looks")
def test_work_wakes_a_worker_if_all_are_asleep(cores: WorkerCores) -> None:
    sleepers = [Sleeper(taken(cores)) for _ in range(3)]
    wait_until(lambda: all(is_asleep(sleeper.seat) for sleeper in sleepers))
    for sleeper in sleepers:
        sleeper.give_work()
        assert sleeper.has_ended(5)
        sleeper.seat.leave()


@pytest.mark.usefixtures("long_looks")
def test_who_is_awake_hands_the_core_over(cores: WorkerCores) -> None:
    sleeper, awake = Sleeper(taken(cores)), taken(cores)
    wait_until(lambda: is_asleep(sleeper.seat))
    sleeper.give_work()
    assert not sleeper.has_ended(0.05)  # the core is taken
    threading.Thread(target=awake.wait, args=(lambda: False, LONG), daemon=True).start()
    assert sleeper.has_ended(5)
    wait_until(lambda: is_asleep(awake))


@pytest.mark.usefixtures("long_looks")
def test_a_watching_worker_hands_over_at_once(cores: WorkerCores) -> None:
    sleeper = Sleeper(taken(cores))
    wait_until(lambda: is_asleep(sleeper.seat))
    watcher = Sleeper(taken(cores), spin=LONG)
    wait_until(lambda: watcher.looks > 3)
    sleeper.give_work()
    assert sleeper.has_ended(5)
    wait_until(lambda: is_asleep(watcher.seat))


def test_a_blocked_worker_does_not_keep_the_others_from_their_work(cores: WorkerCores) -> None:
    blocked, sleeper = taken(cores), Sleeper(taken(cores))
    assert not is_asleep(blocked)
    sleeper.give_work()
    assert sleeper.has_ended(5)


@contextmanager
def children(targets: list[Callable[[], None]]) -> Iterator[None]:
    pids = []
    for target in targets:
        if (pid := os.fork()) == 0:
            target()
            os._exit(0)
        pids.append(pid)
    try:
        yield
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


@pytest.mark.usefixtures("long_looks")
@pytest.mark.parametrize("spin", [0.0, 1e-3])
def test_no_work_is_lost_among_processes(cores: WorkerCores, spin: float) -> None:
    """Each worker answers numbers of its own in order; one that is not woken would not answer."""
    workers, rounds = 3, 700
    asked, answered = (mmap.mmap(-1, 4096) for _ in range(2))
    places = [taken(cores) for _ in range(workers)]

    def work(number: int) -> Callable[[], None]:
        def run() -> None:
            seat = places[number]
            while True:
                if asked[number] != answered[number]:
                    answered[number] = asked[number]
                seat.wait(lambda: asked[number] != answered[number], LONG, spin)

        return run

    with children([work(number) for number in range(workers)]):
        sent, until = [0] * workers, time.monotonic() + LONG
        while min(sent) < rounds:
            assert time.monotonic() < until, f"asked {sent}, answered {[answered[n] for n in range(workers)]}"
            for number in range(workers):
                if sent[number] < rounds and answered[number] == sent[number] % 256:
                    sent[number] += 1
                    asked[number] = sent[number] % 256
                    places[number].ring()


@pytest.mark.parametrize(
    ("runs", "expected"),
    [(1, [[5, 9, 11]]), (2, [[5, 9, 11]] * 2), (4, [[5, 9], [11], [5, 9], [11]]), (9, [[5], [9], [11]] * 3)],
)
def test_two_runs_share_each_set_of_cores(runs: int, expected: list[list[int]]) -> None:
    with closing(WorkerCores({3, 5, 9, 11}, runs)) as cores:  # the trainer has core 3
        taken = [cores.take(4) for _ in range(runs)]
        assert [sorted(core for core, _ in one) for one in taken] == expected
        assert len({seat.place for one in taken for _, seat in one}) == sum(map(len, expected))


def test_runs_with_few_workers_begin_at_different_cores() -> None:
    with closing(WorkerCores(range(7), runs=2)) as cores:
        assert [[core for core, _ in cores.take(4)] for _ in range(2)] == [[1, 2, 3, 4], [5, 6, 1, 2]]


@pytest.mark.usefixtures("long_looks")
def test_workers_with_work_are_woken_in_turn(cores: WorkerCores) -> None:
    """Otherwise those at the first seats, which soon have work again, would keep the others from theirs."""
    own, *others = (taken(cores) for _ in range(4))
    for seat in others:
        seat.leave()
    woken = []
    for seat in (own, others[0], others[1]):
        for other in others:
            other._memory[other._pending], other._memory[other._asleep] = other is not seat, 1
        seat._memory[seat._pending], seat._memory[seat._asleep] = 0, 1
        own._memory[own._asleep] = 1
        seat._hand_over()
        woken.append([other.place.seat for other in (own, *others) if not is_asleep(other)])
    assert woken == [[1], [2], [3]]


def test_the_next_run_gets_the_cores_of_one_that_has_ended() -> None:
    with closing(WorkerCores(range(5), runs=4)) as cores:
        _, second, _, fourth = (cores.take(9) for _ in range(4))
        for ended in (second, fourth):
            cores.give_back([seat for _, seat in ended])
        places = [[seat.place for _, seat in one] for one in (second, fourth)]
        assert [[seat.place for _, seat in cores.take(9)] for _ in range(2)] == places


def test_a_run_that_finds_no_seat_is_left_to_the_scheduler() -> None:
    with closing(WorkerCores({0, 1}, runs=4)) as cores:
        assert [len(cores.take(1)) for _ in range(66)] == [1] * 64 + [0] * 2
