"""What callbacks log, and the metrics of the latest iteration under Stable-Baselines3's names."""

from __future__ import annotations

import shutil
import tempfile
import weakref
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from unidle.metrics.tags import SB3_TAGS, with_tags


class Logger:
    """Collects numbers; `dump`, or the end of the iteration, writes them to the run's metrics, if it keeps any."""

    def __init__(self, folder: str | None = None) -> None:
        self.metrics: dict[str, Any] = {}  # the record of the latest iteration
        self._recorded: dict[str, Any] = {}
        self._means: dict[str, list[float]] = defaultdict(list)
        self._folder = folder
        self.write: Callable[[Mapping[str, Any]], None] = lambda values: None  # of the run, while there is one

    @property
    def name_to_value(self) -> dict[str, Any]:
        """What was recorded since the last `dump`, and the metrics of the latest iteration."""
        return {**sb3_metrics(self.metrics), **self._recorded}

    @property
    def dir(self) -> str:
        """The run folder; an empty one, until the logger is deleted, if the run keeps no files."""
        if self._folder is None:
            self._folder = tempfile.mkdtemp(prefix="unidle-")
            weakref.finalize(self, shutil.rmtree, self._folder, ignore_errors=True)
        return self._folder

    def get_dir(self) -> str:
        """As `dir`."""
        return self.dir

    def record(self, key: str, value: Any, exclude: Any = None) -> None:
        """Log a number; anything else (text, figures, videos) is not written."""
        self._recorded[key] = value

    def record_mean(self, key: str, value: float | None, exclude: Any = None) -> None:
        """Log the mean of the numbers given since the last `dump`."""
        if value is not None:
            self._means[key].append(value)
            self._recorded[key] = float(np.mean(self._means[key]))

    def dump(self, step: int = 0) -> None:
        """Write what was logged."""
        if not self._recorded:
            return
        numbers = {
            key: float(value) for key, value in self._recorded.items() if isinstance(value, int | float | np.number)
        }
        self._recorded.clear()
        self._means.clear()
        if numbers:
            self.write(numbers)


def sb3_metrics(record: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of an iteration's record under Stable-Baselines3's names."""
    numbers = {name: value for name, value in record.items() if isinstance(value, int | float)}
    if "iteration" not in numbers:
        return {}
    tagged = with_tags(int(numbers["step"]), numbers, SB3_TAGS)
    return {name: value for name, value in tagged.items() if "/" in name}
