"""What `unidle watch` says at the end: a verdict, a table that sums to 100 %, and one next step."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from unidle.meter.formatting import LACKING, figure, percent
from unidle.meter.watch.command import Watched
from unidle.meter.watch.findings import Findings, find
from unidle.meter.watch.verdict import Verdict, judge, largest_row

_DISAGREES = 0.15
_DEEPEST = 6  # functions of a stack that are shown
_SHOWN = ("utilisation", "SM active", "tensor active", "DRAM active", "memory", "power", "temperature")


def concluded(watched: Watched) -> tuple[Findings, Verdict]:
    """What was found about a command that has ended."""
    known = watched.processes, watched.begun_ns, watched.ended_ns, watched.cores
    findings = find(*known, watched.gpu_use, watched.others_cores)
    leader = findings.leader
    if watched.gpu_use is not None and leader is not None and leader.uses_torch and not leader.uses_cuda:
        # There is a GPU, and this program does not use it: what it reads is somebody else's work.
        findings = find(*known, None, watched.others_cores)
    return findings, judge(findings)


def lines(watched: Watched, findings: Findings, verdict: Verdict) -> Iterator[str]:
    """The report for a terminal."""
    yield f"unidle watched for {watched.seconds:.0f} s: {' '.join(watched.command)}"
    yield ""
    yield verdict.sentence
    yield f"Next: {verdict.next_step}"
    yield ""
    yield from _table(findings)
    yield from _stack(findings)
    yield ""
    yield from _readings(watched)
    yield from _remarks(findings)


def _table(findings: Findings) -> Iterator[str]:
    has_gpu = findings.busy is not None
    # Where nothing tells how active the GPU was, only the length of calls is known, and a sleep is a long call too.
    active = {"kineto": "in kernels", "driver": "GPU use"}.get(findings.busy_source or "", "long calls")
    yield f"{'main process':<26}{'share':>7}  {'on a core':>9}  {active:>10}  mostly in"
    if findings.busy is not None:
        yield f"{'GPU busy':<26}{percent(findings.busy):>7}"
    for row in findings.rows:
        if row.activity not in findings.idle:
            continue
        name = f"idle: {row.activity}" if has_gpu else row.activity
        share = percent(findings.idle[row.activity])
        yield f"{name:<26}{share:>7}  {percent(row.on_core):>9}  {percent(row.active):>10}  {row.where}"
    yield f"{'unattributed':<26}{percent(findings.unattributed):>7}"
    total = (findings.busy or 0.0) + sum(findings.idle.values()) + findings.unattributed
    yield f"{'':<26}{percent(total):>7}"


def _stack(findings: Findings) -> Iterator[str]:
    """The stack of the row that the verdict is about, but for those about the whole."""
    row = largest_row(findings)
    if row is not None:
        yield ""
        yield f"{row.activity}, most often: {' → '.join(row.stack[-_DEEPEST:])}"


def _readings(watched: Watched) -> Iterator[str]:
    if watched.no_gpu:
        yield watched.no_gpu
    for gpu, model in watched.models.items():
        lives = watched.readings[gpu]
        shown = [f"{name} {figure(lives[name].mean if name in lives else None)}" for name in _SHOWN]
        joules = lives["energy"].latest if "energy" in lives else None
        yield f"{gpu} {model}: {', '.join(shown)} (means); energy {figure(joules)} J in all"
    if watched.models and not watched.used:
        yield "Which GPUs are the command's is not known, for the driver shows none of its processes: all are counted."
    used = LACKING if watched.cores_used is None else f"{figure(watched.cores_used)} of {watched.cores}"
    yield f"host: cores in use by the command {used}, by other programs {figure(watched.others_cores)}"


def _remarks(findings: Findings) -> Iterator[str]:
    workers, computing = findings.workers, findings.computing
    if workers is not None:
        yield (
            f"workers: {workers.count}, {workers.cores:.1f} cores, {percent(workers.stepping)} of their time in the "
            f"environment, mostly `{workers.where}`"
        )
    if computing is not None:
        kernel = LACKING if computing.kernel_us is None else f"{computing.kernel_us:.0f} µs"
        yield (
            f"profiler: {computing.windows} windows, {computing.seconds:.1f} s together, kernels "
            f"{percent(computing.active)} of them, {kernel} each"
        )
    if findings.leader is not None and findings.leader.failure is not None:
        yield f"note: the main process was not watched to its end, for the sampler failed: {findings.leader.failure}"
    if findings.in_use is not None:
        yield f"from its first use to its last the GPU was busy {percent(findings.in_use)} of the time"
    if findings.disagreement is not None and findings.disagreement > _DISAGREES:
        yield (
            f"note: the driver saw the GPU busy {percent(findings.utilisation or 0.0)} of the time; "
            "a short run, or another program on the GPU, can make the two differ."
        )


def result(watched: Watched, findings: Findings, verdict: Verdict) -> dict[str, Any]:
    """All of it as one object."""
    readings = {
        source: {
            name: {"least": life.least, "mean": life.mean, "largest": life.largest, "latest": life.latest}
            for name, life in lives.items()
        }
        for source, lives in watched.readings.items()
    }
    leader = findings.leader
    return {
        "command": list(watched.command),
        "status": watched.status,
        "seconds": watched.seconds,
        "cause": verdict.cause,
        "verdict": verdict.sentence,
        "next_step": verdict.next_step,
        "busy": findings.busy,
        "busy_source": findings.busy_source,
        "idle": findings.idle,
        "in_use": findings.in_use,
        "unattributed": findings.unattributed,
        "rows": [asdict(row) for row in findings.rows],
        "workers": asdict(findings.workers) if findings.workers else None,
        "windows": asdict(findings.computing) if findings.computing else None,
        "threads": {
            "native": findings.native_threads,
            "native_share": findings.native_share,
            "queued": findings.queued,
        },
        "others_cores": findings.others_cores,
        "processes": [
            {"pid": p.pid, "worker": p.is_worker, "leads": p is leader, "cpu_seconds": p.cpu_seconds}
            for p in watched.processes
        ],
        "gpus": dict(watched.models),
        "gpus_of_the_command": sorted(watched.used),
        "no_gpu": watched.no_gpu,
        "failure": leader.failure if leader else None,
        "cores": watched.cores,
        "readings": readings,
    }


def write(folder: Path, watched: Watched, findings: Findings, verdict: Verdict) -> None:
    """`watch.json` and `watch.txt` in `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "watch.json").write_text(json.dumps(result(watched, findings, verdict), indent=1) + "\n", "utf-8")
    (folder / "watch.txt").write_text("\n".join(lines(watched, findings, verdict)) + "\n", "utf-8")
