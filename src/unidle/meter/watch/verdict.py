"""The verdict on a watched command: why the GPU idles, or where the time goes without one, and one next step."""

from __future__ import annotations

from dataclasses import dataclass, replace

from unidle.formatting import percent
from unidle.meter.watch.findings import Findings, Row, Workers
from unidle.meter.watch.places import Place
from unidle.meter.watch.stacks import (
    CHECKPOINTS,
    COPIES,
    DATA,
    ENVIRONMENT,
    EVALUATION,
    INFERENCE,
    LEARNING,
    LOGGING,
    METRICS,
    NETWORK,
    OWN,
    START,
    STORAGE,
    WAITING,
    WORKERS,
)

_SMALL_KERNEL_US = 8.0  # launching such a kernel takes about as long as running it
_COMPUTES = 0.35  # share in long calls above which an activity is compute-bound, not overhead
_GPU_BOUND = 0.9  # GPU busy share above which less waiting gains nothing
_MESSAGES_SHARE = 0.5  # of environment time: messages dominate if the main process computes more and workers step less
_MIN_STEPPING = 0.1  # workers that step for less of that time are not the bottleneck
_LACKS_CORES = 0.3  # share of time waiting for a core above which an activity would be faster without other programs
_NEARLY_ALL = 0.8  # share of an activity's time from which its function is named instead of it
_TOO_SHORT_S = 2.0
_MODEL = (INFERENCE, LEARNING, NETWORK)
_COUNTED_TOGETHER = ((LEARNING, NETWORK), (ENVIRONMENT, WORKERS))
_DIAGNOSE = "`unidle diagnose` with the settings of this run ranks changes by predicted speed-up."
# The next step if unidle trains, by activity and cause.
_FOR_STEPS = {
    "environment computes": "Raise --workers while cores are free, or use --overlap strict;",
    "environment waits": "Raise --workers, up to four per core, and --n-envs: while they wait they need no core;",
    "messages to workers": "Use fewer --workers, or raise --n-envs;",
}
_WITH_UNIDLE = {
    ENVIRONMENT: _FOR_STEPS,
    WORKERS: _FOR_STEPS,
    INFERENCE: {
        "small batches": "Raise --n-envs, so that each inference serves more environments;",
        "compute-bound": "Use more --threads, a GPU or a smaller network;",
        "too many threads": "Use fewer --threads;",
    },
    LEARNING: {
        "small batches": "Raise --batch-size, which changes the recipe;",
        "compute-bound": "Use more --threads, a GPU or a smaller network;",
        "too many threads": "Use fewer --threads;",
    },
    STORAGE: {"storage": "Raise --n-envs, so that each step stores more transitions at once;"},
}
_INTERRUPTIONS = {
    EVALUATION: ("evaluations", "Evaluate less often (--eval-every), in fewer episodes, or with more --eval-workers."),
    CHECKPOINTS: ("checkpoints", "Save less often (--checkpoint-every)."),
    METRICS: ("logging", "Make iterations longer (--n-steps or --n-envs), or use --no-tensorboard."),
}


@dataclass(frozen=True)
class Verdict:
    """The main cause, in one sentence, and what to do about it."""

    cause: str
    """One of CAUSES, for programs."""
    sentence: str
    next_step: str
    also: tuple[Verdict, ...] = ()
    """Further causes: what the program itself waits for while other programs take its cores."""


CAUSES = (
    "environment computes",
    "environment waits",
    "messages to workers",
    "CPU contention",
    "too many threads",
    "small batches",
    "compute-bound",
    "copies and syncs",
    "data loading",
    "evaluations",
    "checkpoints",
    "logging",
    "storage",
    "user code",
    "waiting",
    "start-up",
    "no samples",
)


def verdict_on(findings: Findings) -> Verdict:
    """Return the largest cause with its evidence."""
    rows = [row for row in findings.rows if row.activity != START and row.activity in findings.idle]
    if findings.leader is None:
        return Verdict(
            "no samples",
            f"{_head(findings)} no Python process of the command could be sampled.",
            "Run Python without -I, -E and -S, so that it reads PYTHONPATH.",
        )
    after_start = sum(row.share for row in rows)
    is_short = not rows or after_start * findings.seconds < _TOO_SHORT_S / 2
    if is_short and findings.leader.failure is not None:
        return Verdict(
            "no samples",
            f"{_head(findings)} the sampler in the main process failed early.",
            "Run `unidle watch` again, without --windows if you used it; the note below has the error.",
        )
    if is_short:
        return Verdict(
            "start-up",
            f"{_head(findings)} the command ended soon after start-up.",
            "Watch a longer run, for example a minute of training.",
        )
    computes = max(1 - _idle(findings), findings.in_use or 0.0)
    if findings.busy is not None and computes >= _GPU_BOUND:
        return Verdict(
            "compute-bound",
            f"The GPU computes {percent(computes)} of the time: the program is GPU-bound.",
            "There is no idle time to remove; only less work or faster kernels (TF32, bf16, torch.compile) would help.",
        )
    top = largest_row(findings)
    assert top is not None
    found = [_verdict_for(top, findings)]
    if _is_contended(findings):
        contention = Verdict(
            "CPU contention",
            f"{_head(findings)} other programs use {findings.others_cores:.1f} of {findings.cores} cores, and runnable "
            f"threads spend {percent(findings.queued)} of their time waiting for one.",
            "Stop the other programs, or watch the command again without them.",
        )
        found.insert(0 if top.queued > _LACKS_CORES else 1, contention)
    if _has_too_many_threads(findings) and found[0].cause != "too many threads":
        threads = Verdict(
            "too many threads",
            f"{_head(findings)} {findings.native_threads} native threads share {findings.cores} cores, and runnable "
            f"threads spend {percent(findings.queued)} of their time waiting for one.",
            "Set OMP_NUM_THREADS=1 (and MKL_NUM_THREADS, OPENBLAS_NUM_THREADS) before the command starts.",
        )
        found.insert(0, threads)
    first, *others = found
    head = f"{_head(findings)} "
    return replace(first, also=tuple(replace(v, sentence=v.sentence.removeprefix(head)) for v in others))


def largest_row(findings: Findings) -> Row | None:
    """Return the row with the most idle time, or the most time without a GPU; start-up and exit excluded."""
    rows = (row for row in findings.rows if row.activity != START and row.activity in findings.idle)
    return max(rows, key=lambda row: (_weight(row, findings), findings.idle[row.activity]), default=None)


def _weight(row: Row, findings: Findings) -> float:
    """Return the idle time of an activity; learning and forward passes in the user's own loop count together."""
    activities = next((group for group in _COUNTED_TOGETHER if row.activity in group), (row.activity,))
    return sum(findings.idle.get(activity, 0.0) for activity in activities)


def _verdict_for(row: Row, findings: Findings) -> Verdict:
    found = _verdict_for_any_program(row, findings)
    advice = _WITH_UNIDLE.get(row.activity, {}).get(found.cause)
    if advice is None or findings.leader is None or not findings.leader.phase_seconds:
        return found
    return replace(found, next_step=f"{advice} {_DIAGNOSE}")


def _verdict_for_any_program(row: Row, findings: Findings) -> Verdict:
    if row.activity in (ENVIRONMENT, WORKERS):
        return _environment(row, findings)
    if row.activity in _MODEL or (row.activity == OWN and (row.active or 0.0) > _COMPUTES):
        return _model(row, findings)
    where = _share_text(row, findings)
    sentence = f"{_head(findings)} {where}."
    if row.activity in _INTERRUPTIONS:
        return Verdict(_INTERRUPTIONS[row.activity][0], sentence, _INTERRUPTIONS[row.activity][1])
    if row.activity == STORAGE:
        return Verdict("storage", sentence, _DIAGNOSE)
    if row.activity == COPIES:
        return Verdict(
            "copies and syncs",
            sentence,
            "Keep results on the GPU and copy them once per iteration through pinned memory; avoid .item() in loops.",
        )
    if row.activity == DATA:
        return Verdict("data loading", sentence, "Give the data loader more workers, or keep the data in memory.")
    if row.activity == LOGGING:
        return Verdict("logging", sentence, "Log and save less often.")
    name = "the program" if row.place is None else f"`{row.place.function}`"
    if row.activity == WAITING or row.on_core + row.queued < 0.3:
        return Verdict("waiting", sentence, f"Find out what {name} waits for, and do other work meanwhile.")
    return Verdict("user code", sentence, f"Profile {name}: it is your own Python code, not torch.")


def _environment(row: Row, findings: Findings) -> Verdict:
    workers = findings.workers
    busy = row.on_core + row.queued
    if workers is None:
        sentence = f"{_head(findings)} {_share_text(row, findings)}, in the main process itself."
        if busy < 0.5:
            return Verdict(
                "environment waits",
                sentence.replace("itself.", "itself, which mostly waits there."),
                "Run many episodes concurrently: with an asynchronous environment or with worker processes.",
            )
        return Verdict("environment computes", sentence, "Step the environments in worker processes, one per core.")
    sentence = (
        f"{_head(findings)} {_share_text(row, findings)} while {workers.count} worker "
        f"{'process' if workers.count == 1 else 'processes'} used {workers.cores:.1f} of {findings.cores} cores"
    )
    inside = f", {percent(workers.stepping)} of their time in {_place_text(workers.place)}" if workers.place else ""
    # If the main process waits for steps, it needs no core, or its workers step all the time.
    stepping = workers.stepping * _measured_share(findings) / max(1e-9, row.share)
    is_messaging = busy > _MESSAGES_SHARE and stepping < _MESSAGES_SHARE
    if is_messaging or stepping < _MIN_STEPPING or not _mostly_step(workers):
        rest = "the main process is busy with messages to them" if is_messaging else "messages take more of it"
        return Verdict(
            "messages to workers",
            f"{sentence}, {percent(workers.stepping)} of their time in the environment: {rest}.",
            "Step several environments in each worker through shared memory, as `unidle.ProcessVectorEnv` does.",
        )
    if workers.stepping_busy < 0.5:
        what = "for the network" if workers.is_network else "without computing"
        return Verdict(
            "environment waits",
            f"{sentence}{inside}, where they waited {what}.",
            "Run more environments than cores concurrently: while they wait they need no core.",
        )
    full = workers.cores > 0.75 * findings.cores
    return Verdict(
        "environment computes",
        f"{sentence}{inside}.",
        "All cores are in use: make steps cheaper (native code or the GPU), or step several environments per worker."
        if full
        else "Use more worker processes, and step one group of environments while the GPU works on another.",
    )


def _mostly_step(workers: Workers) -> bool:
    """Whether workers spend most of their working time in environment steps."""
    return workers.stepping > 0.5 * workers.working


def _model(row: Row, findings: Findings) -> Verdict:
    sentence = f"{_head(findings)} {_share_text(row, findings)}"
    if findings.busy is not None:
        kernel = findings.kernel_activity.kernel_us if findings.kernel_activity else None
        is_small = kernel is not None and kernel < _SMALL_KERNEL_US
        return Verdict(
            "small batches",
            f"{sentence}, in kernels so short that launching them dominates: {kernel:.0f} µs on average."
            if is_small
            else f"{sentence}: the GPU waits for kernel launches.",
            "Use larger minibatches or more environments, or a CUDA graph or torch.compile.",
        )
    threads = findings.leader.torch_threads if findings.leader else None
    if threads is not None and threads > findings.cores:
        return Verdict(
            "too many threads",
            f"{sentence}, with {threads} threads of torch on {findings.cores} cores: they wait for each other.",
            f"Call torch.set_num_threads({findings.cores}), or set OMP_NUM_THREADS={findings.cores}; try 1 for small "
            "networks.",
        )
    if row.active is not None and row.active < _COMPUTES:
        return Verdict(
            "small batches",
            f"{sentence}, and {percent(1 - row.active)} of it is overhead: Python and calls shorter than 0.2 ms.",
            "Use larger minibatches or more environments, or torch.compile.",
        )
    more = "a GPU" if threads == findings.cores else "a GPU, more torch threads"
    return Verdict(
        "compute-bound",
        f"{sentence}: the program is compute-bound.",
        f"There is no waiting to remove; {more} or a smaller network would help.",
    )


def _is_contended(findings: Findings) -> bool:
    return (findings.others_cores or 0.0) > 0.5 * findings.cores and findings.queued > 0.5


def _has_too_many_threads(findings: Findings) -> bool:
    return findings.native_threads > 4 * findings.cores and findings.native_share > 0.2 and findings.queued > 0.2


def _measured_share(findings: Findings) -> float:
    """Return the share of time without start-up, exit and unattributed time."""
    idle = sum(share for activity, share in findings.idle.items() if activity != START)
    return max(1e-9, (findings.busy or 0.0) + idle)


def _idle(findings: Findings) -> float:
    """Return the share of `_measured_share` time in which the GPU was idle."""
    return min(1.0, max(0.0, 1 - (findings.busy or 0.0) / _measured_share(findings)))


def _head(findings: Findings) -> str:
    return "No GPU in use:" if findings.busy is None else f"GPU idle {percent(_idle(findings))}:"


def _share_text(row: Row, findings: Findings) -> str:
    """Return the row's share of idle time (without a GPU: of all time) and its function; start-up and exit excluded."""
    share = _weight(row, findings) / _measured_share(findings)
    what = "of the main process's time"
    if findings.busy is not None:
        share, what = share / max(1e-9, _idle(findings)), "of that"
    return f"{percent(min(1.0, share))} {what} {_activity_text(row.activity, row.place)}"


def _activity_text(activity: str, place: Place | None) -> str:
    """Return where a row's time was spent: in `Game.step` (environment, game.py:12)."""
    if place is None:
        return WORKERS if activity == WORKERS else f"in {_with_article(activity)}"
    about = f"{activity}, {place.source}" if place.source else activity
    if place.share >= _NEARLY_ALL:
        return f"in `{place.function}` ({about})"
    return f"in {_with_article(activity)}, most often in {_place_text(place)}"


def _with_article(activity: str) -> str:
    return f"the {activity}" if activity in (ENVIRONMENT, NETWORK) else activity


def _place_text(place: Place) -> str:
    return f"`{place.function}` ({place.source})" if place.source else f"`{place.function}`"
