"""What tuning has found: an `Outcome` for each change, `Tuned` for all of them, and the `Watcher` who is told."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import prod
from typing import Any, Literal, Protocol

from unidle.config import Config
from unidle.tuning.search.changes import TUNED, Change
from unidle.tuning.search.interval import Interval
from unidle.tuning.search.trial import Situation


@dataclass(frozen=True)
class Outcome:
    """What became of one change."""

    change: Change
    predicted: float | None
    measured: Interval | None
    """Times as fast; of a recipe: return gained a second, more than before. None: not measured."""
    kept: bool
    note: str = ""

    def plain(self) -> dict[str, Any]:
        """For JSON."""
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
    """All that is known so far."""

    config: Config
    """With what was kept."""
    outcomes: list[Outcome] = field(default_factory=list)
    situation: Situation | None = None
    first_rate: float = 0.0
    """Steps a second at the start."""
    rate: float = 0.0
    """And of the settings that are kept, when they were measured: at another time, on a machine that may be busier."""
    ended_by: Literal["", "budget", "Ctrl-C", "failure"] = ""
    """Empty: nothing was left to try; failure: the settings that were kept ran at first, and then no more."""
    seconds: float = 0.0

    @property
    def times_as_fast(self) -> float:
        """The product of the ratios that the engine changes were kept for: each was measured in turns, all never."""
        kept = [outcome for outcome in self.outcomes if outcome.kept and not outcome.change.is_recipe]
        return prod(outcome.measured.mean for outcome in kept if outcome.measured is not None)

    @property
    def has_measured(self) -> bool:
        """Whether anything is known of any change."""
        return any(outcome.measured is not None for outcome in self.outcomes)

    @property
    def engine(self) -> dict[str, Any]:
        """The engine settings, for a file."""
        return {name: getattr(self.config.engine, name) for name in TUNED}


class Watcher(Protocol):
    """Who shows how it goes."""

    def on_stage(self, text: str) -> None:
        """Something that takes a while begins."""

    def on_start(self, tuned: Tuned) -> None:
        """The job was measured as it is."""

    def on_look(self, change: Change, measured: Interval, pairs: int) -> None:
        """So much is known of a change by now."""

    def on_outcome(self, outcome: Outcome) -> None:
        """A change is settled."""


def _finite(value: float) -> float | None:
    return value if abs(value) < 1e300 else None
