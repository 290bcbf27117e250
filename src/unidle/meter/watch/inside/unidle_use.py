"""What the driver says of the GPU, from the watcher to the samplers: a file that only grows.

The watcher alone talks to the driver, and the samplers alone know where their programs stand. A reading holds for the
time since the one before it.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterable

_NAME, _READING = "gpu_use", struct.Struct("=qd")  # until when, by perf_counter_ns; percent
_PERIOD_NS = 100_000_000  # the driver has no more than ten readings a second


def tell(folder: str, readings: Iterable[tuple[int, float]]) -> None:
    """Append readings, oldest first."""
    with open(os.path.join(folder, _NAME), "ab") as file:
        file.write(b"".join(_READING.pack(*reading) for reading in readings))


class Told:
    """What was told, each reading once."""

    def __init__(self, folder: str) -> None:
        self._path = os.path.join(folder, _NAME)
        self._read, self._next_ns, self._until_ns = 0, 0, 0

    def new(self, now_ns: int) -> list[tuple[int, int, float]]:
        """Readings since the last call as (from, to, percent); none without a GPU, or where it is too soon to look."""
        if now_ns < self._next_ns:
            return []
        self._next_ns = now_ns + _PERIOD_NS
        try:
            # By its name each time: a program may close all descriptors that it does not know.
            with open(self._path, "rb") as file:
                file.seek(self._read)
                told = file.read()
        except OSError:
            return []
        whole = len(told) // _READING.size * _READING.size
        self._read += whole
        found = []
        for until_ns, percent in _READING.iter_unpack(told[:whole]):
            if until_ns > self._until_ns:  # not so where the watcher finds that it is another GPU that counts
                found.append((self._until_ns, until_ns, percent))
                self._until_ns = until_ns
        return found
