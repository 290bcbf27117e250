"""Who hears of a run: the user's callbacks, and whoever shows it to a person."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from unidle.algos.registry import AnyPolicy
from unidle.timeline import Timeline


@dataclass
class Moment:
    """What a callback gets: the record just written, the policy, and a way to end the run."""

    record: dict[str, Any]
    policy: AnyPolicy
    stop: Callable[[], None]


Callback = Callable[[Moment], None]


class Listener(Protocol):
    """Whoever shows the run to a person."""

    def on_start(self, facts: dict[str, str], total_steps: int, step: int, best: dict[str, Any] | None) -> None:
        """The run begins; a resumed one at `step`, with the `best` evaluation so far."""

    def on_iteration(self, record: dict[str, Any]) -> None:
        """An iteration is done."""

    def on_evaluation(self, record: dict[str, Any]) -> None:
        """An evaluation is done."""

    def on_message(self, text: str) -> None:
        """Something worth a line."""

    def on_end(self) -> None:
        """The run is over, whichever way."""


class Silent:
    """A listener that shows nothing of how a run goes; what to do with a message is left to others."""

    def on_start(self, facts: dict[str, str], total_steps: int, step: int, best: dict[str, Any] | None) -> None:
        """Nothing."""

    def on_iteration(self, record: dict[str, Any]) -> None:
        """Nothing."""

    def on_evaluation(self, record: dict[str, Any]) -> None:
        """Nothing."""

    def on_end(self) -> None:
        """Nothing."""


@dataclass(frozen=True)
class OnGpu:
    """The GPU that a run is on."""

    uuid: str
    captures: Callable[[], int]  # how often something was captured so far


class Accountant(Protocol):
    """Whoever accounts for a run's time while it goes on; it must not fail the run."""

    def begin(self, folder: Path, timeline: Timeline, step: int, gpu: OnGpu | None) -> None:
        """The run begins, or goes on from `step`."""

    def iteration(self, step: int, wall: float, has_learned: bool) -> None:
        """An iteration is done, and the run `wall` seconds old."""

    def end(self) -> None:
        """The run is over, whichever way."""
