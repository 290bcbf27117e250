"""The trials of a sweep, as its journal records them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from operator import ge
from pathlib import Path
from typing import Any, Literal

from unidle.formatting import MISSING, short_number
from unidle.sweeps.objectives import Objective, merit, value_in_words

State = Literal["running", "finished", "pruned", "failed"]


@dataclass(frozen=True)
class TrialRecord:
    """A trial of a sweep."""

    number: int
    state: State
    values: tuple[float, ...]  # per objective; of a pruned trial that of its latest evaluation; empty if unknown
    settings: dict[str, Any]
    path: Path
    seconds: float | None  # None while it runs
    evaluations: dict[int, float] = field(default_factory=dict)  # number of the evaluation → mean return
    parameters: dict[str, Any] = field(default_factory=dict)  # as Optuna knows them
    error: str | None = None
    objectives: tuple[Objective, ...] = ("return",)

    @property
    def value(self) -> float | None:
        """The value of the first objective."""
        return self.values[0] if self.values else None

    @property
    def merits(self) -> tuple[float, ...]:
        """The values, such that higher is better."""
        return tuple(merit(objective, value) for objective, value in zip(self.objectives, self.values))

    @property
    def rank(self) -> tuple[tuple[float, ...], float, int]:
        """Sorts finished trials; where several have the best return there is, the one that learned sooner is higher."""
        evaluations = self.evaluations.values()
        return self.merits, sum(evaluations) / max(1, len(evaluations)), -self.number

    @property
    def values_in_words(self) -> list[str]:
        """The value of each objective, as text."""
        if not self.values:
            return [MISSING] * len(self.objectives)
        return [value_in_words(objective, value) for objective, value in zip(self.objectives, self.values)]

    @property
    def is_over(self) -> bool:
        """Whether the trial has ended, however it ended."""
        return self.state != "running"


def best_of(records: Iterable[TrialRecord]) -> TrialRecord | None:
    """The finished trial that is the best by the first objective."""
    known = [record for record in records if record.state == "finished" and record.values]
    return max(known, key=lambda record: record.rank, default=None)


def front_of(records: Iterable[TrialRecord]) -> list[TrialRecord]:
    """The finished trials that no other is better than (Pareto front), the best by the first objective first."""
    known = [record for record in records if record.state == "finished" and record.values]
    front = [record for record in known if not any(_dominates(other, record) for other in known)]
    return sorted(front, key=lambda record: record.rank, reverse=True)


def _dominates(one: TrialRecord, other: TrialRecord) -> bool:
    """Whether one trial is at least as good in every objective, and better in one."""
    return one.merits != other.merits and all(map(ge, one.merits, other.merits))


def settings_text(settings: dict[str, Any]) -> str:
    """Settings in one line: learning_rate 3e-4, batch_size 64."""
    return ", ".join(f"{name} {value_text(value)}" for name, value in settings.items())


def value_text(value: Any) -> str:
    """The value of a setting, numbers with four digits."""
    if isinstance(value, (list, tuple)):
        return ",".join(map(str, value))
    is_long = isinstance(value, float) and not isinstance(value, bool)
    return short_number(value, 4) if is_long else "none" if value is None else str(value)
