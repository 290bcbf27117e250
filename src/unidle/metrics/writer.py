"""The interface of a metric writer."""

from __future__ import annotations

from typing import Protocol


class MetricWriter(Protocol):
    """Receives the metrics of a run, such as `train/loss`, `rollout/return_mean` or `eval/return_mean`."""

    def write(self, step: int, metrics: dict[str, float]) -> None:
        """Write the metrics of an iteration or an evaluation at `step`.

        Steps may go back: an asynchronous evaluation is written when it is done, at the step it evaluated.
        """

    def close(self) -> None:
        """Flush and close; called once, when the run ends."""
