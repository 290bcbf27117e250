"""Results of tuning: an `Outcome` per change, `Tuned` for all of them, and the `TuningProgress` protocol."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import prod
from typing import Any, Literal, Protocol

from unidle.config import Config
from unidle.tuning.search.changes import TUNED, Change
from unidle.tuning.search.interval import Interval
from unidle.tuning.search.trial import JobSetup


@dataclass(frozen=True)
class Outcome:
    """The result of trying one change."""

    change: Change
    predicted: float | None
    measured: Interval | None
    """Speed-up; for a recipe change: difference in return gained per second. None: not measured."""
    kept: bool
    note: str = ""

    def plain(self) -> dict[str, Any]:
        """Return it as JSON values."""
        measured = self.measured and {key: _finite(value) for key, value in vars(self.measured).items()}
        return {
            "change": self.change.text,
            "settings": dict(self.change.values),
            "judged_by": "return per second" if self.change.is_recipe else "steps per second",
            "predicted": self.predicted,
            "measured": measured,
            "kept": self.kept,
            "note": self.note,
        }


@dataclass
class Tuned:
    """The state and result of tuning."""

    config: Config
    """The job with all kept changes."""
    outcomes: list[Outcome] = field(default_factory=list)
    setup: JobSetup | None = None
    first_rate: float = 0.0
    """Steps/s of the job as given."""
    rate: float = 0.0
    """Steps/s of the kept settings, measured later and perhaps under another load."""
    ended_by: Literal["", "budget", "Ctrl-C", "failure"] = ""
    """Empty: everything was tried; failure: the kept settings stopped working."""
    seconds: float = 0.0

    @property
    def times_as_fast(self) -> float:
        """Product of the measured speed-ups of all kept engine changes; they were never measured together."""
        kept = [outcome for outcome in self.outcomes if outcome.kept and not outcome.change.is_recipe]
        return prod(outcome.measured.mean for outcome in kept if outcome.measured is not None)

    @property
    def has_measured(self) -> bool:
        """Whether any change was measured."""
        return any(outcome.measured is not None for outcome in self.outcomes)

    @property
    def engine(self) -> dict[str, Any]:
        """The tuned engine settings, for a file."""
        return {name: getattr(self.config.engine, name) for name in TUNED}


class TuningProgress(Protocol):
    """Shows the progress of tuning."""

    def on_stage(self, text: str) -> None:
        """Called when a stage begins."""

    def on_start(self, tuned: Tuned) -> None:
        """Called when the unchanged job has been measured."""

    def on_interim_result(self, change: Change, measured: Interval, pairs: int) -> None:
        """Called after each pair of segments."""

    def on_outcome(self, outcome: Outcome) -> None:
        """Called when a change has been kept or rejected."""


def _finite(value: float) -> float | None:
    return value if abs(value) < 1e300 else None
