"""Writes metrics as TensorBoard scalars."""

from __future__ import annotations

import socket
import struct
import time
from collections.abc import Sequence
from io import FileIO
from pathlib import Path
from typing import Any

from unidle.metrics.crc32c import masked_crc32c
from unidle.metrics.tags import Tag, with_tags
from unidle.writing import refuse_link, remove_link


class TensorBoardWriter:
    """Writes event files to `folder`; TensorBoard hides events past `step` from earlier files.

    It writes each event at once. tensorboardX's own writer uses a thread and a queue of multiprocessing, and waits for
    ever once a failed write has ended the thread.
    """

    def __init__(self, folder: Path, step: int = 0, tags: Sequence[Tag] = ()) -> None:
        """`tags` are written in addition to unidle's names."""
        from tensorboardX.proto.event_pb2 import Event, SessionLog

        refuse_link(folder)
        # Event files are named by the second of their creation: with the step as suffix, a run that is resumed within
        # that second does not overwrite its first file.
        name = f"events.out.tfevents.{int(time.time())}.{socket.gethostname()}.{step:012d}"
        self._path, self._tags = folder / name, tags
        self._file: FileIO | None = None
        start = SessionLog(status=SessionLog.START)
        self._first = [Event(file_version="brain.Event:2"), Event(step=step + 1, session_log=start)]

    def write(self, step: int, metrics: dict[str, float]) -> None:
        """Write all metrics as one event: one event per metric, as with add_scalar, takes eight times as long."""
        from tensorboardX.proto.event_pb2 import Event
        from tensorboardX.proto.summary_pb2 import Summary

        metrics = with_tags(step, metrics, self._tags)
        values = [Summary.Value(tag=name, simple_value=value) for name, value in metrics.items()]
        file = self._file
        if file is None:  # not before: that it fails must not keep the run from starting
            self._path.parent.mkdir(parents=True, exist_ok=True)
            file = self._file = remove_link(self._path).open("wb", buffering=0)
            for event in self._first:
                _append(file, event)
        _append(file, Event(step=step, summary=Summary(value=values)))

    def close(self) -> None:
        """Close the event file."""
        if self._file is not None:
            self._file.close()


def _append(file: FileIO, event: Any) -> None:
    """Append a TFRecord: length, its checksum, the event, its checksum."""
    event.wall_time = time.time()
    content = event.SerializeToString()
    length = struct.pack("<Q", len(content))
    checksums = [struct.pack("<I", masked_crc32c(part)) for part in (length, content)]
    record = memoryview(length + checksums[0] + content + checksums[1])
    while record:  # an almost full disk takes a part of it, then raises
        record = record[file.write(record) :]
