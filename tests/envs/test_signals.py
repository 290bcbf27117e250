"""Semaphores that two processes share."""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from unidle.envs.signals import SEMAPHORE_BYTES, Semaphore


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


def test_a_core_is_given_away_while_spinning_only_if_that_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    given = list[bool]()
    monkeypatch.setattr(os, "sched_yield", lambda: given.append(True))
    _, semaphore, _ = pair()
    assert not semaphore.wait(0.02, 0.01, gives_way=False)
    assert not given
    assert not semaphore.wait(0.02, 0.01)
    assert given


@pytest.mark.parametrize("seconds", [0.0, 1e-3])
def test_a_short_limit_is_kept(seconds: float) -> None:
    _, semaphore, _ = pair()
    began = time.monotonic()
    assert not semaphore.wait(seconds)
    assert time.monotonic() - began < 1
