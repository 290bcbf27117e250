"""Ctrl-C and SIGTERM during a run: the first stops it gracefully, the second immediately."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any


class Interrupts:
    """Turns the first Ctrl-C or SIGTERM into a call; the second one ends the process."""

    def __init__(self, first: Callable[[], None]) -> None:
        self._first = first
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> None:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._previous[number] = signal.signal(number, self._handle)

    def _handle(self, number: int, _: FrameType | None) -> None:
        # Not the previous handlers: a shell starts background jobs with SIGINT ignored.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        self._first()

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
