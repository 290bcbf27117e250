"""The current state of a run, in full for its page."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from unidle.errors import UsageError
from unidle.report.dashboard.files import Tail, has_regular, is_training, read_mapping, record_at
from unidle.report.dashboard.segments import Segment, segment_of
from unidle.report.dashboard.view import UNREADABLE, RunRecords, View, view_of
from unidle.report.history import Record, history_of

_KEPT_SPANS = 40  # segments with spans in a single-file page; each takes about 10 KB


class Reader:
    """Follows the growing files of a run."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._tails = {name: Tail(folder, name) for name in ("metrics.jsonl", "meter.jsonl", "changes.jsonl")}
        self._metrics: list[Record] = []
        self._segments: list[Segment] = []
        self._changes: list[Record] = []
        self._is_training: bool | None = None

    def refresh(self) -> bool:
        """Read new records; returns whether there are any."""
        now = is_training(self._folder)  # before the files, so that a finished run is read to its end
        is_new = now != self._is_training
        self._is_training = now
        kept: dict[str, list[Any]] = {
            "metrics.jsonl": self._metrics,
            "meter.jsonl": self._segments,
            "changes.jsonl": self._changes,
        }
        for name, tail in self._tails.items():
            restarted, found = tail.new_records()
            if restarted:
                kept[name].clear()
            # Spans stay in the file: they are most of it, and only one segment's are shown at a time.
            items = [segment_of(r, offset) for offset, r in found] if name == "meter.jsonl" else [r for _, r in found]
            kept[name] += [item for item in items if item is not None]
            is_new |= restarted or bool(items)
        return is_new

    def view(self) -> View:
        """Return the view of the records read so far."""
        config = read_mapping(self._folder, "config.yaml")
        history = history_of(self._folder, config or {}, self._metrics)
        view = view_of(RunRecords(history, self._segments, self._changes, bool(self._is_training)))
        if config is None:
            view |= {"state": UNREADABLE, "verdict": "The config.yaml of this run cannot be read."}
        return view

    def spans(self, offset: int) -> list[Any] | None:
        """Return the spans of the segment at offset `offset`; None if there is no such segment."""
        if not any(segment.offset == offset for segment in self._segments):
            return None
        return spans_of(record_at(self._folder, "meter.jsonl", offset))

    def some_spans(self, view: View) -> dict[str, list[Any]]:
        """Return the spans of segments spread over the run, including the latest, by offset."""
        offsets = [offset for offset in view["timeline"]["offset"] if offset is not None]
        stride = -(-len(offsets) // _KEPT_SPANS) or 1
        return {str(offset): self.spans(offset) or [] for offset in offsets[::-1][::stride][::-1]}


def whole_view(folder: Path) -> tuple[View, dict[str, list[Any]]]:
    """Return the current view of a run and spans of some segments; raises UsageError if it is not a run."""
    run = folder.resolve()  # the folder itself may be a symlink; links inside it are not followed
    if not has_regular(run, "config.yaml"):
        raise UsageError(f"{folder} is not a run folder (it has no config.yaml); give the folder of a run.")
    reader = Reader(run)
    reader.refresh()
    view = reader.view()
    return view, reader.some_spans(view)


def spans_of(record: Record | None) -> list[Any]:
    """Return the valid spans (lane, phase, begin, end) of a line of `meter.jsonl`."""
    spans = (record or {}).get("spans")
    return [span for span in spans if _is_span(span)] if isinstance(spans, list) else []


def _is_span(span: Any) -> bool:
    if not isinstance(span, list) or len(span) != 4:
        return False
    words, times = span[:2], span[2:]
    are_times = all(isinstance(time, (int, float)) and math.isfinite(time) for time in times)
    return are_times and all(isinstance(word, str) for word in words)


def as_json(value: Any) -> str:
    """Return one line of strict JSON, without NaN."""
    return json.dumps(value, allow_nan=False, separators=(",", ":"))
