"""Ctrl-C while a command imports its modules: ends the process at once.

A KeyboardInterrupt there may be swallowed, as NumPy and torch do while they load, and leaves a module half loaded,
which fails later in some other place.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from types import FrameType

_IMPORTING = "<frozen importlib._bootstrap>"


@contextmanager
def stop_while_importing(report: Callable[[], int]) -> Iterator[None]:
    """In the block, Ctrl-C during an import calls `report` and exits with its code; elsewhere it acts as before."""
    before, out = signal.getsignal(signal.SIGINT), sys.stdout
    if before is not signal.default_int_handler or threading.current_thread() is not threading.main_thread():
        yield
        return

    def on_interrupt(number: int, frame: FrameType | None) -> None:
        if not _is_importing(frame):
            signal.default_int_handler(number, frame)
        with redirect_stdout(out):
            code = report()
        for stream in (out, sys.stderr):
            stream.flush()
        os._exit(code)

    signal.signal(signal.SIGINT, on_interrupt)
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGINT) is on_interrupt:
            signal.signal(signal.SIGINT, before)


def _is_importing(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_filename == _IMPORTING:
            return True
        frame = frame.f_back
    return False
