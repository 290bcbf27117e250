"""The signals that stop a run: the first stops it gracefully, a second Ctrl-C or SIGTERM immediately."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable
from types import FrameType

from unidle.signals import STOPPING, Handlers, handle, restore


class Interrupts:
    """Calls the listeners on the first signal that stops a run, or a group of runs.

    Handlers are installed while at least one `with` block is open; blocks may end in any order.
    """

    def __init__(self, *listeners: Callable[[], None]) -> None:
        self.listeners = [*listeners]
        self.received: int | None = None  # the first signal
        self._replaced: Handlers | None = None
        self._n_open = 0  # `with` blocks

    def __enter__(self) -> None:
        self._n_open += 1
        if self._n_open == 1 and threading.current_thread() is threading.main_thread():
            self._replaced = handle([number for number in STOPPING if _is_ours(number)], self._handle)

    def _handle(self, number: int, _: FrameType | None) -> None:
        # A terminal that is closed may send SIGHUP twice, and SLURM sends SIGTERM after SIGUSR1: let it finish saving.
        if number in (signal.SIGINT, signal.SIGTERM):
            # Not the previous handlers: a shell starts background jobs with SIGINT ignored.
            signal.signal(signal.SIGINT, signal.default_int_handler)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if self.received is None:
            self.received = number
            with contextlib.ExitStack() as calls:  # each is called, even if another raises
                for listener in reversed(self.listeners):
                    calls.callback(listener)

    def __exit__(self, *_: object) -> None:
        self._n_open -= 1
        if self._n_open == 0 and self._replaced is not None:
            restore(self._replaced)
            self._replaced = None


def _is_ours(number: int) -> bool:
    """Whether to handle a signal: under nohup SIGHUP stays ignored, and the user's own SIGUSR1 handler is kept."""
    return number in (signal.SIGINT, signal.SIGTERM) or signal.getsignal(number) is signal.SIG_DFL
