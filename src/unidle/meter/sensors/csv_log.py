"""Samples as a CSV file: one line for each new value, so that every reading keeps its own pace and no repeat is in it.

What a GPU lacks has no lines. Each line is whole when it is written: the file can be read while it grows, and what is
in it stays whatever ends the program.
"""

from __future__ import annotations

import csv
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from unidle.errors import UsageError
from unidle.meter.sensors.reading import Sample, Source

COLUMNS = ("time", "source", "reading", "value", "unit")  # time: seconds since 1970


class CsvLog:
    """A CSV file in the making."""

    def __init__(self, path: Path) -> None:
        if path.is_file() and path.stat().st_size:
            raise UsageError(f"There is already something in {path}; choose another file for --csv.")
        self._path = path
        with self._told():
            self._file = path.open("w", encoding="utf-8", newline="", buffering=1)
            self._writer = csv.writer(self._file, lineterminator="\n")
            self._writer.writerow(COLUMNS)

    def write(self, source: Source, found: dict[str, list[Sample]]) -> None:
        """Append what `source.poll()` found."""
        # The system's clock may be set while we run: what is written is right by its time of now.
        offset_ns = time.time_ns() - time.perf_counter_ns()
        with self._told():
            for reading in source.readings:
                for sample in found.get(reading.name, ()):
                    at = f"{(sample.at_ns + offset_ns) * 1e-9:.3f}"
                    self._writer.writerow((at, source.name, reading.name, f"{sample.value:.6g}", reading.unit))

    def close(self) -> None:
        """Close the file."""
        with suppress(OSError):  # what could not be written was told of then
            self._file.close()

    @contextmanager
    def _told(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise UsageError(
                f"{self._path} cannot be written ({error.strerror}); choose another file for --csv."
            ) from None
