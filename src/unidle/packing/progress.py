"""How far a job is, from what it writes: unidle's metrics.jsonl, or the speed that a trainer prints."""

from __future__ import annotations

import os
import re
from collections import deque
from collections.abc import Iterable
from pathlib import Path

import psutil

from unidle.metrics.jsonl import parse_record
from unidle.packing.process_tree import open_files

_METRICS = "metrics.jsonl"
_WINDOW_S = 30.0  # over which the speed of an unidle run is averaged
_MOST_BYTES = 1 << 20  # that are read of a file at once; what comes before is skipped
_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]|\x1b\][^\x07]*\x07|[\x00-\x08\x0b-\x1f\x7f]")
# `|    fps             | 1234     |` of Stable-Baselines3, `SPS: 1234` of CleanRL.
_SPEED = re.compile(r"\bfps\s*\|\s*([\d.]+(?:e[+-]?\d+)?)|\bSPS:\s*(\d+)")


class Progress:
    """Speed and last line of output of one job."""

    def __init__(self, output: Path) -> None:
        self._output = _Tail(output)
        self._metrics: _Tail | None = None
        self._points: deque[tuple[float, int]] = deque()  # (seconds of training, steps), oldest first
        self._printed: float | None = None
        self.run: Path | None = None
        """Run folder of an unidle job."""
        self.last_line = ""
        """Of the output, if it has letters or digits."""

    def poll(self, processes: Iterable[psutil.Process]) -> None:
        """Read what is new; `processes` are those of the job."""
        for line in self._output.lines():
            text = _ESCAPES.sub("", line.decode(errors="replace").rstrip("\r\n").rpartition("\r")[2]).strip()
            if any(character.isalnum() for character in text):
                self.last_line = text
            for found in _SPEED.finditer(text):
                self._printed = float(found[1] or found[2])
        if self._metrics is None:
            self._find_metrics(processes)
        if self._metrics is not None:
            for line in self._metrics.lines():
                self._add(line)

    @property
    def steps_per_second(self) -> float | None:
        """Recent speed; None: not known."""
        if len(self._points) > 1:
            (start, first), (end, last) = self._points[0], self._points[-1]
            if end > start:
                return (last - first) / (end - start)
        return self._printed

    def _find_metrics(self, processes: Iterable[psutil.Process]) -> None:
        # A trainer keeps the file open; its name and place are the user's choice.
        for process in processes:
            for path in open_files(process):
                if path.name == _METRICS:
                    self.run, self._metrics = path.parent, _Tail(path)
                    return

    def _add(self, line: bytes) -> None:
        record = parse_record(line)
        wall = record.get("wall") if record is not None and record.get("kind") == "iteration" else None
        if record is None or not isinstance(wall, (int, float)):
            return
        self._points.append((float(wall), record["step"]))
        while len(self._points) > 2 and self._points[1][0] <= wall - _WINDOW_S:
            self._points.popleft()


class _Tail:
    """The lines that are added to a file."""

    def __init__(self, path: Path) -> None:
        self._path, self._offset, self._partial = path, 0, b""

    def lines(self) -> list[bytes]:
        """Complete lines since the last call."""
        try:
            with self._path.open("rb") as file:
                end = os.fstat(file.fileno()).st_size
                if end < self._offset:  # it was overwritten
                    self._offset, self._partial = 0, b""
                start = max(self._offset, end - _MOST_BYTES)
                if start > self._offset:
                    self._partial = b""
                file.seek(start)
                content = file.read(end - start)
        except OSError:
            return []
        self._offset = start + len(content)
        *lines, self._partial = (self._partial + content).split(b"\n")
        return lines
