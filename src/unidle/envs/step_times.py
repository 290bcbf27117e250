"""Measures how long the steps of an environment take."""

from __future__ import annotations

import numpy as np

_MAX_STEPS = 32
_MAX_SECONDS = 1.0  # slow environments take fewer steps


class StepTimes:
    """Times of steps and resets; the first step does not count, because it may load or compile something."""

    def __init__(self) -> None:
        self._steps: list[float] = []
        self._resets: list[float] = []

    def add_step(self, seconds: float) -> None:
        """Add a step, with the write of its observation."""
        self._steps.append(seconds)

    def add_reset(self, seconds: float) -> None:
        """Add the reset after an episode that ended."""
        self._resets.append(seconds)

    @property
    def seconds(self) -> float:
        """Time spent after the first step."""
        return sum(self._steps[1:]) + sum(self._resets)

    @property
    def is_enough(self) -> bool:
        """Whether no more steps are needed; at least two are."""
        return len(self._steps) >= _MAX_STEPS or (len(self._steps) > 1 and self.seconds > _MAX_SECONDS)

    def per_step(self) -> float:
        """Median of the steps, plus each step's share of the resets."""
        counted = self._steps[1:] or self._steps
        resets = float(np.median(self._resets)) * len(self._resets) if self._resets else 0.0
        return float(np.median(counted)) + resets / len(self._steps)
