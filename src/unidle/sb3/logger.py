"""What callbacks log: written to the run's metrics, and so to TensorBoard."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np


class Logger:
    """Collects numbers; `dump`, or the end of the iteration, writes them."""

    def __init__(self, folder: str | None = None) -> None:
        self.name_to_value: dict[str, Any] = {}
        self._means: dict[str, list[float]] = defaultdict(list)
        self._folder = folder
        self.write: Callable[[Mapping[str, Any]], None] = lambda values: None  # of the run, while there is one

    @property
    def dir(self) -> str | None:
        """The run folder."""
        return self._folder

    def get_dir(self) -> str | None:
        """The run folder."""
        return self._folder

    def record(self, key: str, value: Any, exclude: Any = None) -> None:
        """Log a number; anything else (text, figures, videos) is not written."""
        self.name_to_value[key] = value

    def record_mean(self, key: str, value: float | None, exclude: Any = None) -> None:
        """Log the mean of the numbers given since the last `dump`."""
        if value is not None:
            self._means[key].append(value)
            self.name_to_value[key] = float(np.mean(self._means[key]))

    def dump(self, step: int = 0) -> None:
        """Write what was logged."""
        numbers = {
            key: float(value) for key, value in self.name_to_value.items() if isinstance(value, int | float | np.number)
        }
        self.name_to_value.clear()
        self._means.clear()
        if numbers:
            self.write(numbers)
