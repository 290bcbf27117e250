"""How a sweep searches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from unidle.config.convert import in_brief
from unidle.errors import UsageError

Sampler = Literal["tpe", "random"]
Pruner = Literal["median", "hyperband", "none"]

_MAX_TRIALS, _MAX_MEMBERS = 100_000, 1024


@dataclass(frozen=True)
class Plan:
    """How a sweep searches."""

    trials: int = 50
    at_once: int = 4
    seeds_per_trial: int = 1
    sampler: Sampler = "tpe"
    pruner: Pruner = "median"

    def check(self) -> None:
        """UsageError if a value is not valid."""
        for name in ("trials", "at_once", "seeds_per_trial"):
            value = getattr(self, name)
            if type(value) is not int or not 1 <= value <= _MAX_TRIALS:
                raise UsageError(f"`{name}` is {in_brief(value)}; it must be an integer of at least 1.")
        if self.at_once * self.seeds_per_trial > _MAX_MEMBERS:
            raise UsageError(
                f"{self.at_once} trials with {self.seeds_per_trial} seeds each are too many runs at once; use at most "
                f"{_MAX_MEMBERS:,}."
            )
        for name, kind in (("sampler", Sampler), ("pruner", Pruner)):
            if getattr(self, name) not in get_args(kind):
                raise UsageError(f"`{name}` is {in_brief(getattr(self, name))}; use {' or '.join(get_args(kind))}.")
