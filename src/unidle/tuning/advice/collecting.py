"""Causes in collecting: environments, workers and inference."""

from __future__ import annotations

import dataclasses
import math

from unidle.config import Recipe
from unidle.formatting import percent, short_time
from unidle.tuning.advice.facts import Facts
from unidle.tuning.advice.finding import (
    MIN_SPEEDUP,
    NOTICEABLE,
    Advice,
    Finding,
    engine_advice,
    if_worthwhile,
    predicted_gain,
    speedup_without,
    weight_of_root_cause,
)
from unidle.tuning.job import MOST_WORKERS_PER_CORE
from unidle.tuning.pipeline_model import overlap_speedup, predicted_speedup
from unidle.tuning.probes.profile import Profile, SimulatorPace

_FEW_ENVS = 4  # per core; with fewer, synchronisation dominates
_OVERHEAD = 0.2  # smaller shares of a simulator's step are not reported
_THREADED = 0.2  # share of an environment's CPU time outside its main thread


def environment_waits(facts: Facts) -> Finding | None:
    """I/O-bound: steps wait instead of computing."""
    profile = facts.profile
    if facts.stepping < NOTICEABLE or profile.on_device or not profile.waits or facts.requests:
        return None
    evidence = f"a step takes {short_time(profile.step_seconds)}, {percent(profile.on_core)} of it on a core"
    return Finding(
        "environment waits",
        facts.stepping,
        f"Environments take {percent(facts.stepping)} of the time and mostly wait: {evidence}.",
        (
            *_more_workers(
                facts,
                min(profile.n_envs, MOST_WORKERS_PER_CORE * profile.cores),
                "more workers, so that more environments wait concurrently",
            ),
            Advice(
                "engine",
                "an asynchronous environment: hundreds of episodes share one core (docs/io-bound.md)",
                speedup=speedup_without(facts.stepping),
                at_most=True,
            ),
        ),
    )


def slow_server(facts: Facts) -> Finding | None:
    """Environments wait for the responses of a server."""
    if not facts.requests or facts.stepping < NOTICEABLE or facts.steps is None:
        return None
    steps = facts.steps
    failed = {kind: n for kind, n in facts.request_counts.items() if kind not in ("ok", "cached") and n}
    failures = f"; {', '.join(f'{n} × {kind}' for kind, n in failed.items())}" if failed else ""
    return Finding(
        "slow server",
        facts.stepping,
        f"Environments wait for a server {percent(facts.stepping)} of the time: its median response time is "
        f"{short_time(steps.median)}, the 95th percentile {short_time(steps.p95)}{failures}.",
        (
            Advice(
                "recipe",
                "more concurrent episodes, as far as the server's rate limits allow",
                f"--n-envs {2 * facts.profile.n_envs}",
            ),
        ),
    )


def environment_computes(facts: Facts) -> Finding | None:
    """Environment-bound: CPU cores that step environments are the bottleneck."""
    profile = facts.profile
    if facts.stepping < NOTICEABLE or profile.waits:
        return None
    if profile.simulator is not None:
        return _simulator_steps(facts, profile.simulator)
    if profile.on_device:
        flags, text = "--compile", "compile the step into fewer kernels"
        compiled = facts.config.engine.compile
        own = () if compiled else (Advice("engine", text, flags, speedup_without(facts.stepping), at_most=True),)
        return Finding(
            "environment computes",
            facts.stepping,
            f"Stepping environments on the device takes {percent(facts.stepping)} of the time.",
            own,
        )
    workers = profile.stepping[0].workers
    by = f"{workers} worker{'s' * (workers > 1)}" if workers else "the trainer's own process"
    rate = profile.steps / profile.stepping[0].seconds
    return Finding(
        "environment computes",
        facts.stepping,
        f"Stepping environments takes {percent(facts.stepping)} of the time: {by} could reach at most {rate:,.0f} "
        f"steps/s on {profile.cores} cores.",
        (
            *_more_workers(facts, min(profile.n_envs, profile.cores), "step environments on all cores"),
            Advice(
                "engine",
                "a cheaper step: native code (docs/vector-environments.md) or an environment on the device "
                "(docs/device-environments.md)",
                speedup=speedup_without(facts.stepping),
                at_most=True,
            ),
        ),
    )


def _simulator_steps(facts: Facts, simulator: SimulatorPace) -> Finding:
    """A simulator on the device, which runs its own Python in each step."""
    n_envs, overhead = facts.profile.n_envs, simulator.overhead(facts.profile.n_envs)
    evidence = f"one step of all {n_envs:,} takes {short_time(simulator.step)}"
    if simulator.larger is not None:
        evidence += f", of {simulator.larger[0]:,} {short_time(simulator.larger[1])}"
    cause = ""
    if overhead is not None and overhead > _OVERHEAD:
        cause = f", and {percent(overhead)} of that is Python and kernel launches, whatever the number of environments"
    return Finding(
        "environment computes",
        facts.stepping,
        f"Stepping the simulator takes {percent(facts.stepping)} of the time{cause}: {evidence}.",
        (
            *_more_envs(facts, simulator),
            Advice("engine", "a cheaper step of the simulator", speedup=speedup_without(facts.stepping), at_most=True),
        ),
    )


def _beside_simulator(facts: Facts) -> Finding | None:
    """What a rollout does beside the steps of a simulator: it launches kernels from Python too."""
    profile = facts.profile
    if profile.simulator is None or facts.inference_and_sync < 2 * NOTICEABLE:
        return None
    step = max(0.0, profile.collecting / profile.n_steps - profile.simulator.step)
    return Finding(
        "inference",
        facts.inference_and_sync,
        f"Inference and storage take {percent(facts.inference_and_sync)} of the time: {short_time(step)} for each step "
        f"of all {profile.n_envs:,} environments.",
        _more_envs(facts, profile.simulator),
    )


def _more_envs(facts: Facts, simulator: SimulatorPace) -> tuple[Advice, ...]:
    """More environments with fewer steps each: a step of all of them may take hardly longer."""
    if simulator.larger is None:
        return ()
    profile, (wanted, _) = facts.profile, simulator.larger
    steps, speedup = with_more_envs(profile, simulator.larger, facts.config.recipe)
    if speedup < MIN_SPEEDUP:
        return ()
    times = wanted * steps / profile.steps
    batch = "the same batch" if times == 1 else f"a batch {times:.2g} times as large"
    flags = f"--n-envs {wanted} --n-steps {steps}" if simulator.takes_n_envs else ""
    text = f"{wanted // profile.n_envs} times as many environments with {steps} steps each: {batch}"
    if not simulator.takes_n_envs:
        text += f"; create {wanted:,} in your factory, and use --n-steps {steps}"
    return (Advice("recipe", text, flags, speedup),)


def with_more_envs(profile: Profile, larger: tuple[int, float], recipe: Recipe) -> tuple[int, float]:
    """Return the steps and the predicted speed-up with a `larger` simulator and about as many transitions."""
    assert profile.simulator is not None
    wanted, step = larger
    steps = _rounded_steps(profile.n_steps * profile.n_envs / wanted, wanted, recipe)
    times = wanted * steps / profile.steps  # as many transitions per iteration
    collecting = steps * (profile.collecting / profile.n_steps - profile.simulator.step + step)
    now = profile.collecting + profile.pace.learning + profile.rest
    return steps, times * now / (collecting + times * profile.pace.learning + profile.rest)


def too_many_threads(facts: Facts) -> Finding | None:
    """Environments run more threads than there are cores."""
    profile, engine = facts.profile, facts.config.engine
    workers = profile.stepping[0].workers if profile.stepping else 0
    steps = facts.steps
    total_threads = steps.threads * max(1, workers) if steps is not None else 0
    if (
        steps is not None
        and steps.native > _THREADED
        and total_threads > profile.cores
        and facts.stepping >= NOTICEABLE
    ):
        return Finding(
            "too many threads",
            weight_of_root_cause(facts.stepping),
            f"Stepping environments takes {percent(facts.stepping)} of the time, with {steps.threads} threads each, "
            f"{total_threads} in total, on {profile.cores} cores.",
            (
                Advice(
                    "engine",
                    "one thread per environment (call torch.set_num_threads(1), cv2.setNumThreads(1), … in it)",
                ),
            ),
        )
    if not profile.waits and workers > profile.cores:
        fewer = dataclasses.replace(engine, workers=profile.cores)
        return Finding(
            "too many threads",
            weight_of_root_cause(facts.stepping),
            f"{workers} workers with compute-bound steps share {profile.cores} cores.",
            (engine_advice("one worker per core", {"workers": profile.cores}, predicted_gain(facts, fewer)),),
        )
    return None


def too_few_envs(facts: Facts) -> Finding | None:
    """Too few environments share the cost of each inference call and synchronisation."""
    profile, recipe = facts.profile, facts.config.recipe
    few = profile.n_envs < _FEW_ENVS * profile.cores
    # More environments copy more data, and launch overhead is better removed by CUDA graphs.
    shared = facts.inference_and_sync - facts.copying - facts.launching
    if profile.on_device or not few or shared < 2 * NOTICEABLE:
        return None
    wanted = _FEW_ENVS * profile.cores
    times = wanted / profile.n_envs
    speedup = 1 / (1 - shared * (1 - 1 / times))
    steps = _rounded_steps(recipe.n_steps / times, wanted, recipe)
    return Finding(
        "too few environments",
        shared,
        f"Inference and synchronisation take {percent(shared)} of the time but serve only {profile.n_envs} "
        f"environment{'s' * (profile.n_envs > 1)} at a time.",
        (
            Advice(
                "recipe",
                "more environments with fewer steps each: about the same batch",
                f"--n-envs {wanted} --n-steps {steps}",
                speedup,
            ),
        ),
    )


def _rounded_steps(steps: float, n_envs: int, recipe: Recipe) -> int:
    """Round `steps` so that minibatches divide the rollout."""
    unit = 1
    if recipe.on_policy:
        assert isinstance(recipe.batch_size, int)
        unit = recipe.batch_size // math.gcd(n_envs, recipe.batch_size)
    return unit * max(1, round(steps / unit))


def inference_bound(facts: Facts) -> Finding | None:
    """Inference dominates although there are enough environments."""
    profile, engine = facts.profile, facts.config.engine
    if profile.on_device:
        return _beside_simulator(facts)
    computing = facts.inference_and_sync - facts.copying - facts.launching
    if profile.n_envs < _FEW_ENVS * profile.cores or computing < 2 * NOTICEABLE:
        return None
    options = [dataclasses.replace(engine, slices=slices) for slices in (1, 2, 4)]
    best = max(options, key=lambda option: predicted_speedup(profile, engine, option) or 0.0)
    return Finding(
        "inference",
        computing,
        f"Inference and synchronisation for {profile.n_envs} environments take {percent(computing)} of the time; "
        f"one inference call takes {short_time(profile.pace.inference)}.",
        if_worthwhile(engine_advice("another number of slices", {"slices": best.slices}, predicted_gain(facts, best))),
    )


def no_overlap(facts: Facts) -> Finding | None:
    """Environments idle during learning, and vice versa."""
    if facts.profile.overlap == "strict" or facts.profile.on_device:
        return None
    speedup = overlap_speedup(facts.profile, facts.config.engine)
    if speedup is None or speedup < MIN_SPEEDUP:
        return None
    text = "collect while learning, with weights that are one update old"
    return Finding(
        "no overlap",
        min(facts.learning, facts.stepping + facts.inference_and_sync) / 2,
        f"Collecting and learning alternate and take {percent(facts.stepping + facts.inference_and_sync)} and "
        f"{percent(facts.learning)} of the time.",
        (Advice("recipe", text, "--overlap strict", speedup),),
    )


def _more_workers(facts: Facts, workers: int, why: str) -> tuple[Advice, ...]:
    if facts.profile.fixed_workers or workers <= facts.profile.stepping[0].workers:
        return ()
    engine = dataclasses.replace(facts.config.engine, workers=workers)
    return if_worthwhile(engine_advice(why, {"workers": workers}, predicted_gain(facts, engine)))
