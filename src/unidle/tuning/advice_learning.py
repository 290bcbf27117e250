"""Causes in learning, on the device and on its bus."""

from __future__ import annotations

import dataclasses

from unidle.meter.figures import percent
from unidle.tuning.advice import IN_TRAINING, NOTICEABLE, WORTH, Advice, Finding, gain, if_worth, setting, time, without
from unidle.tuning.facts import Facts

USE_THE_CPU, LEARNER_BOUND = "use the CPU", "learner-bound"
_MUCH_OVERHEAD = 0.5  # of an update: then larger batches are learned from in nearly the same time
_NEARLY_FULL, _FAR_FROM_FULL = 0.9, 0.25
_SLOW_BUS = 6e9  # bytes a second; page-locked memory over PCIe 3 has twice that
_OFTEN = 0.2


def torch_threads(facts: Facts) -> Finding | None:
    """Threads of torch that wait for each other, or for a core: one alone would learn faster."""
    profile, engine = facts.profile, facts.config.engine
    alone = dict(profile.learning_by_threads).get(1)
    faster = _with_one_thread(facts)
    if alone is not None and faster >= WORTH:
        return Finding(
            "too many threads",
            min(1.0, 1.05 * facts.learning),
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
    if recipe.algo == "ppo" and times is not None:
        learning = overhead / times + 1 - overhead
        text = f"minibatches {times} times as large: fewer updates"
        faster = 1 / (1 - facts.learning * (1 - learning))
        advice = if_worth(Advice("recipe", text, f"--batch-size {times * recipe.batch_size}", faster))
    elif recipe.algo != "ppo":
        text = "half as many updates a step, each of a batch twice as large"
        flags = f"--updates-per-step {recipe.updates_per_step / 2:g} --batch-size {2 * recipe.batch_size}"
        advice = if_worth(Advice("recipe", text, flags, 1 / (1 - facts.learning * overhead / 2)))
    return Finding(
        "small pieces",
        facts.learning * overhead,
        f"Learning is {percent(facts.learning)} of the time, in {profile.updates:,.0f} updates of {time(update)}, of "
        f"which {percent(overhead)} would be the same for a batch of any size: a batch of {recipe.batch_size:,} is too "
        "little work.",
        advice,
    )


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
    """Something could not be captured as a graph, or has no kernel here."""
    if not facts.slower_ways:
        return None
    reason = facts.slower_ways[0].rstrip(".")
    return Finding(
        "not captured",
        0.5 * facts.learning if "learning" in reason or "updates" in reason else 0.5 * facts.serving,
        f"The engine takes a slower way than it could: {reason}.",
        (Advice("engine", "mend what that says: CUDA graphs need static shapes and nothing that asks the host"),),
    )


def copies_and_syncs(facts: Facts) -> Finding | None:
    """The GPU waits for copies, or the host for the GPU."""
    waiting = facts.table.share("host→device", "device→host", "sync") if facts.table.of_gpu else 0.0
    slow = facts.to_device is not None and facts.to_device < _SLOW_BUS
    if waiting < NOTICEABLE and not (slow and facts.replay_on_host):
        return None
    advice = [
        Advice(
            "engine",
            "no .item(), .cpu() or print of tensors in callbacks, networks and environments",
            speedup=without(waiting),
            at_most=True,
        )
    ]
    bus = ""
    if slow:
        bus = f"; the bus carries only {(facts.to_device or 0.0) / 1e9:.1f} GB/s"
        advice.append(Advice("engine", "page-locked memory (ulimit -l unlimited), and a PCIe slot with all its lanes"))
    return Finding(
        "copies and syncs",
        waiting,
        f"The GPU waits {percent(waiting)} of the time for copies and for the host to read results{bus}.",
        tuple(advice),
        IN_TRAINING,
    )


def tf32_off(facts: Facts) -> Finding | None:
    """Matrix products in full fp32 leave the tensor cores idle."""
    if not facts.profile.on_gpu or facts.config.recipe.precision != "fp32" or facts.learning < NOTICEABLE:
        return None
    busy = facts.readings.learning_busy
    what = "iterations on the device compute" if facts.profile.is_one_piece else "learning computes"
    computing = facts.learning * (1 - (facts.profile.update_overhead or 0.0) if busy is None else busy)
    return Finding(
        "TF32 off",
        computing / 2,
        f"Matrix products are in fp32, without tensor cores, and {what} {percent(computing)} of the time.",
        (Advice("recipe", "products in TF32, sums in fp32", "--precision tf32", without(computing), at_most=True),),
    )


def buffer_on_the_host(facts: Facts) -> Finding | None:
    """What is remembered lies on the wrong side of the bus."""
    if not facts.replay_on_host:
        return None
    waiting = facts.table.share("host→device") if facts.table.of_gpu else 0.0
    size = facts.config.recipe.buffer_size
    room = "" if facts.readings.gpu_memory is None else f"; its memory is {percent(facts.readings.gpu_memory)} in use"
    return Finding(
        "buffer on the host",
        max(waiting, facts.learning / 2),
        f"The memory of {size:,} steps lies on the host, and every batch is sent to the GPU{room}.",
        (
            Advice("engine", "free the GPU's memory of other programs, if that is what lacks"),
            Advice("recipe", "a memory that fits on the GPU", f"--buffer-size {size // 2}"),
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
    if recipe.algo != "ppo":
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


def learner_bound(facts: Facts) -> Finding | None:
    """What is left is learning that computes."""
    profile, engine = facts.profile, facts.config.engine
    computing = facts.learning * (1 - (profile.update_overhead or 0.0))
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
    if not facts.profile.on_gpu or facts.profile.elsewhere is None:
        return None
    faster = gain(facts, dataclasses.replace(facts.config.engine, device="cpu"))
    if faster is None or faster < WORTH:
        return None
    here, there = facts.profile.pace, facts.profile.elsewhere
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
