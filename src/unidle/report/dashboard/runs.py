"""The current state of runs: one in full for its page, and one row per run of a folder."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

from unidle.config.files import MAX_CHARACTERS, parse_yaml
from unidle.errors import UsageError
from unidle.formatting import percent, score, short_number
from unidle.report.dashboard.figures import UNKNOWN, format_or_dash
from unidle.report.dashboard.files import Runs, Tail, is_training, last_records, open_regular, record_at
from unidle.report.dashboard.segments import Segment, merge, segment_of
from unidle.report.dashboard.view import TRAINING, UNREADABLE, RunRecords, View, state_of, view_of
from unidle.report.history import Record, history_of, number

_ROW_BYTES = 1 << 18  # read from the end of each file for a row: tens of records
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
        config = _config(self._folder)
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
    config = open_regular(run, "config.yaml")
    if config is None:
        raise UsageError(f"{folder} is not a run folder (it has no config.yaml); give the folder of a run.")
    config.close()
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


def _config(folder: Path) -> dict[str, Any] | None:
    """Read config.yaml; None if it cannot be read."""
    file = open_regular(folder, "config.yaml")
    if file is None:
        return None
    with file:
        try:
            return parse_yaml(file.read(MAX_CHARACTERS + 1).decode(), "config.yaml")
        except (UsageError, UnicodeDecodeError):
            return None


class Rows:
    """One row per run of a folder, from the ends of its files; unchanged files are not read again."""

    def __init__(self, runs: Runs) -> None:
        self._runs = runs
        self._known: dict[str, tuple[Any, View]] = {}

    def now(self) -> list[View]:
        """Return the current rows, training runs first."""
        known, self._known = self._known, {}
        for name in self._runs.names():
            folder = self._runs.find(name)
            if folder is None:
                continue  # it was removed meanwhile
            is_live = is_training(folder)
            stamp = (is_live, *(_stamp(folder / file) for file in ("config.yaml", "metrics.jsonl", "meter.jsonl")))
            same = name in known and known[name][0] == stamp
            self._known[name] = known[name] if same else (stamp, row_of(name, folder, is_live))
        return sorted((row for _, row in self._known.values()), key=lambda row: row["state"] != TRAINING)


def _stamp(path: Path) -> tuple[int, int, int] | None:
    try:
        state = os.lstat(path)
    except OSError:
        return None
    return state.st_ino, state.st_mtime_ns, state.st_size


def row_of(name: str, folder: Path, is_live: bool) -> View:
    """Return a run's row on the page of all runs; unknown figures are –. A run that cannot be read never raises."""
    try:
        config = _config(folder)
        if config is not None:
            row = _row(name, folder, config, is_live)
            as_json(row)
            return row
    except Exception:  # whatever is wrong with it, it must not hide the other runs
        pass
    unknown = dict.fromkeys(("env", "preset", "step", "total", "rate", "return", "busy"), UNKNOWN)
    return {"name": name, "state": UNREADABLE, "progress": None, **unknown}


def _row(name: str, folder: Path, config: dict[str, Any], is_live: bool) -> View:
    history = history_of(folder, config, last_records(folder, "metrics.jsonl", _ROW_BYTES))
    lines = last_records(folder, "meter.jsonl", _ROW_BYTES)
    latest = merge([segment for line in lines if (segment := segment_of(line)) is not None])
    total = history.total_steps
    final, result = history.final_evaluation, history.training_return
    if result is None and final is not None:
        result = number(final, "eval/return_mean")
    return {
        "name": name,
        "env": str(history.setting("run", "env") or UNKNOWN),
        "preset": str(history.setting("run", "preset") or UNKNOWN),
        "state": state_of(history, is_live),
        "step": f"{history.steps:,}",
        "total": short_number(total) if total else UNKNOWN,
        "progress": history.steps / total if total else None,
        "rate": format_or_dash(history.steps_per_second, short_number),
        "return": format_or_dash(result, score),
        "busy": format_or_dash(latest.gpu["busy"] if latest and latest.gpu else None, percent),
    }


def as_json(value: Any) -> str:
    """Return one line of strict JSON, without NaN."""
    return json.dumps(value, allow_nan=False, separators=(",", ":"))
