"""Drops output that cannot be written: `| head`, a `tee` that was killed or a full disk must not end a run.

After the first failed write to standard output or standard error, what follows is dropped silently.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TextIO, cast


def guard_output() -> None:
    """From now on, drop what cannot be written to `sys.stdout` and `sys.stderr`."""
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:  # closed, as by `2>&-`: the next file would get this number, and everything that is printed
            os.open(os.devnull, os.O_RDWR)  # gets the lowest free number
    sys.stdout, sys.stderr = _guarded(sys.stdout), _guarded(sys.stderr)


@contextlib.contextmanager
def guarded_output() -> Iterator[None]:
    """`guard_output` for the duration of a block."""
    before = sys.stdout, sys.stderr
    guard_output()
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before


def output_is_lost() -> bool:
    """Whether standard output can no longer be written."""
    return isinstance(sys.stdout, _Guarded) and sys.stdout.is_lost


class _Guarded:
    """A text stream that drops everything after its first failed write."""

    def __init__(self, stream: TextIO) -> None:
        self._stream, self.is_lost = stream, False

    def write(self, text: str) -> int:
        self._try(lambda: self._write(text))
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        self._try(self._stream.flush)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def _write(self, text: str) -> None:
        try:
            self._stream.write(text)
        except UnicodeEncodeError:  # the encoding of the terminal lacks a character
            encoding = self._stream.encoding
            self._stream.write(text.encode(encoding, "replace").decode(encoding))

    def _try(self, call: Callable[[], object]) -> None:
        if self.is_lost:  # a failed write keeps its text in the stream's buffer, so each later one would fail too
            return
        try:
            call()
        except BlockingIOError:
            pass  # a slow reader, of a pipe that another process made non-blocking: only this text is lost
        except (OSError, ValueError):  # ValueError: the stream is closed
            self.is_lost = True
            self._redirect()

    def _redirect(self) -> None:
        """Let what is still buffered, and C libraries, write to /dev/null: Python flushes the stream at exit."""
        with contextlib.suppress(OSError, ValueError, AttributeError):
            descriptor = self._stream.fileno()
            if descriptor in (1, 2):
                null = os.open(os.devnull, os.O_WRONLY)
                os.dup2(null, descriptor)
                os.close(null)


def _guarded(stream: TextIO | None) -> TextIO:
    if isinstance(stream, _Guarded):
        return cast(TextIO, stream)
    if stream is None:  # Python's value for a closed stream
        stream = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    return cast(TextIO, _Guarded(stream))
