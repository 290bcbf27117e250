"""Causes in learning and between iterations."""

from __future__ import annotations

import dataclasses

from unidle.config import OffPolicyRecipe
from unidle.formatting import percent, short_time
from unidle.tuning.advice.facts import Facts
from unidle.tuning.advice.finding import (
    IN_TRAINING,
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

USE_THE_CPU, LEARNER_BOUND = "use the CPU", "learner-bound"
_MUCH_OVERHEAD = 0.5  # share of an update; then larger batches take nearly the same time


def torch_threads(facts: Facts) -> Finding | None:
    """Threads of torch wait for each other or for cores; a single thread would learn faster."""
    profile, engine = facts.profile, facts.config.engine
    alone = dict(profile.learning_by_threads).get(1)
    faster = _with_one_thread(facts)
    if alone is not None and faster >= MIN_SPEEDUP:
        return Finding(
            "too many threads",
            weight_of_root_cause(facts.learning),
            f"Learning takes {short_time(profile.pace.learning)} with {engine.threads} threads, but "
            f"{short_time(alone)} with one: the threads wait for each other or for cores in use by others.",
            (engine_advice("one thread for learning", {"threads": 1}, faster),),
        )
    if engine.threads > profile.cores and not profile.on_gpu:
        return Finding(
            "too many threads",
            facts.learning,
            f"PyTorch uses {engine.threads} threads on {profile.cores} cores.",
            (engine_advice("at most one thread per core", {"threads": profile.cores}, None),),
        )
    return None


def _with_one_thread(facts: Facts) -> float:
    """Return the predicted speed-up of a single thread; 1 if unknown."""
    return predicted_gain(facts, dataclasses.replace(facts.config.engine, threads=1)) or 1.0


def small_batches(facts: Facts) -> Finding | None:
    """Small minibatches: the time of an update hardly depends on the batch size."""
    profile, recipe = facts.profile, facts.config.recipe
    overhead = profile.update_overhead
    if overhead is None or overhead < _MUCH_OVERHEAD or facts.learning < NOTICEABLE:
        return None
    if _with_one_thread(facts) >= MIN_SPEEDUP:  # the overhead comes from the threads
        return None
    assert isinstance(recipe.batch_size, int)
    update = profile.pace.learning / profile.updates
    advice: tuple[Advice, ...] = ()
    times = next((n for n in (4, 2) if recipe.total_batch % (n * recipe.batch_size) == 0), None)
    if recipe.on_policy and times is not None:
        learning = overhead / times + 1 - overhead
        text = f"{times} times larger minibatches, so fewer updates"
        faster = 1 / (1 - facts.learning * (1 - learning))
        advice = if_worthwhile(Advice("recipe", text, f"--batch-size {times * recipe.batch_size}", faster))
    elif isinstance(recipe, OffPolicyRecipe):
        text = "half as many updates per step, with twice the batch size"
        flags = f"--utd-ratio {recipe.utd_ratio / 2:g} --batch-size {2 * recipe.batch_size}"
        advice = if_worthwhile(Advice("recipe", text, flags, 1 / (1 - facts.learning * overhead / 2)))
    return Finding(
        "small batches",
        facts.learning * overhead,
        f"Learning takes {percent(facts.learning)} of the time, in {profile.updates:,.0f} updates of "
        f"{short_time(update)}, and {percent(overhead)} of that does not depend on the batch size: a batch of "
        f"{recipe.batch_size:,} is too small.",
        advice,
    )


def learner_bound(facts: Facts) -> Finding | None:
    """Learning is compute-bound."""
    profile, engine = facts.profile, facts.config.engine
    computing = facts.computing - facts.saved_by_tf32
    if computing < 2 * NOTICEABLE or profile.is_single_graph:
        return None
    found: list[Advice] = []
    for threads in (n for n, _ in profile.learning_by_threads if n > engine.threads):
        more = dataclasses.replace(engine, threads=threads)
        found += if_worthwhile(
            engine_advice("more threads for learning", {"threads": threads}, predicted_gain(facts, more))
        )
    if not profile.on_gpu and profile.other_device is not None:
        there = dataclasses.replace(engine, device="cuda")
        found += if_worthwhile(engine_advice("learn on the GPU", {"device": "cuda"}, predicted_gain(facts, there)))
    found += _lower_precision(facts, computing)
    where = "The GPU" if profile.on_gpu else "The CPU"
    return Finding(
        LEARNER_BOUND,
        computing,
        f"{where} spends {percent(facts.learning)} of the time learning, and {percent(computing)} is actual computing "
        "rather than overhead.",
        tuple(found),
    )


def device_bound(facts: Facts) -> Finding | None:
    """Whole iterations run on the device as a single graph."""
    if not facts.profile.is_single_graph or facts.learning < 2 * NOTICEABLE:
        return None
    compiled = Advice("engine", "compile the step into fewer kernels", "--compile")
    return Finding(
        LEARNER_BOUND if facts.config.engine.compile else "iterations on the device",
        facts.learning,
        f"Iterations on the device, which step and learn in one graph, take {percent(facts.learning)} of the time.",
        (*(() if facts.config.engine.compile else (compiled,)), *_lower_precision(facts, facts.learning)),
    )


def _lower_precision(facts: Facts, computing: float) -> tuple[Advice, ...]:
    """Return advice to use bfloat16, if the job uses TF32 on a GPU."""
    if not facts.profile.on_gpu or facts.config.recipe.precision != "tf32":
        return ()
    return (Advice("recipe", "bfloat16 products", "--precision bf16", speedup_without(computing / 2), at_most=True),)


def use_the_cpu(facts: Facts) -> Finding | None:
    """A small network and few environments: transfers to and from the GPU cost more than they save."""
    here, there = facts.profile.pace, facts.profile.other_device
    if not facts.profile.on_gpu or there is None:
        return None
    if there.inference >= here.inference and there.learning >= here.learning:
        return None  # the gain would come from stepping differently
    engine = facts.config.engine
    faster = predicted_gain(facts, dataclasses.replace(engine, device="cpu"))
    if faster is None or faster < max(
        MIN_SPEEDUP, predicted_gain(facts, dataclasses.replace(engine, graphs=True)) or 0.0
    ):
        return None
    return Finding(
        USE_THE_CPU,
        1.0,
        f"The CPU is faster for this job: inference takes {short_time(there.inference)} on the CPU and "
        f"{short_time(here.inference)} on the GPU, learning {short_time(there.learning)} and "
        f"{short_time(here.learning)}.",
        (engine_advice("no copies to the GPU and back", {"device": "cpu"}, faster),),
    )


def logging_overhead(facts: Facts) -> Finding | None:
    """Metrics and logging between iterations take long."""
    share = facts.profile.rest / facts.modelled_seconds
    if share < 2 * NOTICEABLE:
        return None
    flags = "--no-tensorboard" if facts.config.run.tensorboard else ""
    return Finding(
        "logging",
        share,
        f"{percent(share)} of the time is spent between iterations, on metrics and logging.",
        (Advice("engine", "longer iterations or less logging", flags, speedup_without(share), at_most=True),),
        IN_TRAINING,
    )
