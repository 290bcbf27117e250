"""How a sweep searches."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, get_args

from unidle.config.convert import in_brief
from unidle.errors import UsageError
from unidle.sweeps.objectives import Objective

Sampler = Literal["tpe", "random"]
Pruner = Literal["auto", "median", "hyperband", "wilcoxon", "none"]

_MAX_TRIALS, _MAX_MEMBERS = 100_000, 1024
_MIN_WILCOXON_SEEDS = 5  # of four seeds, it can stop a trial only after the last


@dataclass(frozen=True)
class Plan:
    """How a sweep searches."""

    trials: int = 50
    at_once: int = 4
    seeds_per_trial: int = 1
    sampler: Sampler = "tpe"
    pruner: Pruner = "auto"
    objectives: tuple[Objective, ...] = ("return",)

    def settled(self) -> Plan:
        """The plan with the pruner that `auto` stands for."""
        if self.pruner != "auto":
            return self
        return replace(self, pruner="median" if self.may_prune else "none")

    @property
    def may_prune(self) -> bool:
        """Whether trials can be compared before they are complete."""
        return len(self.objectives) == 1 and self.objectives[0] != "time-to-target"

    @property
    def seeds_in_turn(self) -> bool:
        """Whether a trial trains one seed after another, and is compared after each."""
        return self.pruner == "wilcoxon"

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
        unknown = [each for each in self.objectives if each not in get_args(Objective)]
        if unknown or not self.objectives or len({*self.objectives}) < len(self.objectives):
            given = in_brief(unknown[0] if unknown else list(self.objectives))
            raise UsageError(f"`objective` is {given}; use one or more of {', '.join(get_args(Objective))}.")
        if self.pruner not in ("auto", "none") and not self.may_prune:
            by = "several objectives" if len(self.objectives) > 1 else self.objectives[0]
            raise UsageError(f"Trials cannot be pruned by {by}; remove --pruner {self.pruner}.")
        if self.pruner == "wilcoxon" and (self.seeds_per_trial < _MIN_WILCOXON_SEEDS or self.objectives != ("return",)):
            raise UsageError(
                "--pruner wilcoxon compares the returns of trials seed by seed; use it with --seeds-per-trial "
                f"{_MIN_WILCOXON_SEEDS} or more and the objective return."
            )
