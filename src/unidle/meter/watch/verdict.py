"""One sentence that says why the GPU idles, or what a program without one spends its time on, and one next step."""

from __future__ import annotations

from dataclasses import dataclass

from unidle.meter.formatting import percent
from unidle.meter.watch.findings import Findings, Row, Workers
from unidle.meter.watch.stacks import (
    COPIES,
    DATA,
    ENVIRONMENT,
    INFERENCE,
    LEARNING,
    LOGGING,
    NETWORK,
    OWN,
    START,
    WAITING,
)

_SMALL_KERNEL_US = 8.0  # it takes about as long to launch as to run
_COMPUTES = 0.35  # a row with more than this share inside calls that last is computing, not calling
_FULL = 0.9  # a GPU that computes for this share of the time has nothing to gain by waiting less
_TALKS = 0.5  # of the time in environments: a main process that computes for more, with workers that step for less
_HARDLY = 0.1  # of that time: workers that step for less are not what is waited for
_TOO_SHORT_S = 2.0
_MODEL = (INFERENCE, LEARNING, NETWORK)
_ONE = (LEARNING, NETWORK)


@dataclass(frozen=True)
class Verdict:
    """What was found."""

    cause: str
    """In two or three words, for programs: one of CAUSES."""
    sentence: str
    next_step: str


CAUSES = (
    "environment computes",
    "environment waits",
    "messages to workers",
    "cores taken",
    "too many threads",
    "small pieces",
    "compute-bound",
    "copies and syncs",
    "data loading",
    "logging",
    "own code",
    "waiting",
    "start-up",
    "no samples",
)


def judge(findings: Findings) -> Verdict:
    """The largest cause, with its evidence."""
    rows = [row for row in findings.rows if row.activity != START and row.activity in findings.idle]
    if findings.leader is None:
        return Verdict(
            "no samples",
            f"{_head(findings)} no Python process of the command could be sampled.",
            "Run it with a Python that reads PYTHONPATH: not with -I, -E or -S.",
        )
    after_start = sum(row.share for row in rows)
    is_short = not rows or after_start * findings.seconds < _TOO_SHORT_S / 2
    if is_short and findings.leader.failure is not None:
        return Verdict(
            "no samples",
            f"{_head(findings)} the sampler in the main process failed before there was much to see.",
            "Watch it again, without --windows if you had it; the note below says what failed.",
        )
    if is_short:
        return Verdict(
            "start-up",
            f"{_head(findings)} the command ended before it had done much more than start.",
            "Watch it for longer: a minute of training tells more than its first seconds.",
        )
    computes = max(1 - _idle(findings), findings.in_use or 0.0)
    if findings.busy is not None and computes >= _FULL:
        return Verdict(
            "compute-bound",
            f"The GPU computes {percent(computes)} of the time: it is the GPU that the program waits for.",
            "Nothing to gain by waiting less; only less work or faster kernels (TF32, bf16, compile) shorten it.",
        )
    if _has_too_many_threads(findings):
        return Verdict(
            "too many threads",
            f"{_head(findings)} {findings.native_threads} native threads share {findings.cores} cores, and "
            f"threads that want a core wait {percent(findings.queued)} of the time for one.",
            "Set OMP_NUM_THREADS=1 (and MKL_NUM_THREADS, OPENBLAS_NUM_THREADS) before the command starts.",
        )
    top = largest_row(findings)
    assert top is not None
    if _has_lost_its_cores(top, findings):
        return Verdict(
            "cores taken",
            f"{_head(findings)} other programs use {findings.others_cores:.1f} of {findings.cores} cores, and threads "
            f"that want a core wait {percent(findings.queued)} of the time for one.",
            "End what else runs on this machine and watch the command again: what it did now says little about it.",
        )
    return _of(top, findings)


def largest_row(findings: Findings) -> Row | None:
    """That with most of the idle time, or of all time without a GPU; the program's start and end left out."""
    rows = (row for row in findings.rows if row.activity != START and row.activity in findings.idle)
    return max(rows, key=lambda row: (_weight(row, findings), findings.idle[row.activity]), default=None)


def _weight(row: Row, findings: Findings) -> float:
    """Idle time of an activity; a pass through the network in a program's own loop and its learning are one."""
    activities = _ONE if row.activity in _ONE else (row.activity,)
    return sum(findings.idle.get(activity, 0.0) for activity in activities)


def _of(row: Row, findings: Findings) -> Verdict:
    if row.activity == ENVIRONMENT:
        return _environment(row, findings)
    if row.activity in _MODEL or (row.activity == OWN and (row.active or 0.0) > _COMPUTES):
        return _model(row, findings)
    where = _said(row, findings)
    sentence = f"{_head(findings)} {where}."
    if row.activity == COPIES:
        return Verdict(
            "copies and syncs",
            sentence,
            "Keep results on the GPU and read them once per iteration, from pinned memory, without .item() in a loop.",
        )
    if row.activity == DATA:
        return Verdict("data loading", sentence, "Give the loader more workers, or keep the data in memory.")
    if row.activity == LOGGING:
        return Verdict("logging", sentence, "Log and save less often.")
    if row.activity == WAITING or row.on_core + row.queued < 0.3:
        return Verdict("waiting", sentence, f"Find out what `{row.where}` waits for, and do that at the same time.")
    return Verdict("own code", sentence, f"Profile `{row.where}`: it is Python code that torch has no part in.")


def _environment(row: Row, findings: Findings) -> Verdict:
    workers = findings.workers
    busy = row.on_core + row.queued
    if workers is None:
        sentence = f"{_head(findings)} {_said(row, findings)}, in the main process itself."
        if busy < 0.5:
            return Verdict(
                "environment waits",
                sentence.replace("itself.", "itself, which waits there and computes nothing."),
                "Have many episodes in flight at once: an asynchronous environment, or worker processes.",
            )
        return Verdict(
            "environment computes", sentence, "Step the environments in worker processes, one for each core."
        )
    sentence = (
        f"{_head(findings)} {_said(row, findings)} while {workers.count} worker "
        f"{'process' if workers.count == 1 else 'processes'} used {workers.cores:.1f} of {findings.cores} cores"
    )
    inside = f", {percent(workers.stepping)} of their time in `{workers.where}`" if workers.where else ""
    # A main process that waits for steps wants no core, or its workers step all the while.
    stepping = workers.stepping * _known(findings) / max(1e-9, row.share)
    is_talking = busy > _TALKS and stepping < _TALKS
    if is_talking or stepping < _HARDLY or not _steps_mostly(workers):
        rest = "the main process itself computes, on messages to them" if is_talking else "more of it in messages"
        return Verdict(
            "messages to workers",
            f"{sentence}, {percent(workers.stepping)} of their time in the environment: {rest}.",
            "Step several environments in each worker, over shared memory: `unidle.ProcessVectorEnv` does.",
        )
    if workers.stepping_busy < 0.5:
        what = "for the network" if workers.is_network else "and computed nothing"
        return Verdict(
            "environment waits",
            f"{sentence}{inside}, where they waited {what}.",
            "Have more environments in flight at once than there are cores: they wait, so they cost no core.",
        )
    full = workers.cores > 0.75 * findings.cores
    return Verdict(
        "environment computes",
        f"{sentence}{inside}.",
        "All cores are in use: make the step cheaper (native code, the GPU), or step several environments per worker."
        if full
        else "Use more worker processes, and step them while the GPU works on another group.",
    )


def _steps_mostly(workers: Workers) -> bool:
    """Whether what the workers do, when they do anything, is to step environments."""
    return workers.stepping > 0.5 * workers.working


def _model(row: Row, findings: Findings) -> Verdict:
    sentence = f"{_head(findings)} {_said(row, findings)}"
    if findings.busy is not None:
        kernel = findings.computing.kernel_us if findings.computing else None
        is_small = kernel is not None and kernel < _SMALL_KERNEL_US
        return Verdict(
            "small pieces",
            f"{sentence}, in pieces too small to be worth their launch: a kernel takes {kernel:.0f} µs on average."
            if is_small
            else f"{sentence}: the GPU waits for launches between its kernels.",
            "Use larger minibatches or more environments, or capture the step (CUDA graph, torch.compile).",
        )
    if row.active is not None and row.active < _COMPUTES:
        return Verdict(
            "small pieces",
            f"{sentence}, in pieces too small to be worth their call: {percent(1 - row.active)} of it is Python and "
            "calls shorter than 0.2 ms.",
            "Use larger minibatches or more environments, or compile the step (torch.compile).",
        )
    return Verdict(
        "compute-bound",
        f"{sentence}: the program is bound by what it computes there.",
        "Nothing to gain by waiting less; a GPU, more threads for torch, or a smaller network shorten it.",
    )


def _has_lost_its_cores(row: Row, findings: Findings) -> bool:
    others = findings.others_cores or 0.0
    return others > 0.5 * findings.cores and findings.queued > 0.5 and row.queued > 0.3


def _has_too_many_threads(findings: Findings) -> bool:
    return findings.native_threads > 4 * findings.cores and findings.native_share > 0.2 and findings.queued > 0.2


def _known(findings: Findings) -> float:
    """Share of time that is left without the program's start and end, and without what is unattributed."""
    idle = sum(share for activity, share in findings.idle.items() if activity != START)
    return max(1e-9, (findings.busy or 0.0) + idle)


def _idle(findings: Findings) -> float:
    """Share of that time in which the GPU was idle."""
    return min(1.0, max(0.0, 1 - (findings.busy or 0.0) / _known(findings)))


def _head(findings: Findings) -> str:
    return "No GPU in use:" if findings.busy is None else f"GPU idle {percent(_idle(findings))}:"


def _said(row: Row, findings: Findings) -> str:
    """How much of the idle time, or of all time without a GPU, the row took, and where; start and end left out."""
    share = _weight(row, findings) / _known(findings)
    what = "of the main process's time"
    if findings.busy is not None:
        share, what = share / max(1e-9, _idle(findings)), "of that"
    name = "" if row.activity == OWN else f" ({row.activity})"
    return f"{percent(min(1.0, share))} {what} in `{row.where}`{name}"
