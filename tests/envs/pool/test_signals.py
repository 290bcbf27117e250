"""Semaphores and doorbells shared by two processes."""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from unidle.envs.pool.signals import SEMAPHORE_BYTES, Doorbell, Semaphore


def make_semaphores() -> tuple[mmap.mmap, Semaphore, Semaphore]:
    memory = mmap.mmap(-1, 2 * SEMAPHORE_BYTES)
    return memory, *(Semaphore(memory, SEMAPHORE_BYTES * i, initialise=True) for i in range(2))


@contextmanager
def child(target: object) -> Iterator[int]:
    pid = os.fork()
    if pid == 0:
        target()  # type: ignore[operator]
        os._exit(0)
    yield pid
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_each_post_allows_exactly_one_take() -> None:
    _, semaphore, _ = make_semaphores()
    for _ in range(3):
        semaphore.post()
    assert [semaphore.take() for _ in range(5)] == [True, True, True, False, False]


def test_wait_returns_at_timeout_and_not_before() -> None:
    _, semaphore, _ = make_semaphores()
    start_time = time.monotonic()
    assert not semaphore.wait(0.05)
    assert time.monotonic() - start_time >= 0.045
    semaphore.post()
    assert semaphore.wait(10)


def test_post_in_other_process_wakes_waiter() -> None:
    _, in_child, in_parent = make_semaphores()

    def answer() -> None:
        assert in_child.wait(10)
        in_parent.post()

    with child(answer):
        in_child.post()
        assert in_parent.wait(10)


def test_no_post_between_processes_is_lost() -> None:
    memory, in_child, in_parent = make_semaphores()
    count = 10_000

    def echo() -> None:
        for _ in range(count):
            assert in_child.wait(10)
            in_parent.post()

    with child(echo):
        for _ in range(count):
            in_child.post()
            assert in_parent.wait(10)
    assert not in_parent.take()
    assert not in_child.take()
    del memory


def test_wait_releases_the_gil() -> None:
    import threading

    _, semaphore, _ = make_semaphores()
    threading.Timer(0.05, semaphore.post).start()
    assert semaphore.wait(10)  # would time out if wait held the GIL


@pytest.mark.parametrize("seconds", [0.0, 1e-3])
def test_short_timeout_is_respected(seconds: float) -> None:
    _, semaphore, _ = make_semaphores()
    start_time = time.monotonic()
    assert not semaphore.wait(seconds)
    assert time.monotonic() - start_time < 1


# -- doorbells ---------------------------------------------------------------------------------------------------------


def make_doorbells() -> tuple[mmap.mmap, Doorbell, Doorbell]:
    memory = mmap.mmap(-1, 4 * SEMAPHORE_BYTES)
    return memory, *(Doorbell(memory, SEMAPHORE_BYTES * i, initialise=True) for i in range(2))


@pytest.mark.parametrize("spin", [0.0, 2e-6, 1e-3])
def test_doorbell_misses_no_change(spin: float) -> None:
    memory, in_child, in_parent = make_doorbells()
    limit, count = 10.0, 20_000
    request, reply = 2 * SEMAPHORE_BYTES, 3 * SEMAPHORE_BYTES

    def wait(doorbell: Doorbell, at: int, number: int) -> None:
        while memory[at] != number % 256:
            doorbell.wait(lambda: memory[at] == number % 256, limit, spin)

    def echo() -> None:
        for number in range(1, count + 1):
            wait(in_child, request, number)
            memory[reply] = number % 256
            in_parent.ring()

    start_time = time.monotonic()
    with child(echo):
        for number in range(1, count + 1):
            memory[request] = number % 256
            in_child.ring()
            wait(in_parent, reply, number)
    assert time.monotonic() - start_time < limit  # a single missed one would take as long


def test_ring_posts_only_to_sleeper_and_wait_drops_stale_posts() -> None:
    memory, doorbell, _ = make_doorbells()
    posts = Semaphore(memory, 0, initialise=False)
    doorbell.ring()
    assert not posts.take()
    start_time = time.monotonic()
    doorbell.wait(lambda: True, 10)  # already changed
    for _ in range(5):
        posts.post()
    doorbell.wait(lambda: False, 0.05)  # earlier posts do not count as a change
    assert 0.045 < time.monotonic() - start_time < 5
    doorbell.ring()
    assert not posts.take()


def test_ring_wakes_sleeper_without_change() -> None:
    import threading

    _, doorbell, _ = make_doorbells()
    start_time = time.monotonic()
    threading.Timer(0.05, doorbell.ring).start()
    doorbell.wait(lambda: False, 10)
    assert 0.045 < time.monotonic() - start_time < 5


def test_spinning_yields_core_only_if_requested(monkeypatch: pytest.MonkeyPatch) -> None:
    yields = list[bool]()
    monkeypatch.setattr(os, "sched_yield", lambda: yields.append(True))
    _, doorbell, _ = make_doorbells()
    doorbell.wait(lambda: False, 0.02, 0.01, yields_core=False)
    assert not yields
    doorbell.wait(lambda: False, 0.02, 0.01)
    assert yields
