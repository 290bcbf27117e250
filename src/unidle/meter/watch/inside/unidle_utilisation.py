"""Passes GPU utilisation from the watcher to the samplers through an append-only file.

Only the watcher queries the driver, and only the samplers know the stacks of their programs. A reading covers the time
since the previous one.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterable

_NAME, _READING = "gpu_use", struct.Struct("=qd")  # end time by perf_counter_ns, percent
_PERIOD_NS = 100_000_000  # the driver updates at most ten times a second


def append_readings(folder: str, readings: Iterable[tuple[int, float]]) -> None:
    """Append readings, oldest first."""
    with open(os.path.join(folder, _NAME), "ab") as file:
        file.write(b"".join(_READING.pack(*reading) for reading in readings))


class UtilisationReader:
    """Reads each utilisation reading once."""

    def __init__(self, folder: str) -> None:
        self._path = os.path.join(folder, _NAME)
        self._read, self._next_ns, self._until_ns = 0, 0, 0

    def new(self, now_ns: int) -> list[tuple[int, int, float]]:
        """Return readings since the last call as (from, to, percent); none without a GPU or if called too early."""
        if now_ns < self._next_ns:
            return []
        self._next_ns = now_ns + _PERIOD_NS
        try:
            # Reopened each time: a program may close all descriptors it does not know.
            with open(self._path, "rb") as file:
                file.seek(self._read)
                data = file.read()
        except OSError:
            return []
        whole = len(data) // _READING.size * _READING.size
        self._read += whole
        found = []
        for until_ns, percent in _READING.iter_unpack(data[:whole]):
            if until_ns > self._until_ns:  # may go back when the watcher switches to another GPU
                found.append((self._until_ns, until_ns, percent))
                self._until_ns = until_ns
        return found
