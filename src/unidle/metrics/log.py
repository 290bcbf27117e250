"""Sends every record of a run to `metrics.jsonl` and to the metric writers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from unidle.metrics.jsonl import JsonlWriter
from unidle.metrics.writer import MetricWriter


class MetricLog:
    """Writes to `metrics.jsonl`, which must succeed, and to other writers, which may fail."""

    def __init__(self, jsonl: JsonlWriter | None, writers: Sequence[MetricWriter], say: Callable[[str], None]) -> None:
        """A writer that fails is dropped, with a message to `say`, and the run continues.

        `jsonl` is None if the run keeps no files.
        """
        self._jsonl, self._writers, self._say = jsonl, list(writers), say

    def write(self, record: dict[str, Any]) -> None:
        """Write a record; its numbers also go to the metric writers, unless it is the record of a fault."""
        if self._jsonl is not None:
            self._jsonl.append(record)
        if record["kind"] == "fault" or not self._writers:
            return  # a fault is an event, not a curve
        metrics = {
            name: float(value)
            for name, value in record.items()
            if isinstance(value, (int, float)) and name not in ("step", "kind")
        }
        for writer in list(self._writers):
            try:
                writer.write(record["step"], metrics)
            except Exception as error:
                self._writers.remove(writer)
                self._say(f"{_name(writer)} failed and gets no more metrics ({_reason(error)}); training continues.")

    def close(self) -> None:
        """Close every writer."""
        for writer in self._writers:
            try:
                writer.close()
            except Exception as error:
                self._say(f"{_name(writer)} could not be closed ({_reason(error)}).")
        if self._jsonl is not None:
            self._jsonl.close()


def _name(writer: MetricWriter) -> str:
    return f"The metric writer {type(writer).__name__}"


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
