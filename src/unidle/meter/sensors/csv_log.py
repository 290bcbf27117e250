"""Writes samples to a CSV file, one line per new value, so each reading keeps its own rate without repeats.

Unavailable readings have no lines. Lines are written whole: the file can be read while it grows and survives a crash.
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
    """An open CSV file of samples."""

    def __init__(self, path: Path) -> None:
        if path.is_file() and path.stat().st_size:
            raise UsageError(f"{path} is not empty; choose another file for --csv.")
        self._path = path
        with self._write_errors():
            self._file = path.open("w", encoding="utf-8", newline="", buffering=1)
            self._writer = csv.writer(self._file, lineterminator="\n")
            self._writer.writerow(COLUMNS)

    def write(self, source: Source, found: dict[str, list[Sample]]) -> None:
        """Append what `source.poll()` found."""
        # Recomputed each time because the system clock may be adjusted while we run.
        offset_ns = time.time_ns() - time.perf_counter_ns()
        with self._write_errors():
            for reading in source.readings:
                for sample in found.get(reading.name, ()):
                    at = f"{(sample.at_ns + offset_ns) * 1e-9:.3f}"
                    self._writer.writerow((at, source.name, reading.name, f"{sample.value:.6g}", reading.unit))

    def close(self) -> None:
        """Close the file."""
        with suppress(OSError):  # write errors were already reported
            self._file.close()

    @contextmanager
    def _write_errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise UsageError(
                f"{self._path} cannot be written ({error.strerror}); choose another file for --csv."
            ) from None
