"""`metrics.jsonl`: one JSON record per line, the run's own record of itself."""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path
from typing import IO, Any

from unidle.errors import WriteError


class JsonlWriter:
    """Appends records to a file. A resumed run drops what was written past `step`: it is written again."""

    def __init__(self, path: Path, step: int = 0) -> None:
        self._file = reopen(path, step)

    def write(self, step: int, metrics: dict[str, float], kind: str = "iteration") -> None:
        """Append the metrics of an iteration or an evaluation."""
        self.append({"kind": kind, "step": step, **metrics})

    def append(self, record: dict[str, Any]) -> None:
        """Append a record of any kind; WriteError if that fails."""
        try:
            self._file.write(json.dumps(record) + "\n")
            self._file.flush()
        except OSError as error:
            raise WriteError(f"Cannot write {self._file.name} ({error.strerror}); free some disk space.") from error

    def close(self) -> None:
        """Close the file."""
        with contextlib.suppress(OSError):  # a failed write has been reported already
            self._file.close()


def reopen(path: Path, step: int) -> IO[str]:
    """Open for appending, without records past `step` and without a last line cut short by a kill."""
    if path.exists():
        kept = [r for r in read_records(path) if r["step"] <= step] if step else []
        fresh = path.with_suffix(".tmp")
        fresh.write_text("".join(json.dumps(r) + "\n" for r in kept))
        os.replace(fresh, path)
    return path.open("a", encoding="utf-8")


def read_records(path: Path) -> list[dict[str, Any]]:
    """All complete records of a file, oldest first."""
    records = []
    if path.exists():
        for line in path.read_text(encoding="utf-8").splitlines():
            try:
                records.append(json.loads(line))
            except json.JSONDecodeError:
                continue  # the last line of a run that was killed while writing it
    return records
