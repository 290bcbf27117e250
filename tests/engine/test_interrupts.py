"""How a run reacts to signals."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import processes
import pytest

from unidle.engine.interrupts import Interrupts
from unidle.signals import STOPPING


@pytest.fixture(autouse=True)
def default_handlers() -> Iterator[None]:
    with processes.default_handlers():
        yield


@pytest.mark.parametrize("number", STOPPING)
def test_first_signal_stops_the_run_and_is_remembered(number: int) -> None:
    calls: list[int | None] = []
    interrupts = Interrupts(lambda: calls.append(interrupts.received))
    with interrupts:
        os.kill(os.getpid(), number)
    assert calls == [number]
    assert signal.getsignal(number) is signal.SIG_DFL


def test_second_ctrl_c_ends_the_process_but_no_hangup_and_no_sigterm_after_usr1() -> None:
    calls = []
    with Interrupts(lambda: calls.append(1)):
        for number in (signal.SIGUSR1, signal.SIGHUP, signal.SIGUSR1, signal.SIGHUP, signal.SIGTERM):
            os.kill(os.getpid(), number)
        assert calls == [1]
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)


def test_ignored_hangup_and_a_handler_of_the_user_stay() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as under nohup
    arrived = []
    signal.signal(signal.SIGUSR1, lambda *_: arrived.append(1))
    with Interrupts(lambda: pytest.fail("stopped")):
        os.kill(os.getpid(), signal.SIGHUP)
        os.kill(os.getpid(), signal.SIGUSR1)
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    assert arrived == [1]


def test_blocks_of_several_runs_may_end_in_any_order() -> None:
    calls: list[str] = []
    interrupts = Interrupts(lambda: calls.append("first"))
    interrupts.listeners.append(lambda: calls.append("second"))
    for _ in range(2):
        interrupts.__enter__()
    interrupts.__exit__()
    os.kill(os.getpid(), signal.SIGTERM)
    assert calls == ["first", "second"]
    interrupts.__exit__()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
