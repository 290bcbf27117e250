"""Diagnoses a training job: probes, a short training run, then a verdict with advice."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

from unidle.config import Config
from unidle.timeline import LEARN, PHASES
from unidle.tuning.advice.facts import ON_DEVICE, Facts, Table
from unidle.tuning.advice.verdict import Verdict, verdict_on
from unidle.tuning.job import endless
from unidle.tuning.pipeline_model import iteration_seconds
from unidle.tuning.probes.probe_job import probe_job
from unidle.tuning.probes.probe_results import ProbeResults
from unidle.tuning.probes.profile import Profile
from unidle.tuning.short_run import ShortRun, run_for


@dataclass(frozen=True)
class Diagnosis:
    """Measurements of a job and the verdict on it."""

    facts: Facts
    verdict: Verdict
    iterations: int
    """Iterations of the short run."""
    n_steps: int
    """Rollout length of the short run; shorter than the recipe's if iterations are slow."""


def diagnose(config: Config, seconds: float, say: Callable[[str], None]) -> Diagnosis:
    """Probe the job of a validated config, train for `seconds`, and return the verdict; `say` receives progress."""
    say("Measuring environments, inference and learning separately …")
    probed = probe_job(config, seconds / 2)
    short = shortened(endless(config), probed.profile, seconds / 4)
    say(f"Training for about {seconds:.0f} seconds …")
    real = run_for(short, seconds, say)
    times = config.recipe.total_batch / short.recipe.total_batch
    facts = _facts(config, probed, real, times)
    return Diagnosis(facts, verdict_on(facts), real.iterations, short.recipe.n_steps)


def shortened(config: Config, profile: Profile, longest: float) -> Config:
    """Shorten the rollouts until an iteration takes at most `longest` seconds; the batch size stays.

    Collecting and learning shrink alike, so their shares stay the same.
    """
    recipe = config.recipe
    predicted = iteration_seconds(profile, config.engine, recipe.overlap) or 0.0
    assert isinstance(recipe.batch_size, int)
    while predicted > longest and recipe.n_steps % 2 == 0 and recipe.recurrent == "none":
        if recipe.on_policy and (recipe.total_batch // 2) % recipe.batch_size:
            break
        recipe = dataclasses.replace(recipe, n_steps=recipe.n_steps // 2)
        predicted /= 2
    return dataclasses.replace(config, recipe=recipe)


def _on_device(table: Table) -> Table:
    """Rename the learning row if rollouts and learning are a single graph, which the timeline records as learning."""
    idle = {ON_DEVICE if cause == PHASES[LEARN] else cause: share for cause, share in table.idle.items()}
    return dataclasses.replace(table, idle=idle)


def _facts(config: Config, probed: ProbeResults, real: ShortRun, times: float) -> Facts:
    return Facts(
        config=config,
        profile=dataclasses.replace(probed.profile, rest=max(probed.profile.rest, real.between)),
        seconds=times * real.seconds,
        table=_on_device(real.table) if probed.profile.is_single_graph else real.table,
        readings=real.readings,
        steps=probed.steps,
        requests=probed.requests,
        request_counts=real.request_counts,
        to_device=probed.to_device,
        from_device=probed.from_device,
        sent_bytes=probed.sent_bytes,
        replay_on_host=probed.replay_on_host,
        learning_with_replay_on_gpu=probed.learning_with_replay_on_gpu,
        learning_in_tf32=probed.learning_in_tf32,
        slow_fallbacks=tuple(text for text in probed.messages if "which is slower" in text),
    )
