"""Causes in learning itself, and beside it."""

from __future__ import annotations

import dataclasses

from unidle.meter.formatting import percent
from unidle.tuning.advice.facts import Facts
from unidle.tuning.advice.finding import (
    IN_TRAINING,
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

USE_THE_CPU, LEARNER_BOUND = "use the CPU", "learner-bound"
_MUCH_OVERHEAD = 0.5  # of an update: then larger batches are learned from in nearly the same time


def torch_threads(facts: Facts) -> Finding | None:
    """Threads of torch that wait for each other, or for a core: one alone would learn faster."""
    profile, engine = facts.profile, facts.config.engine
    alone = dict(profile.learning_by_threads).get(1)
    faster = _with_one_thread(facts)
    if alone is not None and faster >= WORTH:
        return Finding(
            "too many threads",
            explaining(facts.learning),
            f"Learning takes {time(profile.pace.learning)} with {engine.threads} threads, and {time(alone)} with one: "
            "they wait for each other, or for cores that others use.",
            (setting("one thread for learning", {"threads": 1}, faster),),
        )
    if engine.threads > profile.cores and not profile.on_gpu:
        return Finding(
            "too many threads",
            facts.learning,
            f"There are {engine.threads} threads of torch for {profile.cores} cores.",
            (setting("no more threads than cores", {"threads": profile.cores}, None),),
        )
    return None


def _with_one_thread(facts: Facts) -> float:
    """The predicted speed-up; 1 where there is but one, or nothing tells."""
    return gain(facts, dataclasses.replace(facts.config.engine, threads=1)) or 1.0


def small_pieces(facts: Facts) -> Finding | None:
    """Tiny minibatches, or a launch-bound learner: an update's time hardly depends on what is in it."""
    profile, recipe = facts.profile, facts.config.recipe
    overhead = profile.update_overhead
    if overhead is None or overhead < _MUCH_OVERHEAD or facts.learning < NOTICEABLE:
        return None
    if _with_one_thread(facts) >= WORTH:  # then what an update takes whatever is in it is the threads' doing
        return None
    assert isinstance(recipe.batch_size, int)
    update = profile.pace.learning / profile.updates
    advice: tuple[Advice, ...] = ()
    times = next((n for n in (4, 2) if recipe.total_batch % (n * recipe.batch_size) == 0), None)
    if recipe.on_policy and times is not None:
        learning = overhead / times + 1 - overhead
        text = f"minibatches {times} times as large: fewer updates"
        faster = 1 / (1 - facts.learning * (1 - learning))
        advice = if_worth(Advice("recipe", text, f"--batch-size {times * recipe.batch_size}", faster))
    elif not recipe.on_policy:
        text = "half as many updates a step, each of a batch twice as large"
        flags = f"--utd-ratio {recipe.utd_ratio / 2:g} --batch-size {2 * recipe.batch_size}"
        advice = if_worth(Advice("recipe", text, flags, 1 / (1 - facts.learning * overhead / 2)))
    return Finding(
        "small pieces",
        facts.learning * overhead,
        f"Learning is {percent(facts.learning)} of the time, in {profile.updates:,.0f} updates of {time(update)}, of "
        f"which {percent(overhead)} would be the same for a batch of any size: a batch of {recipe.batch_size:,} is too "
        "little work.",
        advice,
    )


def learner_bound(facts: Facts) -> Finding | None:
    """What is left is learning that computes."""
    profile, engine = facts.profile, facts.config.engine
    computing = facts.computing - facts.saved_by_tf32
    if computing < 2 * NOTICEABLE or profile.is_one_piece:
        return None
    found: list[Advice] = []
    for threads in (n for n, _ in profile.learning_by_threads if n > engine.threads):
        more = dataclasses.replace(engine, threads=threads)
        found += if_worth(setting("more threads for learning", {"threads": threads}, gain(facts, more)))
    if not profile.on_gpu and profile.elsewhere is not None:
        there = dataclasses.replace(engine, device="cuda")
        found += if_worth(setting("learn on the GPU", {"device": "cuda"}, gain(facts, there)))
    found += _coarser(facts, computing)
    where = "The GPU" if profile.on_gpu else "The CPU"
    return Finding(
        LEARNER_BOUND,
        computing,
        f"{where} learns for {percent(facts.learning)} of the time, and {percent(computing)} is work that the batch "
        "itself makes.",
        tuple(found),
    )


def device_bound(facts: Facts) -> Finding | None:
    """Whole iterations run on the device, and nobody can tell their steps from their learning."""
    if not facts.profile.is_one_piece or facts.learning < 2 * NOTICEABLE:
        return None
    compiled = Advice("engine", "compiled steps: fewer kernels each", "--compile")
    return Finding(
        LEARNER_BOUND if facts.config.engine.compile else "iterations on the device",
        facts.learning,
        f"Iterations on the device, each of them stepping and learning in one piece, are {percent(facts.learning)} of "
        "the time.",
        (*(() if facts.config.engine.compile else (compiled,)), *_coarser(facts, facts.learning)),
    )


def _coarser(facts: Facts, computing: float) -> tuple[Advice, ...]:
    """Numbers of half the size, if that is still to be had."""
    if not facts.profile.on_gpu or facts.config.recipe.precision != "tf32":
        return ()
    return (Advice("recipe", "products in bfloat16", "--precision bf16", without(computing / 2), at_most=True),)


def use_the_cpu(facts: Facts) -> Finding | None:
    """A small network on few environments: each way to the GPU and back takes longer than the work."""
    here, there = facts.profile.pace, facts.profile.elsewhere
    if not facts.profile.on_gpu or there is None:
        return None
    if there.inference >= here.inference and there.learning >= here.learning:
        return None  # it would be the environments that step otherwise
    engine = facts.config.engine
    faster = gain(facts, dataclasses.replace(engine, device="cpu"))
    if faster is None or faster < max(WORTH, gain(facts, dataclasses.replace(engine, graphs=True)) or 0.0):
        return None
    return Finding(
        USE_THE_CPU,
        1.0,
        f"Use the CPU: acting takes {time(there.inference)} there and {time(here.inference)} by way of the GPU, and "
        f"learning {time(there.learning)} and {time(here.learning)}.",
        (setting("no way to the GPU and back", {"device": "cpu"}, faster),),
    )


def upkeep(facts: Facts) -> Finding | None:
    """Neither collecting nor learning: records and logging."""
    share = facts.profile.rest / facts.whole
    if share < 2 * NOTICEABLE:
        return None
    flags = "--no-tensorboard" if facts.config.run.tensorboard else ""
    return Finding(
        "logging",
        share,
        f"{percent(share)} of the time goes to what lies between two iterations: records and logging.",
        (Advice("engine", "longer iterations or fewer records", flags, without(share), at_most=True),),
        IN_TRAINING,
    )
