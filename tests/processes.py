"""Helpers for tests that start processes and send them signals."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from unidle.signals import STOPPING


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in "ZX"  # a zombie has exited, whether or not it was reaped


def restore_sigint() -> None:
    """`preexec_fn` of a process that is to receive Ctrl-C: under `nohup … &` it would inherit an ignored SIGINT."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


@contextlib.contextmanager
def sigint_raises() -> Iterator[None]:
    """SIGINT raises KeyboardInterrupt in this process, even if it was started with SIGINT ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def wait_until(condition: Callable[[], bool], seconds: float = 20.0) -> bool:
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.02)
    return condition()


@contextlib.contextmanager
def default_handlers() -> Iterator[None]:
    """The default handlers of the signals that stop a run; afterwards those from before are installed again."""
    before = {number: signal.signal(number, signal.SIG_DFL) for number in STOPPING}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
