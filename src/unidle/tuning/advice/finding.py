"""Findings and advice.

A finding is one cause of a slow run. Its *weight* is its share of the run's time; the heaviest finding is the verdict.
There are two kinds of advice: *engine* advice does not change what is learned (engine settings, a cheaper environment,
the machine), *recipe* advice does.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Literal

from unidle.config import Config, Engine
from unidle.config.fields import section_of
from unidle.errors import UsageError
from unidle.tuning.advice.facts import Facts
from unidle.tuning.job import is_valid
from unidle.tuning.pipeline_model import predicted_speedup

MIN_SPEEDUP = 1.1  # predicted speed-ups below this are within the prediction error
BY_PROBES, IN_TRAINING = "by probes", "in training"  # where a finding's numbers come from
NOTICEABLE = 0.05  # smaller shares of time are not reported


@dataclass(frozen=True)
class Advice:
    """One thing to change."""

    kind: Literal["engine", "recipe"]
    text: str
    flags: str = ""
    """Flags for `unidle train`; empty if there is no setting for it."""
    speedup: float | None = None
    """Predicted speed-up; None if unknown."""
    at_most: bool = False
    """Whether `speedup` is an upper bound, as if the cause were removed entirely."""


@dataclass(frozen=True)
class Finding:
    """One cause of a slow run."""

    cause: str
    weight: float
    """Share of the run's time."""
    sentence: str
    advice: tuple[Advice, ...] = ()
    basis: str = BY_PROBES
    """Source of its numbers: separate probes or the short run."""


def ranked(findings: list[Finding], kind: str) -> list[Advice]:
    """Return advice of one kind: predictions in descending order, then upper bounds, then the rest."""
    found = {(a.text, a.flags): a for finding in findings for a in finding.advice if a.kind == kind}
    return sorted(found.values(), key=lambda a: (a.speedup is None, a.at_most, -(a.speedup or 0.0)))


def with_valid_flags(advice: Advice, config: Config) -> Advice | None:
    """Return the advice with flags that `unidle train` accepts for this job; None if it rejects them."""
    if not advice.flags:
        return advice
    for more in ("", " --allow-recipe-change"):  # some presets require it
        flags = advice.flags + more
        with suppress(UsageError):  # the algorithm may not have such a setting
            if is_valid(config.with_values(_values(flags), "advice")):
                return replace(advice, flags=flags)
    return None


def _values(flags: str) -> dict[str, Any]:
    """Parse flags such as `--n-envs 8 --no-tensorboard` into settings."""
    values: dict[str, Any] = {}
    name = ""
    for word in flags.split():
        if not word.startswith("--"):
            values[name] = word
            continue
        name = word.removeprefix("--").replace("-", "_")
        if section_of(name) is None:
            name = name.removeprefix("no_")
            values[name] = False
        else:
            values[name] = True
    return values


def predicted_gain(facts: Facts, then: Engine) -> float | None:
    """Return the predicted speed-up of other engine settings."""
    return predicted_speedup(facts.profile, facts.config.engine, then)


def engine_advice(text: str, values: dict[str, Any], speedup: float | None) -> Advice:
    """Return advice to change engine settings."""
    flags = " ".join(f"--{name.replace('_', '-')} {value}" for name, value in values.items())
    return Advice("engine", text, flags, speedup)


def if_worthwhile(advice: Advice) -> tuple[Advice, ...]:
    """Return the advice if its predicted speed-up is worth it."""
    return (advice,) if advice.speedup is not None and advice.speedup >= MIN_SPEEDUP else ()


def speedup_without(share: float) -> float:
    """Return the speed-up if this share of the time were removed."""
    return 1 / max(0.01, 1 - share)


def weight_of_root_cause(share: float) -> float:
    """Return a weight slightly above `share`, so that a root cause ranks above its symptom."""
    return min(1.0, 1.05 * share)
