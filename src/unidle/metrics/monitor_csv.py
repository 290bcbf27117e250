"""`monitor.csv`: one row per episode, in the form of Stable-Baselines3's Monitor, which its `load_results` reads."""

from __future__ import annotations

import contextlib
import json
import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from unidle.config.files import display_path
from unidle.errors import UsageError
from unidle.writing import open_to_append, write_atomically

FILE = "monitor.csv"


class MonitorCsv:
    """Appends episodes to a file; a resumed run continues it after the rows that its checkpoint knows."""

    def __init__(
        self, path: Path, env: str, info_keys: Sequence[str], rows: int, wall: float, say: Callable[[str], None]
    ) -> None:
        """Keep the first `rows` rows; the run has trained for `wall` seconds. `say` reports a failed write."""
        self._path, self._wall, self._say = path, wall, say
        columns = ",".join(("r", "l", "t", *info_keys))
        lines = path.read_bytes().split(b"\n")[:-1] if path.is_file() and rows else []  # a last one may be incomplete
        if len(lines) < 2:
            header = json.dumps({"t_start": time.time() - wall, "env_id": env})
            lines = [f"#{header}".encode(), columns.encode()]
        elif lines[1].decode(errors="replace") != columns:
            raise UsageError(
                f"{display_path(path)} has other columns than {columns}; resume with the same --log-info, or move it."
            )
        write_atomically(path, b"".join(line + b"\n" for line in lines[: 2 + rows]))
        self._file = open_to_append(path)
        self._has_failed = False

    def write(self, episodes: Sequence[tuple[float, ...]], wall: float) -> None:
        """Append the episodes (return, length, info) since the last call; `wall` is the run's time now.

        When exactly they ended is not known: they are spread over the time since the last call.
        """
        began, self._wall = self._wall, wall
        if self._has_failed or not episodes:
            return
        step, rows = (wall - began) / len(episodes), []
        for number, (reward, length, *info) in enumerate(episodes, 1):
            numbers = ["" if math.isnan(value) else repr(value) for value in info]
            row = [repr(round(reward, 6)), str(length), f"{began + number * step:.6f}", *numbers]
            rows.append(",".join(row) + "\n")
        try:
            self._file.write("".join(rows))
            self._file.flush()
        except OSError as error:
            self._has_failed = True
            self._say(f"{display_path(self._path)} gets no more episodes ({error.strerror}); training continues.")

    def close(self) -> None:
        """Close the file."""
        with contextlib.suppress(OSError):  # a failed write has been reported already
            self._file.close()
