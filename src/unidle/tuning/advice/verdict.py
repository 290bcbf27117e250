"""Runs all checks and picks the verdict: one sentence and ranked advice."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from unidle.formatting import percent
from unidle.tuning.advice import collecting, device, learning
from unidle.tuning.advice.facts import Facts
from unidle.tuning.advice.finding import BY_PROBES, MIN_SPEEDUP, Advice, Finding, ranked, with_valid_flags

NO_FASTER_SETTINGS = "no faster settings"
CHECKS: tuple[Callable[[Facts], Finding | None], ...] = (
    learning.use_the_cpu,
    collecting.too_many_threads,
    collecting.environment_waits,
    collecting.slow_server,
    collecting.environment_computes,
    collecting.too_few_envs,
    collecting.inference_bound,
    collecting.no_overlap,
    learning.torch_threads,
    learning.small_batches,
    device.graphs_off,
    device.slow_fallbacks,
    device.copies_and_syncs,
    device.tf32_off,
    device.buffer_on_the_host,
    device.memory,
    device.throttled,
    learning.learner_bound,
    learning.device_bound,
    learning.logging_overhead,
)


@dataclass(frozen=True)
class Verdict:
    """The main cause of a slow run, all findings, and ranked advice."""

    cause: str
    sentence: str
    basis: str
    """Source of the sentence's numbers: by probes or in training."""
    findings: Sequence[Finding]
    """All causes, largest first."""
    engine: Sequence[Advice]
    """Advice that does not change learning, most promising first."""
    recipe: Sequence[Advice]
    """Advice that changes learning."""


def verdict_on(facts: Facts) -> Verdict:
    """Return the largest cause, or `NO_FASTER_SETTINGS` if that is learning and no engine setting would help."""
    found = [_with_valid_advice(finding, facts) for check in CHECKS if (finding := check(facts)) is not None]
    found.sort(key=lambda finding: -finding.weight)
    engine, recipe = ranked(found, "engine"), ranked(found, "recipe")
    top = found[0] if found else None
    helps = any(a.flags and a.speedup is not None and not a.at_most and a.speedup >= MIN_SPEEDUP for a in engine)
    if top is None or (top.cause == learning.LEARNER_BOUND and not helps):
        share = percent(facts.learning)
        reason = f"learning takes {share} of the time"
        if facts.profile.is_single_graph:
            reason = f"iterations on the device take {share} of the time"
        return Verdict(
            NO_FASTER_SETTINGS,
            f"No engine setting would make this job faster: {reason}.",
            BY_PROBES,
            found,
            engine,
            recipe,
        )
    return Verdict(top.cause, top.sentence, top.basis, found, engine, recipe)


def _with_valid_advice(finding: Finding, facts: Facts) -> Finding:
    taken = (with_valid_flags(advice, facts.config) for advice in finding.advice)
    return replace(finding, advice=tuple(advice for advice in taken if advice is not None))
