"""The report of `unidle watch`: a verdict, one next step, and a table that sums to 100 %."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from unidle.formatting import MISSING, apportion, duration, figure, percent
from unidle.meter.watch.command import WatchedCommand
from unidle.meter.watch.findings import Findings, Row, analyse
from unidle.meter.watch.stacks import START, WORKERS
from unidle.meter.watch.verdict import Verdict, largest_row, verdict_on

_MAX_DISAGREEMENT = 0.15
_BUSY, _UNATTRIBUTED = "GPU busy", "unattributed"
_SHORT_S = 1.0  # of training; a shorter command has nothing else to show than its start-up
_DEEPEST = 6  # functions of a stack that are shown
_SHOWN = ("utilisation", "SM active", "tensor active", "DRAM active", "memory", "power", "temperature")


def conclude(watched: WatchedCommand) -> tuple[Findings, Verdict]:
    """Return findings and verdict of a finished command."""
    known = watched.processes, watched.begun_ns, watched.ended_ns, watched.cores
    findings = analyse(*known, watched.gpu_use, watched.others_cores)
    leader = findings.leader
    if watched.gpu_use is not None and leader is not None and leader.uses_torch and not leader.uses_cuda:
        # The program does not use the GPU: its readings belong to other programs.
        findings = analyse(*known, None, watched.others_cores)
    return findings, verdict_on(findings)


def lines(watched: WatchedCommand, findings: Findings, verdict: Verdict) -> Iterator[str]:
    """Return the report for a terminal."""
    yield f"unidle watched this command for {watched.seconds:.0f} s: {' '.join(watched.command)}"
    yield ""
    yield verdict.sentence
    for other in verdict.also:
        yield f"Also: {other.sentence}"
    yield f"Next: {verdict.next_step}"
    for other in verdict.also:
        yield f"Then: {other.next_step}"
    yield ""
    yield from _table(findings)
    yield from _stack(findings)
    yield ""
    yield from _readings(watched)
    yield from _remarks(findings)


def _table(findings: Findings) -> Iterator[str]:
    has_gpu = findings.busy is not None
    # Without GPU activity only the length of calls is known, and a sleep is a long call too.
    active = {"kineto": "in kernels", "driver": "GPU use"}.get(findings.busy_source or "", "long calls")
    yield f"{'main process':<26}{'share':>7}  {'on a core':>9}  {active:>10}  mostly in"
    start, total = findings.idle.get(START, 0.0), findings.after_start
    if total * findings.seconds < _SHORT_S:  # nothing but start-up
        start, total = 0.0, 1.0
    known = {_BUSY: findings.busy or 0.0, **findings.idle, _UNATTRIBUTED: findings.unattributed}
    shares = apportion({name: share / total for name, share in known.items() if name != START or not start})
    if findings.busy is not None:
        yield f"{_BUSY:<26}{shares[_BUSY]:>5} %"
    for row in findings.rows:
        if not shares.get(row.activity):
            continue
        name = f"idle: {row.activity}" if has_gpu else row.activity
        share = f"{shares[row.activity]} %"
        where = _where(row, findings)
        yield f"{name:<26}{share:>7}  {percent(row.on_core, 0):>9}  {percent(row.active, 0):>10}  {where}".rstrip()
    yield f"{_UNATTRIBUTED:<26}{shares[_UNATTRIBUTED]:>5} %"
    yield f"{'':<26}{sum(shares.values()):>5} %"
    if start:
        yield f"{START}: {duration(start * findings.seconds)}, not counted above"


def _where(row: Row, findings: Findings) -> str:
    """Return the function of a row and its line: Game.step, game.py:12."""
    place = row.place
    if row.activity == WORKERS and findings.workers is not None:
        place = findings.workers.place
    return "" if place is None else ", ".join(filter(None, [place.function, place.source]))


def _stack(findings: Findings) -> Iterator[str]:
    """Show the most frequent stack of the largest row."""
    row = largest_row(findings)
    if row is not None:
        yield ""
        yield f"{row.activity}, most often: {' → '.join(row.stack[-_DEEPEST:])}"


def _readings(watched: WatchedCommand) -> Iterator[str]:
    if watched.no_gpu:
        yield watched.no_gpu
    for gpu, model in watched.models.items():
        stats = watched.readings[gpu]
        shown = [f"{name} {figure(stats[name].mean if name in stats else None)}" for name in _SHOWN]
        joules = stats["energy"].latest if "energy" in stats else None
        yield f"{gpu} {model}: {', '.join(shown)} (means); energy {figure(joules)} J in total"
    if watched.models and not watched.used:
        yield "note: the driver does not show which GPUs the command uses, so all GPUs are counted."
    used = MISSING if watched.cores_used is None else f"{figure(watched.cores_used)} of {watched.cores}"
    yield f"host: cores used by the command {used}, by other programs {figure(watched.others_cores)}"


def _remarks(findings: Findings) -> Iterator[str]:
    workers, kernel_activity = findings.workers, findings.kernel_activity
    if workers is not None:
        mostly = "" if workers.place is None else f", mostly `{workers.place.function}`"
        yield (
            f"workers: {workers.count}, {workers.cores:.1f} cores, {percent(workers.stepping)} of their time in the "
            f"environment{mostly}"
        )
    if kernel_activity is not None:
        kernel = MISSING if kernel_activity.kernel_us is None else f"{kernel_activity.kernel_us:.0f} µs"
        yield (
            f"profiler: {kernel_activity.windows} windows, {kernel_activity.seconds:.1f} s in total, kernels active "
            f"{percent(kernel_activity.active)} of the time, {kernel} each"
        )
    if findings.leader is not None and findings.leader.failure is not None:
        yield f"note: the sampler failed before the main process ended: {findings.leader.failure}"
    if findings.in_use is not None:
        yield f"between its first and last use the GPU was busy {percent(findings.in_use)} of the time"
    if findings.disagreement is not None and findings.disagreement > _MAX_DISAGREEMENT:
        yield (
            f"note: according to the driver the GPU was busy {percent(findings.utilisation or 0.0)} of the time; "
            "the two can differ in a short run or if other programs use the GPU."
        )


def result(watched: WatchedCommand, findings: Findings, verdict: Verdict) -> dict[str, Any]:
    """Return everything as one JSON object."""
    readings = {
        source: {
            name: {"least": one.least, "mean": one.mean, "largest": one.largest, "latest": one.latest}
            for name, one in stats.items()
        }
        for source, stats in watched.readings.items()
    }
    leader = findings.leader
    return {
        "command": list(watched.command),
        "status": watched.status,
        "seconds": watched.seconds,
        "cause": verdict.cause,
        "verdict": verdict.sentence,
        "next_step": verdict.next_step,
        "also": [{"cause": v.cause, "verdict": v.sentence, "next_step": v.next_step} for v in verdict.also],
        "busy": findings.busy,
        "busy_source": findings.busy_source,
        "idle": findings.idle,
        "in_use": findings.in_use,
        "unattributed": findings.unattributed,
        "rows": [asdict(row) for row in findings.rows],
        "workers": asdict(findings.workers) if findings.workers else None,
        "windows": asdict(findings.kernel_activity) if findings.kernel_activity else None,
        "threads": {
            "native": findings.native_threads,
            "native_share": findings.native_share,
            "queued": findings.queued,
        },
        "others_cores": findings.others_cores,
        "processes": [
            {"pid": p.pid, "worker": p.is_worker, "main": p is leader, "cpu_seconds": p.cpu_seconds}
            for p in watched.processes
        ],
        "gpus": dict(watched.models),
        "gpus_of_the_command": sorted(watched.used),
        "no_gpu": watched.no_gpu,
        "failure": leader.failure if leader else None,
        "cores": watched.cores,
        "readings": readings,
    }


def write(folder: Path, watched: WatchedCommand, findings: Findings, verdict: Verdict) -> None:
    """Write `watch.json` and `watch.txt` into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "watch.json").write_text(json.dumps(result(watched, findings, verdict), indent=1) + "\n", "utf-8")
    (folder / "watch.txt").write_text("\n".join(lines(watched, findings, verdict)) + "\n", "utf-8")
