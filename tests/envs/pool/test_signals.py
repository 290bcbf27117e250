"""Semaphores and bells that two processes share."""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from unidle.envs.pool.signals import SEMAPHORE_BYTES, Doorbell, Semaphore


def pair() -> tuple[mmap.mmap, Semaphore, Semaphore]:
    memory = mmap.mmap(-1, 2 * SEMAPHORE_BYTES)
    return memory, *(Semaphore(memory, SEMAPHORE_BYTES * i, initialise=True) for i in range(2))


@contextmanager
def child(work: object) -> Iterator[int]:
    pid = os.fork()
    if pid == 0:
        work()  # type: ignore[operator]
        os._exit(0)
    yield pid
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_each_post_lets_exactly_one_through() -> None:
    _, semaphore, _ = pair()
    for _ in range(3):
        semaphore.post()
    assert [semaphore.take() for _ in range(5)] == [True, True, True, False, False]


def test_waiting_ends_at_its_limit_and_not_before() -> None:
    _, semaphore, _ = pair()
    began = time.monotonic()
    assert not semaphore.wait(0.05)
    assert time.monotonic() - began >= 0.045
    semaphore.post()
    assert semaphore.wait(10)


def test_a_post_in_another_process_wakes_a_waiter_here() -> None:
    _, there, here = pair()

    def answer() -> None:
        assert there.wait(10)
        here.post()

    with child(answer):
        there.post()
        assert here.wait(10)


def test_ten_thousand_hand_overs_between_two_processes_lose_none() -> None:
    memory, there, here = pair()
    count = 10_000

    def echo() -> None:
        for _ in range(count):
            assert there.wait(10)
            here.post()

    with child(echo):
        for _ in range(count):
            there.post()
            assert here.wait(10)
    assert not here.take()
    assert not there.take()
    del memory


def test_waiting_lets_other_threads_run() -> None:
    import threading

    _, semaphore, _ = pair()
    threading.Timer(0.05, semaphore.post).start()
    assert semaphore.wait(10)  # would time out if waiting kept the interpreter to itself


@pytest.mark.parametrize("seconds", [0.0, 1e-3])
def test_a_short_limit_is_kept(seconds: float) -> None:
    _, semaphore, _ = pair()
    began = time.monotonic()
    assert not semaphore.wait(seconds)
    assert time.monotonic() - began < 1


# -- bells -------------------------------------------------------------------------------------------------------------


def bells() -> tuple[mmap.mmap, Doorbell, Doorbell]:
    memory = mmap.mmap(-1, 4 * SEMAPHORE_BYTES)
    return memory, *(Doorbell(memory, SEMAPHORE_BYTES * i, initialise=True) for i in range(2))


@pytest.mark.parametrize("spin", [0.0, 2e-6, 1e-3])
def test_of_twenty_thousand_changes_none_is_slept_through(spin: float) -> None:
    memory, there, here = bells()
    limit, count = 10.0, 20_000
    asked, answered = 2 * SEMAPHORE_BYTES, 3 * SEMAPHORE_BYTES

    def wait(bell: Doorbell, place: int, number: int) -> None:
        while memory[place] != number % 256:
            bell.wait(lambda: memory[place] == number % 256, limit, spin)

    def echo() -> None:
        for number in range(1, count + 1):
            wait(there, asked, number)
            memory[answered] = number % 256
            here.ring()

    began = time.monotonic()
    with child(echo):
        for number in range(1, count + 1):
            memory[asked] = number % 256
            there.ring()
            wait(here, answered, number)
    assert time.monotonic() - began < limit  # one that was slept through would take as long by itself


def test_nothing_is_posted_to_one_who_is_awake_and_no_post_outlives_a_wait() -> None:
    memory, bell, _ = bells()
    posts = Semaphore(memory, 0, initialise=False)
    bell.ring()
    assert not posts.take()
    began = time.monotonic()
    bell.wait(lambda: True, 10)  # it has changed already
    for _ in range(5):
        posts.post()
    bell.wait(lambda: False, 0.05)  # what was posted before is not taken for a change
    assert 0.045 < time.monotonic() - began < 5
    bell.ring()
    assert not posts.take()


def test_a_ring_wakes_who_sleeps_whatever_has_changed() -> None:
    import threading

    _, bell, _ = bells()
    began = time.monotonic()
    threading.Timer(0.05, bell.ring).start()
    bell.wait(lambda: False, 10)
    assert 0.045 < time.monotonic() - began < 5


def test_a_core_is_given_away_while_spinning_only_if_that_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    given = list[bool]()
    monkeypatch.setattr(os, "sched_yield", lambda: given.append(True))
    _, bell, _ = bells()
    bell.wait(lambda: False, 0.02, 0.01, yields_core=False)
    assert not given
    bell.wait(lambda: False, 0.02, 0.01)
    assert given
