"""Handlers of the signals that stop a run, and what forked children inherit."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Iterator

import processes
import pytest

from unidle import signals
from unidle.signals import STOPPING, blocked, handle, restore

FORK = multiprocessing.get_context("fork")


@pytest.fixture(autouse=True)
def default_handlers() -> Iterator[None]:
    with processes.default_handlers():
        yield


@contextlib.contextmanager
def ignored() -> Iterator[None]:
    """Empty handlers, like those of a worker."""
    before = handle(STOPPING, lambda *_: None)
    yield
    restore(before)


def ended_by(number: int) -> int | None:
    """Send a signal to a forked child as soon as it exists; the signal that ended it, or None."""
    child = FORK.Process(target=time.sleep, args=(60,))
    child.start()
    os.kill(child.pid, number)
    child.join(10)
    code = child.exitcode
    child.kill()
    child.join()
    return code and -code


@pytest.mark.parametrize("number", STOPPING)
def test_forked_child_ends_on_a_signal_that_its_parent_handles(number: int) -> None:
    with ignored():
        assert {ended_by(number) for _ in range(20)} == {number}  # it may arrive before the child runs


def test_forked_child_ends_on_ctrl_c_that_python_handles(capfd: pytest.CaptureFixture[str]) -> None:
    with processes.sigint_raises(), ignored():
        for _ in range(20):
            pid = os.fork()
            if pid == 0:
                with contextlib.suppress(KeyboardInterrupt):
                    time.sleep(5)
                os._exit(128 + signal.SIGINT)
            os.kill(pid, signal.SIGINT)  # it may arrive before the child runs
            assert os.waitpid(pid, 0)[1] in (signal.SIGINT, (128 + signal.SIGINT) << 8)
    assert "KeyboardInterrupt" not in capfd.readouterr().err


def test_fork_holds_signals_back_only_during_a_run() -> None:
    def held_back() -> set[int]:
        signals._before_fork()
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, [])
        signals._after_fork()
        return mask & set(STOPPING)

    assert held_back() == set()
    with ignored():
        assert held_back() == set(STOPPING)


def test_child_forked_by_a_thread_also_exits() -> None:
    ended: list[int | None] = []
    with ignored():
        thread = threading.Thread(target=lambda: ended.append(ended_by(signal.SIGTERM)))
        thread.start()
        thread.join()
    assert ended == [signal.SIGTERM]


def test_fork_keeps_signal_mask_and_handlers_of_the_parent() -> None:
    with ignored():
        before = signal.getsignal(signal.SIGTERM), signal.pthread_sigmask(signal.SIG_BLOCK, [])
        ended_by(signal.SIGTERM)
        assert (signal.getsignal(signal.SIGTERM), signal.pthread_sigmask(signal.SIG_BLOCK, [])) == before


def test_nested_handlers_are_restored_one_by_one() -> None:
    arrived = []
    outer = handle([signal.SIGUSR1], lambda *_: arrived.append("outer"))
    inner = handle([signal.SIGUSR1], lambda *_: arrived.append("inner"))
    os.kill(os.getpid(), signal.SIGUSR1)
    restore(inner)
    os.kill(os.getpid(), signal.SIGUSR1)
    restore(outer)
    assert arrived == ["inner", "outer"]
    assert signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL


def test_blocked_signals_arrive_afterwards() -> None:
    arrived = []
    before = handle([signal.SIGTERM], lambda number, _: arrived.append(number))
    with blocked():
        signal.pthread_kill(threading.get_ident(), signal.SIGTERM)  # another thread may not block it
        assert arrived == []
    assert arrived == [signal.SIGTERM]
    restore(before)
