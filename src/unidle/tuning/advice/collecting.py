"""Causes in collecting: environments, their workers, and inference for them."""

from __future__ import annotations

import dataclasses
import math

from unidle.config import Recipe
from unidle.meter.formatting import percent
from unidle.tuning.advice.facts import Facts
from unidle.tuning.advice.finding import (
    NOTICEABLE,
    WORTH,
    Advice,
    Finding,
    explaining,
    gain,
    if_worth,
    setting,
    time,
    without,
)
from unidle.tuning.job import MOST_WORKERS_PER_CORE
from unidle.tuning.pipeline_model import overlap_speedup, predicted_speedup

_FEW_ENVS = 4  # per core: with fewer, workers spend their time on hand-overs
_THREADED = 0.2  # of an environment's CPU time: so much of it in threads beside its own


def environment_waits(facts: Facts) -> Finding | None:
    """I/O-bound: steps wait for something instead of computing."""
    profile = facts.profile
    if facts.stepping < NOTICEABLE or profile.on_device or not profile.waits or facts.requests:
        return None
    evidence = f"a step takes {time(profile.step_seconds)}, {percent(profile.on_core)} of it on a core"
    return Finding(
        "environment waits",
        facts.stepping,
        f"Environments wait rather than compute for {percent(facts.stepping)} of the time: {evidence}.",
        (
            *_more_workers(
                facts,
                min(profile.n_envs, MOST_WORKERS_PER_CORE * profile.cores),
                "more workers, whose environments wait side by side",
            ),
            Advice(
                "engine",
                "an asynchronous environment: hundreds of episodes wait on one core (docs/io-bound.md)",
                speedup=without(facts.stepping),
                at_most=True,
            ),
        ),
    )


def slow_target(facts: Facts) -> Finding | None:
    """Environments ask a server, and it takes its time."""
    if not facts.requests or facts.stepping < NOTICEABLE or facts.steps is None:
        return None
    steps = facts.steps
    bad = {kind: n for kind, n in facts.request_counts.items() if kind not in ("ok", "cached") and n}
    trouble = f"; {', '.join(f'{n} × {kind}' for kind, n in bad.items())}" if bad else ""
    return Finding(
        "slow target",
        facts.stepping,
        f"The server that environments ask answers half of the requests within {time(steps.median)} and 95 % within "
        f"{time(steps.p95)}{trouble}; waiting for it is {percent(facts.stepping)} of the time.",
        (
            Advice(
                "recipe",
                "more episodes in flight, as far as the server's rate limits allow",
                f"--n-envs {2 * facts.profile.n_envs}",
            ),
        ),
    )


def environment_computes(facts: Facts) -> Finding | None:
    """Env-bound: the cores that step are the bottleneck."""
    profile = facts.profile
    if facts.stepping < NOTICEABLE or profile.waits:
        return None
    if profile.on_device:
        flags, text = "--compile", "compiled steps: fewer kernels each"
        compiled = facts.config.engine.compile
        own = () if compiled else (Advice("engine", text, flags, without(facts.stepping), at_most=True),)
        return Finding(
            "environment computes",
            facts.stepping,
            f"Stepping on the device is {percent(facts.stepping)} of the time.",
            own,
        )
    workers = profile.stepping[0].workers
    by = f"{workers} worker{'s' * (workers > 1)}" if workers else "the trainer's own process"
    rate = profile.steps / profile.stepping[0].seconds
    return Finding(
        "environment computes",
        facts.stepping,
        f"Environments compute for {percent(facts.stepping)} of the time: {by} can do {rate:,.0f} steps/s on "
        f"{profile.cores} cores, were there nothing else to do.",
        (
            *_more_workers(facts, min(profile.n_envs, profile.cores), "all cores step"),
            Advice(
                "engine",
                "a cheaper step: native code (docs/vector-environments.md), or an environment on the device "
                "(docs/device-environments.md)",
                speedup=without(facts.stepping),
                at_most=True,
            ),
        ),
    )


def too_many_threads(facts: Facts) -> Finding | None:
    """More threads of environments want a core than there are cores."""
    profile, engine = facts.profile, facts.config.engine
    workers = profile.stepping[0].workers if profile.stepping else 0
    steps = facts.steps
    in_all = steps.threads * max(1, workers) if steps is not None else 0
    if steps is not None and steps.native > _THREADED and in_all > profile.cores and facts.stepping >= NOTICEABLE:
        return Finding(
            "too many threads",
            explaining(facts.stepping),
            f"Environments compute for {percent(facts.stepping)} of the time with {steps.threads} threads each, "
            f"{in_all} in all, on {profile.cores} cores.",
            (
                Advice(
                    "engine",
                    "one thread in each environment (torch.set_num_threads(1), cv2.setNumThreads(1), … in it)",
                ),
            ),
        )
    if not profile.waits and workers > profile.cores:
        fewer = dataclasses.replace(engine, workers=profile.cores)
        return Finding(
            "too many threads",
            explaining(facts.stepping),
            f"{workers} workers share {profile.cores} cores, and their steps compute.",
            (setting("a core for each worker", {"workers": profile.cores}, gain(facts, fewer)),),
        )
    return None


def too_few_envs(facts: Facts) -> Finding | None:
    """Every step of all environments costs a hand-over and an inference: few of them share it."""
    profile, recipe = facts.profile, facts.config.recipe
    few = profile.n_envs < _FEW_ENVS * profile.cores
    # Twice as many environments send twice as much; and what a graph saves is not for the environments to save.
    shared = facts.serving - facts.copying - facts.launching
    if profile.on_device or not few or shared < 2 * NOTICEABLE:
        return None
    wanted = _FEW_ENVS * profile.cores
    times = wanted / profile.n_envs
    speedup = 1 / (1 - shared * (1 - 1 / times))
    steps = _whole_steps(recipe.n_steps / times, wanted, recipe)
    return Finding(
        "too few environments",
        shared,
        f"Each inference and hand-over is for {profile.n_envs} environment{'s' * (profile.n_envs > 1)} only, and they "
        f"take {percent(shared)} of the time.",
        (
            Advice(
                "recipe",
                "more environments, each for fewer steps: about the same batch",
                f"--n-envs {wanted} --n-steps {steps}",
                speedup,
            ),
        ),
    )


def _whole_steps(steps: float, n_envs: int, recipe: Recipe) -> int:
    """Nearly so many steps of so many environments, which minibatches divide."""
    unit = 1
    if recipe.on_policy:
        assert isinstance(recipe.batch_size, int)
        unit = recipe.batch_size // math.gcd(n_envs, recipe.batch_size)
    return unit * max(1, round(steps / unit))


def inference_bound(facts: Facts) -> Finding | None:
    """There are environments enough, and inference for them still takes the time."""
    profile, engine = facts.profile, facts.config.engine
    computing = facts.serving - facts.copying - facts.launching
    if profile.n_envs < _FEW_ENVS * profile.cores or computing < 2 * NOTICEABLE:
        return None
    options = [dataclasses.replace(engine, slices=slices) for slices in (1, 2, 4)]
    best = max(options, key=lambda option: predicted_speedup(profile, engine, option) or 0.0)
    return Finding(
        "inference",
        computing,
        f"Inference for {profile.n_envs} environments and its hand-overs take {percent(computing)} of the time; "
        f"one inference takes {time(profile.pace.inference)}.",
        if_worth(setting("other slices", {"slices": best.slices}, gain(facts, best))),
    )


def no_overlap(facts: Facts) -> Finding | None:
    """Environments stand still while something is learned, and the other way round."""
    if facts.profile.overlap == "strict" or facts.profile.on_device:
        return None
    speedup = overlap_speedup(facts.profile, facts.config.engine)
    if speedup is None or speedup < WORTH:
        return None
    text = "collect while learning, with weights one update old"
    return Finding(
        "taking turns",
        min(facts.learning, facts.stepping + facts.serving) / 2,
        f"Collecting and learning take turns, {percent(facts.stepping + facts.serving)} and {percent(facts.learning)} "
        "of the time.",
        (Advice("recipe", text, "--overlap strict", speedup),),
    )


def _more_workers(facts: Facts, workers: int, why: str) -> tuple[Advice, ...]:
    if facts.profile.fixed_workers or workers <= facts.profile.stepping[0].workers:
        return ()
    engine = dataclasses.replace(facts.config.engine, workers=workers)
    return if_worth(setting(why, {"workers": workers}, gain(facts, engine)))
