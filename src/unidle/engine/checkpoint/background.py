"""Runs one write at a time in a thread, so that training does not wait for the disk."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable

from unidle.signals import STOPPING


class BackgroundWriter:
    """At most one write runs; `take_error` has its error."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    @property
    def is_busy(self) -> bool:
        """Whether a write runs."""
        return self._thread is not None and self._thread.is_alive()

    def start(self, write: Callable[[], None]) -> None:
        """Call `write` in a thread, once the previous write is done."""
        self.wait()
        # Not a daemon: a program that ends waits for it.
        thread = threading.Thread(target=self._run, args=(write,), name="unidle-writer")
        try:
            thread.start()
        except RuntimeError:  # this user, or this job, may have no more threads: a checkpoint must not depend on that
            self._write(write)
        else:
            self._thread = thread

    def wait(self) -> None:
        """Wait until no write runs."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def take_error(self) -> BaseException | None:
        """The error of a write that has ended, once."""
        if self._error is None or self.is_busy:
            return None
        error, self._error = self._error, None
        return error

    def _run(self, write: Callable[[], None]) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, STOPPING)  # they are for the trainer's thread
        self._write(write)

    def _write(self, write: Callable[[], None]) -> None:
        try:
            write()
        except BaseException as error:
            self._error = error
