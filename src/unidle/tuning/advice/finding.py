"""What a finding is, and how advice is worded and ranked.

A finding is one cause of a slow run. Its *weight* is the share of the run's time that it takes; the largest one is the
verdict. Its advice is of two kinds. *engine*: what is learned stays the same (settings of the engine, a cheaper
environment, the machine). *recipe*: what is learned changes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

from unidle.config import Config, Engine
from unidle.config.settings import section_of
from unidle.tuning.advice.facts import Facts
from unidle.tuning.job import is_sound
from unidle.tuning.pipeline_model import predicted_speedup

WORTH = 1.1  # a predicted speed-up below this is within what predictions err
BY_PROBES, IN_TRAINING = "by probes", "in training"  # what a finding rests on
NOTICEABLE = 0.05  # a share of time below this is not worth a finding


@dataclass(frozen=True)
class Advice:
    """One thing to change."""

    kind: Literal["engine", "recipe"]
    text: str
    flags: str = ""
    """For `unidle train`; empty where it is nothing that a setting does."""
    speedup: float | None = None
    """Predicted; None where nothing tells."""
    at_most: bool = False
    """The prediction is a bound: what it would be if the cause were gone altogether."""


@dataclass(frozen=True)
class Finding:
    """One cause."""

    cause: str
    weight: float
    """Share of the run's time."""
    sentence: str
    advice: tuple[Advice, ...] = ()
    basis: str = BY_PROBES
    """Where its figures are from: each part by itself, or the real run."""


def ranked(findings: list[Finding], kind: str) -> list[Advice]:
    """The advice of one kind: predictions, the most promising first, then bounds, then what cannot be predicted."""
    found = {(a.text, a.flags): a for finding in findings for a in finding.advice if a.kind == kind}
    return sorted(found.values(), key=lambda a: (a.speedup is None, a.at_most, -(a.speedup or 0.0)))


def as_taken(advice: Advice, config: Config) -> Advice | None:
    """The advice as `unidle train` takes it for this job; None where it would refuse its flags."""
    if not advice.flags:
        return advice
    for more in ("", " --allow-recipe-change"):  # without which some presets keep their numbers
        flags = advice.flags + more
        if is_sound(config.with_values(_values(flags), "advice")):
            return replace(advice, flags=flags)
    return None


def _values(flags: str) -> dict[str, Any]:
    """`--n-envs 8 --no-tensorboard` as settings."""
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


def gain(facts: Facts, then: Engine) -> float | None:
    """The predicted speed-up by other engine settings."""
    return predicted_speedup(facts.profile, facts.config.engine, then)


def setting(text: str, values: dict[str, Any], speedup: float | None) -> Advice:
    """An engine setting to change."""
    flags = " ".join(f"--{name.replace('_', '-')} {value}" for name, value in values.items())
    return Advice("engine", text, flags, speedup)


def if_worth(advice: Advice) -> tuple[Advice, ...]:
    """The advice, if it promises enough."""
    return (advice,) if advice.speedup is not None and advice.speedup >= WORTH else ()


def without(share: float) -> float:
    """The speed-up if this share of the time were gone."""
    return 1 / max(0.01, 1 - share)


def explaining(share: float) -> float:
    """The weight of a cause that takes this share of the time and explains another finding of the same share.

    A little more than that: a verdict names the reason, not what it looks like.
    """
    return min(1.0, 1.05 * share)


def time(seconds: float) -> str:
    """48 µs, 1.2 ms, 3.4 s"""
    if seconds >= 1:
        return f"{seconds:.1f} s"
    return f"{1e3 * seconds:.1f} ms" if seconds >= 1e-3 else f"{1e6 * seconds:.0f} µs"
