"""Causes on the device and on its bus: launches, copies, precision, memory, throttling."""

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
    time,
    without,
)

_NEARLY_FULL, _FAR_FROM_FULL = 0.9, 0.25
_SLOW_BUS = 6e9  # bytes a second; page-locked memory over PCIe 3 has twice that
_OFTEN = 0.2
# How the engine says that something takes a slower way.
_INFERENCE, _EAGER, _OF_THE_MEMORY = ("inference", "fused inference", "rollout"), "runs eagerly", "lies on the host"


def graphs_off(facts: Facts) -> Finding | None:
    """Launch-bound: each kernel is launched from Python."""
    profile, engine = facts.profile, facts.config.engine
    if not profile.on_gpu or engine.graphs or profile.graphed is None:
        return None
    faster = gain(facts, dataclasses.replace(engine, graphs=True))
    if faster is None or faster < WORTH:
        return None
    return Finding(
        "small pieces",
        1 - 1 / faster,
        f"Kernels are launched one by one from Python: learning takes {time(profile.pace.learning)}, and "
        f"{time(profile.graphed.learning)} as CUDA graphs.",
        (Advice("engine", "replay CUDA graphs", "--graphs", faster),),
    )


def slower_ways(facts: Facts) -> Finding | None:
    """Something could not be captured as a graph, or has no kernel here.

    What runs eagerly explains its launches, which would else be laid to small batches or to few environments.
    """
    ways = [text.rstrip(".") for text in facts.slower_ways if not (facts.replay_on_host and _OF_THE_MEMORY in text)]
    if not ways:
        return None
    lost: dict[bool, float] = {}  # by whether it is in inference
    for text in ways:
        of_inference = text.startswith(_INFERENCE)
        lost[of_inference] = max(lost.get(of_inference, 0.0), _lost(facts, text))
    all_of_it = min(0.95, sum(lost.values()))
    return Finding(
        "not captured",
        explaining(all_of_it),
        f"The engine takes a slower way than it could: {max(ways, key=lambda text: _lost(facts, text))}.",
        (
            Advice(
                "engine",
                "mend what that says: CUDA graphs need static shapes and nothing that asks the host",
                speedup=without(all_of_it),
                at_most=True,
            ),
        ),
    )


def _lost(facts: Facts, text: str) -> float:
    """Share of an iteration that a slower way takes more, at most."""
    overhead = facts.profile.update_overhead
    launches = facts.learning * (0.5 if overhead is None else overhead)
    share = facts.serving - facts.copying if text.startswith(_INFERENCE) else launches
    return share if _EAGER in text else share / 2


def copies_and_syncs(facts: Facts) -> Finding | None:
    """The GPU waits for copies, or the host for the GPU."""
    waiting = facts.table.share("host→device", "device→host", "sync") if facts.table.of_gpu else 0.0
    slow = facts.to_device is not None and facts.to_device < _SLOW_BUS
    if max(waiting, facts.copying) < NOTICEABLE and not (slow and facts.replay_on_host):
        return None
    bus, by_bus = "", tuple[Advice, ...]()
    if slow:
        bus = f"; the bus carries only {(facts.to_device or 0.0) / 1e9:.1f} GB/s"
        text = "page-locked memory (ulimit -l unlimited), and a PCIe slot with all its lanes"
        by_bus = (Advice("engine", text),)
    if facts.copying > waiting:
        smaller = "smaller observations: fewer pixels, bytes instead of floats"
        return Finding(
            "copies and syncs",
            facts.copying,
            f"Observations are on their way to the GPU for {percent(facts.copying)} of the time, "
            f"{facts.sent_bytes / 1e6:,.0f} MB for each inference{bus}.",
            (Advice("recipe", smaller, speedup=without(facts.copying), at_most=True), *by_bus),
        )
    text = "no .item(), .cpu() or print of tensors in callbacks, networks and environments"
    return Finding(
        "copies and syncs",
        waiting,
        f"The GPU waits {percent(waiting)} of the time for copies and for the host to read results{bus}.",
        (Advice("engine", text, speedup=without(waiting), at_most=True), *by_bus),
        IN_TRAINING,
    )


def tf32_off(facts: Facts) -> Finding | None:
    """Matrix products in full fp32 leave the tensor cores idle."""
    if not facts.profile.on_gpu or facts.config.recipe.precision != "fp32" or facts.learning < NOTICEABLE:
        return None
    if facts.learning_in_tf32 is not None:
        return _tf32_tried(facts, facts.learning_in_tf32)
    busy = facts.readings.learning_busy
    what = "iterations on the device compute" if facts.profile.is_one_piece else "learning computes"
    computing = facts.computing if busy is None else facts.learning * busy
    return Finding(
        "TF32 off",
        computing / 2,
        f"Matrix products are in fp32, without tensor cores, and {what} {percent(computing)} of the time.",
        (Advice("recipe", "products in TF32, sums in fp32", "--precision tf32", without(computing), at_most=True),),
    )


def _tf32_tried(facts: Facts, learning: float) -> Finding | None:
    """The same where it was tried."""
    faster = without(facts.saved_by_tf32)
    if faster < WORTH:
        return None
    # The host draws batches while the GPU learns, so where it is waited for, less is gained than is computed less.
    where = " from a memory on the GPU" if facts.replay_on_host else ""
    return Finding(
        "TF32 off",
        facts.saved_by_tf32,
        f"Matrix products are in fp32, without tensor cores: learning{where} takes {time(facts.learning_in_fp32)}, and "
        f"{time(learning)} in TF32.",
        (Advice("recipe", "products in TF32, sums in fp32", "--precision tf32", faster, facts.replay_on_host),),
    )


def buffer_on_the_host(facts: Facts) -> Finding | None:
    """What is remembered lies on the wrong side of the bus."""
    if not facts.replay_on_host:
        return None
    waiting = facts.table.share("host→device") if facts.table.of_gpu else 0.0
    beside, tried, faster = facts.learning_with_memory_on_gpu, "", None
    if beside is not None:
        tried = f": learning takes {time(facts.profile.pace.learning)}, and {time(beside)} from a memory there"
        faster = without(facts.saved_by_memory_on_gpu)
    size = facts.config.recipe.buffer_size
    room = "" if facts.readings.gpu_memory is None else f"; its memory is {percent(facts.readings.gpu_memory)} in use"
    return Finding(
        "buffer on the host",
        max(waiting, facts.saved_by_memory_on_gpu),
        f"The memory of {size:,} steps lies on the host, and every batch is sent to the GPU{tried}{room}.",
        (
            Advice(
                "engine",
                "free the GPU's memory of other programs, if that is what lacks",
                speedup=faster,
                at_most=faster is not None,
            ),
            Advice("recipe", "a memory that fits on the GPU", f"--buffer-size {size // 2}", faster, faster is not None),
        ),
    )


def memory(facts: Facts) -> Finding | None:
    """Nearly full, or far from it."""
    gpu, host = facts.readings.gpu_memory, facts.readings.host_memory
    for name, share in (("GPU", gpu), ("host", host)):
        if share is not None and share > _NEARLY_FULL:
            return Finding(
                "memory nearly full",
                0.0,
                f"The memory of the {name} is {percent(share)} in use: a little more, and the run ends.",
                (Advice("recipe", "less to keep: fewer environments, or a smaller memory of steps", _less(facts)),),
                IN_TRAINING,
            )
    idle = 1 - facts.table.busy
    if gpu is not None and gpu < _FAR_FROM_FULL and facts.table.of_gpu and idle > 0.5:
        return Finding(
            "room for more",
            0.0,
            f"The GPU is idle {percent(idle)} of the time, and {percent(1 - gpu)} of its memory is free.",
            (Advice("engine", "a second run beside this one, with another --seed and half of the cores for each"),),
            IN_TRAINING,
        )
    return None


def _less(facts: Facts) -> str:
    """Flags for a job that keeps less; none where minibatches would not divide it."""
    recipe = facts.config.recipe
    if not recipe.on_policy:
        return f"--buffer-size {recipe.buffer_size // 2}"
    assert isinstance(recipe.batch_size, int)
    for n_envs in (3 * recipe.n_envs // 4, recipe.n_envs // 2):
        if n_envs and n_envs * recipe.n_steps % recipe.batch_size == 0:
            return f"--n-envs {n_envs}"
    return ""


def throttled(facts: Facts) -> Finding | None:
    """The GPU is slower than it could be, whatever the program does."""
    often = {reason: share for reason, share in facts.readings.throttled.items() if share >= _OFTEN}
    if not often:
        return None
    reason = max(often, key=lambda key: often[key])
    cure = (
        "a higher power limit (nvidia-smi -pl), if it was lowered" if "power" in reason else "better cooling of the GPU"
    )
    return Finding(
        "throttled",
        facts.table.busy * often[reason] / 4,
        f"The GPU is slowed down by {reason} {percent(often[reason])} of the time.",
        (Advice("engine", cure),),
        IN_TRAINING,
    )
