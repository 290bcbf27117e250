"""Causes on the GPU and its bus: launches, copies, precision, memory, throttling."""

from __future__ import annotations

import dataclasses

from unidle.buffers.placement import ON_HOST
from unidle.config import OffPolicyRecipe
from unidle.engine.cuda_graphs import EAGERLY
from unidle.formatting import percent, short_time
from unidle.tuning.advice.facts import Facts
from unidle.tuning.advice.finding import (
    IN_TRAINING,
    MIN_SPEEDUP,
    NOTICEABLE,
    Advice,
    Finding,
    predicted_gain,
    speedup_without,
    weight_of_root_cause,
)

_NEARLY_FULL, _MOSTLY_FREE = 0.9, 0.25
_SLOW_BUS = 6e9  # bytes/s; pinned memory over PCIe 3 reaches twice that
_OFTEN = 0.2
_INFERENCE = ("inference", "fused inference", "rollout")  # operations of inference, in messages about fallbacks


def graphs_off(facts: Facts) -> Finding | None:
    """Launch-bound: every kernel is launched from Python."""
    profile, engine = facts.profile, facts.config.engine
    if not profile.on_gpu or engine.graphs or profile.graphed is None:
        return None
    faster = predicted_gain(facts, dataclasses.replace(engine, graphs=True))
    if faster is None or faster < MIN_SPEEDUP:
        return None
    return Finding(
        "small batches",
        1 - 1 / faster,
        f"Kernels are launched one by one from Python: learning takes {short_time(profile.pace.learning)}, but only "
        f"{short_time(profile.graphed.learning)} with CUDA graphs.",
        (Advice("engine", "use CUDA graphs", "--graphs", faster),),
    )


def slow_fallbacks(facts: Facts) -> Finding | None:
    """An operation could not be captured as a CUDA graph or has no kernel here.

    It explains launch overhead that would otherwise be attributed to small batches or few environments.
    """
    fallbacks = [text.rstrip(".") for text in facts.slow_fallbacks if not (facts.replay_on_host and ON_HOST in text)]
    if not fallbacks:
        return None
    lost: dict[bool, float] = {}  # by whether it is in inference
    for text in fallbacks:
        of_inference = text.lower().startswith(_INFERENCE)
        lost[of_inference] = max(lost.get(of_inference, 0.0), _lost_share(facts, text))
    total = min(0.95, sum(lost.values()))
    return Finding(
        "not captured",
        weight_of_root_cause(total),
        f"The engine uses a slower implementation: {max(fallbacks, key=lambda text: _lost_share(facts, text))}.",
        (
            Advice(
                "engine",
                "fix this: CUDA graphs need static shapes and no host synchronisation",
                speedup=speedup_without(total),
                at_most=True,
            ),
        ),
    )


def _lost_share(facts: Facts, text: str) -> float:
    """Return an upper bound on the share of an iteration that a fallback costs."""
    overhead = facts.profile.update_overhead
    launches = facts.learning * (0.5 if overhead is None else overhead)
    share = facts.inference_and_sync - facts.copying if text.lower().startswith(_INFERENCE) else launches
    return share if EAGERLY in text else share / 2


def copies_and_syncs(facts: Facts) -> Finding | None:
    """The GPU waits for copies or synchronisation."""
    waiting = facts.table.share("host→device", "device→host", "sync") if facts.table.of_gpu else 0.0
    slow = facts.to_device is not None and facts.to_device < _SLOW_BUS
    if max(waiting, facts.copying) < NOTICEABLE and not (slow and facts.replay_on_host):
        return None
    bus, by_bus = "", tuple[Advice, ...]()
    if slow:
        bus = f"; the bus transfers only {(facts.to_device or 0.0) / 1e9:.1f} GB/s"
        text = "pinned memory (ulimit -l unlimited) and a PCIe slot with all lanes"
        by_bus = (Advice("engine", text),)
    if facts.copying > waiting:
        smaller = "smaller observations: fewer pixels, uint8 instead of float"
        return Finding(
            "copies and syncs",
            facts.copying,
            f"Copying observations to the GPU takes {percent(facts.copying)} of the time, "
            f"{facts.sent_bytes / 1e6:,.0f} MB per inference call{bus}.",
            (Advice("recipe", smaller, speedup=speedup_without(facts.copying), at_most=True), *by_bus),
        )
    text = "avoid .item(), .cpu() and printing tensors in callbacks, networks and environments"
    return Finding(
        "copies and syncs",
        waiting,
        f"The GPU waits {percent(waiting)} of the time for copies and synchronisation with the host{bus}.",
        (Advice("engine", text, speedup=speedup_without(waiting), at_most=True), *by_bus),
        IN_TRAINING,
    )


def tf32_off(facts: Facts) -> Finding | None:
    """Matrix products in fp32 do not use tensor cores."""
    if not facts.profile.on_gpu or facts.config.recipe.precision != "fp32" or facts.learning < NOTICEABLE:
        return None
    if facts.learning_in_tf32 is not None:
        return _tf32_tried(facts, facts.learning_in_tf32)
    busy = facts.readings.learning_busy
    what = "iterations on the device take" if facts.profile.is_single_graph else "learning takes"
    computing = facts.computing if busy is None else facts.learning * busy
    return Finding(
        "TF32 off",
        computing / 2,
        f"Matrix products use fp32 without tensor cores, and {what} {percent(computing)} of the time.",
        (
            Advice(
                "recipe", "TF32 products with fp32 sums", "--precision tf32", speedup_without(computing), at_most=True
            ),
        ),
    )


def _tf32_tried(facts: Facts, learning: float) -> Finding | None:
    """Return the finding if TF32 was measured."""
    faster = speedup_without(facts.saved_by_tf32)
    if faster < MIN_SPEEDUP:
        return None
    # With a replay buffer on the host, the GPU may wait for batches, so the gain can be smaller.
    where = " from a replay buffer on the GPU" if facts.replay_on_host else ""
    return Finding(
        "TF32 off",
        facts.saved_by_tf32,
        f"Matrix products use fp32 without tensor cores: learning{where} takes {short_time(facts.learning_in_fp32)}, "
        f"but {short_time(learning)} in TF32.",
        (Advice("recipe", "TF32 products with fp32 sums", "--precision tf32", faster, facts.replay_on_host),),
    )


def buffer_on_the_host(facts: Facts) -> Finding | None:
    """The replay buffer is on the host although the networks are on a GPU."""
    if not facts.replay_on_host:
        return None
    waiting = facts.table.share("host→device") if facts.table.of_gpu else 0.0
    on_gpu, measured, faster = facts.learning_with_replay_on_gpu, "", None
    if on_gpu is not None:
        measured = (
            f": learning takes {short_time(facts.profile.pace.learning)}, but {short_time(on_gpu)} with the buffer on "
            "the GPU"
        )
        faster = speedup_without(facts.saved_by_replay_on_gpu)
    size = vars(facts.config.recipe)["buffer_size"]
    room = "" if facts.readings.gpu_memory is None else f"; its memory is {percent(facts.readings.gpu_memory)} in use"
    return Finding(
        "buffer on the host",
        max(waiting, facts.saved_by_replay_on_gpu),
        f"The replay buffer of {size:,} steps is on the host, and every batch is copied to the GPU{measured}{room}.",
        (
            Advice(
                "engine",
                "free GPU memory used by other programs",
                speedup=faster,
                at_most=faster is not None,
            ),
            Advice(
                "recipe",
                "a replay buffer that fits on the GPU",
                f"--buffer-size {size // 2}",
                faster,
                faster is not None,
            ),
        ),
    )


def memory(facts: Facts) -> Finding | None:
    """Memory is nearly full, or mostly free on an idle GPU."""
    gpu, host = facts.readings.gpu_memory, facts.readings.host_memory
    for name, share in (("GPU", gpu), ("host", host)):
        if share is not None and share > _NEARLY_FULL:
            return Finding(
                "memory nearly full",
                0.0,
                f"The {name} memory is {percent(share)} in use; the run may soon fail for lack of memory.",
                (Advice("recipe", "fewer environments or a smaller replay buffer", _less_memory(facts)),),
                IN_TRAINING,
            )
    idle = 1 - facts.table.busy
    if gpu is not None and gpu < _MOSTLY_FREE and facts.table.of_gpu and idle > 0.5:
        return Finding(
            "room for more",
            0.0,
            f"The GPU is idle {percent(idle)} of the time, and {percent(1 - gpu)} of its memory is free.",
            (Advice("engine", "a second run at the same time, with another --seed and half of the cores each"),),
            IN_TRAINING,
        )
    return None


def _less_memory(facts: Facts) -> str:
    """Return flags for a job that needs less memory; empty if minibatches would not divide its rollouts."""
    recipe = facts.config.recipe
    if isinstance(recipe, OffPolicyRecipe):
        return f"--buffer-size {recipe.buffer_size // 2}"
    assert isinstance(recipe.batch_size, int)
    for n_envs in (3 * recipe.n_envs // 4, recipe.n_envs // 2):
        if n_envs and n_envs * recipe.n_steps % recipe.batch_size == 0:
            return f"--n-envs {n_envs}"
    return ""


def throttled(facts: Facts) -> Finding | None:
    """The GPU's clocks are throttled."""
    often = {reason: share for reason, share in facts.readings.throttled.items() if share >= _OFTEN}
    if not often:
        return None
    reason = max(often, key=lambda key: often[key])
    remedy = "a higher power limit (nvidia-smi -pl), if it was lowered" if "power" in reason else "better GPU cooling"
    return Finding(
        "throttled",
        facts.table.busy * often[reason] / 4,
        f"The GPU is throttled {percent(often[reason])} of the time ({reason}).",
        (Advice("engine", remedy),),
        IN_TRAINING,
    )
