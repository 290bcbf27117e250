"""Interfaces to a run: the user's callbacks, the progress display, and the time meter."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from unidle.algos.registry import AnyPolicy
from unidle.timeline import Timeline


@dataclass
class CallbackContext:
    """What a callback receives: the latest record, the policy, and a function that ends the run."""

    record: dict[str, Any]
    policy: AnyPolicy
    stop: Callable[[], None]


Callback = Callable[[CallbackContext], None]


class ProgressDisplay(Protocol):
    """Shows a run to the user."""

    def on_start(self, facts: dict[str, str], total_steps: int, step: int, best: dict[str, Any] | None) -> None:
        """The run starts; a resumed one at `step`, with the `best` evaluation so far."""

    def on_iteration(self, record: dict[str, Any]) -> None:
        """An iteration is done."""

    def on_evaluation(self, record: dict[str, Any]) -> None:
        """An evaluation is done."""

    def on_message(self, text: str) -> None:
        """Show a message."""

    def on_end(self) -> None:
        """The run is over, finished or failed."""


class SilentDisplay:
    """Shows no progress; subclasses decide what to do with messages."""

    def on_start(self, facts: dict[str, str], total_steps: int, step: int, best: dict[str, Any] | None) -> None:
        """Show nothing."""

    def on_iteration(self, record: dict[str, Any]) -> None:
        """Show nothing."""

    def on_evaluation(self, record: dict[str, Any]) -> None:
        """Show nothing."""

    def on_meter(self, line: dict[str, Any]) -> None:
        """Show nothing."""

    def on_end(self) -> None:
        """Show nothing."""


@dataclass(frozen=True)
class RunGpu:
    """The GPU that a run uses."""

    uuid: str
    captures: Callable[[], int]  # number of CUDA graph captures so far


class TimeMeter(Protocol):
    """Measures where a run's time goes; its errors must never end the run."""

    def begin(self, folder: Path, timeline: Timeline, step: int, gpu: RunGpu | None) -> None:
        """The run starts, or resumes at `step`."""

    def iteration(self, step: int, wall: float, has_learned: bool) -> None:
        """An iteration is done, `wall` seconds into the run."""

    def end(self) -> None:
        """The run is over, finished or failed."""
