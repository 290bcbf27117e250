"""`metrics.jsonl`: the records of a run, one JSON object per line."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

from unidle.config.files import display_path
from unidle.errors import WriteError
from unidle.writing import open_to_append, write_atomically


class JsonlWriter:
    """Appends records to a file. A resumed run drops records past `step`, because it writes them again."""

    def __init__(self, path: Path, step: int = 0, say: Callable[[str], None] | None = None) -> None:
        """`say` receives a message if the file has damaged lines, which are dropped."""
        self._file = reopen(path, step, say)

    def write(self, step: int, metrics: dict[str, float], kind: str = "iteration") -> None:
        """Append the metrics of an iteration or an evaluation."""
        self.append({"kind": kind, "step": step, **metrics})

    def append(self, record: dict[str, Any]) -> None:
        """Append a record of any kind; WriteError if that fails."""
        try:
            self._file.write(json.dumps(record) + "\n")
            self._file.flush()
        except OSError as error:
            raise WriteError(f"Cannot write {self._file.name} ({error.strerror})", "free some disk space") from error

    def close(self) -> None:
        """Close the file."""
        with contextlib.suppress(OSError):  # a failed write has been reported already
            self._file.close()


def reopen(path: Path, step: int, say: Callable[[str], None] | None = None) -> IO[str]:
    """Open for appending, without records past `step`, damaged lines, and a last line that a kill cut short.

    `say` receives one message if lines were damaged.
    """
    if path.exists() or path.is_symlink():
        kept = [line for line, record in _read(path, say) if step and record["step"] <= step]
        write_atomically(path, b"".join(line + b"\n" for line in kept))
    return open_to_append(path)


def read_records(path: Path, say: Callable[[str], None] | None = None) -> list[dict[str, Any]]:
    """All records of a file, oldest first; `say` receives one message if lines were damaged."""
    return [record for _, record in _read(path, say)]


def parse_record(line: bytes) -> dict[str, Any] | None:
    """The record in a line; None if it is not a JSON object with a step."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):  # RecursionError: endless brackets
        return None
    step = record.get("step") if isinstance(record, dict) else None
    return record if type(step) is int and 0 <= step < 2**63 else None


def _read(path: Path, say: Callable[[str], None] | None) -> list[tuple[bytes, dict[str, Any]]]:
    """The undamaged lines of a file and their records."""
    if not path.is_file():
        return []
    *lines, last = path.read_bytes().split(b"\n")  # `last` is empty, unless a kill cut it short
    found = [(line, parse_record(line)) for line in lines]
    damaged = sum(record is None for _, record in found)
    if damaged and say is not None:
        say(f"{display_path(path)} has {damaged} damaged line{'s' if damaged > 1 else ''}; skipped.")
    found.append((last, parse_record(last)))
    return [(line, record) for line, record in found if record is not None]
