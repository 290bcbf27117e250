"""Why a training job is as slow as it is, and what would change it: probes, a short real run, then advice."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

from unidle.config import Config
from unidle.timeline import LEARN, PHASES
from unidle.tuning.advice.facts import ON_DEVICE, Facts, Table
from unidle.tuning.advice.verdict import Verdict, judge
from unidle.tuning.diagnose_run import RealRun, run_for
from unidle.tuning.job import endless
from unidle.tuning.pipeline_model import iteration_seconds
from unidle.tuning.probes.job_probes import probe_job
from unidle.tuning.probes.profile import Profile
from unidle.tuning.probes.results import Probed


@dataclass(frozen=True)
class Diagnosis:
    """What was measured, and what follows from it."""

    facts: Facts
    verdict: Verdict
    iterations: int
    """Of the real run."""
    n_steps: int
    """Of its rollouts, which are shorter than the recipe's where an iteration takes long."""


def diagnose(config: Config, seconds: float, say: Callable[[str], None]) -> Diagnosis:
    """Probe the job that a validated config says, train for so many seconds, and judge; `say` hears what goes on."""
    say("Probing environments, inference and learning, each by itself …")
    probed = probe_job(config, seconds / 2)
    short = shortened(endless(config), probed.profile, seconds / 4)
    say(f"Training for about {seconds:.0f} seconds …")
    real = run_for(short, seconds, say)
    times = config.recipe.total_batch / short.recipe.total_batch
    facts = _facts(config, probed, real, times)
    return Diagnosis(facts, judge(facts), real.iterations, short.recipe.n_steps)


def shortened(config: Config, profile: Profile, longest: float) -> Config:
    """The job with rollouts short enough that an iteration takes no longer; minibatches stay as large as they are.

    Collecting and learning shrink alike, so that their shares stay.
    """
    recipe = config.recipe
    told = iteration_seconds(profile, config.engine, recipe.overlap) or 0.0
    assert isinstance(recipe.batch_size, int)
    while told > longest and recipe.n_steps % 2 == 0 and recipe.recurrent == "none":
        if recipe.on_policy and (recipe.total_batch // 2) % recipe.batch_size:
            break
        recipe = dataclasses.replace(recipe, n_steps=recipe.n_steps // 2)
        told /= 2
    return dataclasses.replace(config, recipe=recipe)


def _on_device(table: Table) -> Table:
    """The table where rollouts and learning are one piece: it is booked as learning, and is more than that."""
    idle = {ON_DEVICE if cause == PHASES[LEARN] else cause: share for cause, share in table.idle.items()}
    return dataclasses.replace(table, idle=idle)


def _facts(config: Config, probed: Probed, real: RealRun, times: float) -> Facts:
    return Facts(
        config=config,
        profile=dataclasses.replace(probed.profile, rest=max(probed.profile.rest, real.between)),
        seconds=times * real.seconds,
        table=_on_device(real.table) if probed.profile.is_one_piece else real.table,
        readings=real.readings,
        steps=probed.steps,
        requests=probed.requests,
        request_counts=real.request_counts,
        to_device=probed.to_device,
        from_device=probed.from_device,
        sent_bytes=probed.sent_bytes,
        replay_on_host=probed.replay_on_host,
        learning_with_memory_on_gpu=probed.learning_with_memory_on_gpu,
        learning_in_tf32=probed.learning_in_tf32,
        slower_ways=tuple(text for text in probed.messages if "which is slower" in text),
    )
