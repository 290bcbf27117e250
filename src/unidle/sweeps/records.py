"""The trials of a sweep, as its journal records them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from unidle.formatting import short_number

State = Literal["running", "finished", "pruned", "failed"]


@dataclass(frozen=True)
class TrialRecord:
    """A trial of a sweep."""

    number: int
    state: State
    value: float | None  # the mean return of the final evaluation; of a pruned trial, of the latest one
    settings: dict[str, Any]
    path: Path
    seconds: float | None  # None while it runs
    evaluations: dict[int, float] = field(default_factory=dict)  # number of the evaluation → mean return
    parameters: dict[str, Any] = field(default_factory=dict)  # as Optuna knows them
    error: str | None = None

    @property
    def is_over(self) -> bool:
        """Whether the trial has ended, however it ended."""
        return self.state != "running"


def best_of(records: Iterable[TrialRecord]) -> TrialRecord | None:
    """The finished trial with the highest value."""
    finished = [(record.value, -record.number, record) for record in records if record.state == "finished"]
    known = [(value, earlier, record) for value, earlier, record in finished if value is not None]
    return max(known)[2] if known else None


def settings_text(settings: dict[str, Any]) -> str:
    """Settings in one line: learning_rate 3e-4, batch_size 64."""
    return ", ".join(f"{name} {value_text(value)}" for name, value in settings.items())


def value_text(value: Any) -> str:
    """The value of a setting, numbers with four digits."""
    if isinstance(value, (list, tuple)):
        return ",".join(map(str, value))
    is_long = isinstance(value, float) and not isinstance(value, bool)
    return short_number(value, 4) if is_long else "none" if value is None else str(value)
