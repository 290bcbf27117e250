"""Combines stack samples and sensor readings of a watched command into one table of its main process and workers.

A row's share of time comes from stack samples, a hundred per second. How busy the GPU was meanwhile comes from torch
profiler windows of a few tenths of a second, or from the driver's utilisation, which is blurred by its averaging time.
The two are multiplied: *busy* is share × active share, the rest is *idle*, by activity. What neither covers is
unattributed; the table sums to 1. During start-up and exit nothing uses the GPU.

If a program does not use the GPU through torch, or not in its main thread, readings cannot be matched to activities:
*busy* is then the driver's mean, and all activities after start-up are idle to the same degree.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from unidle.meter.sensors.lifetime import LifetimeStats
from unidle.meter.watch.places import Place, place_of
from unidle.meter.watch.samples import FIRST_OF_WORKER, Frame, KernelActivity, Process, Stack
from unidle.meter.watch.stacks import (
    ACTIVITIES,
    ENVIRONMENT,
    START,
    activity,
    display_name,
    is_network,
    waits_for_message,
)

_MIN_IN_USE = 0.8  # of the time after start-up; initialising CUDA takes seconds and looks like learning


@dataclass(frozen=True)
class Row:
    """One activity of the main thread; shares are of the whole watched time unless noted."""

    activity: str
    share: float
    on_core: float
    """Share of the row's time on a core."""
    queued: float
    """Share of the row's time waiting for a core."""
    active: float | None
    """Share of the row's time in which GPU kernels ran; without a GPU, in long calls such as matrix products or sleeps;
    None if unknown."""
    place: Place | None
    """The function with most of the time; None in phases of unidle outside the user's functions."""
    stack: tuple[str, ...]
    """The most frequent stack, outermost function first."""


@dataclass(frozen=True)
class Workers:
    """All worker processes of the main process; shares are of their time after start-up."""

    count: int
    cores: float
    """Mean number of cores used."""
    stepping: float
    """Share of time inside environment methods."""
    stepping_busy: float
    """Share of that time on a core or waiting for one."""
    working: float
    """Share of time not spent waiting for a message from the main process."""
    place: Place | None
    """The environment function with most of the time."""
    is_network: bool
    """Whether the environments mostly wait for the network."""


@dataclass(frozen=True)
class Findings:
    """Everything known about a watched command."""

    seconds: float
    cores: int
    leader: Process | None
    rows: tuple[Row, ...]
    busy: float | None
    """Share of time in which the GPU computed; None without a GPU or if unknown."""
    busy_source: str | None
    """"kineto" (profiler windows) or "driver", both per row; or "driver, mean"."""
    idle: dict[str, float]
    """By activity; sums to 1 with `busy` and `unattributed`. Without a GPU: the shares of the rows."""
    unattributed: float
    workers: Workers | None
    native_threads: int
    """Thread count of all processes in which native threads, such as OpenMP's, did a good part of the work."""
    native_share: float
    """Share of all CPU time spent in native threads."""
    queued: float
    """Share of runnable time that main threads spent waiting for a core."""
    utilisation: float | None
    """GPU utilisation by the driver, for comparison."""
    in_use: float | None
    """GPU utilisation from its first use to its last; None if that covers too little of the run, or with profiler
    windows, which are more precise."""
    others_cores: float | None
    """Mean number of cores used by other programs."""

    @property
    def kernel_activity(self) -> KernelActivity | None:
        """Profiler windows of the main process."""
        return self.leader.kernel_activity if self.leader else None

    @property
    def disagreement(self) -> float | None:
        """Difference between `busy` and the driver's utilisation, if both are known and independent."""
        if self.busy is None or self.utilisation is None or self.busy_source != "kineto":
            return None
        return abs(self.busy - self.utilisation)

    @property
    def after_start(self) -> float:
        """Share of time without start-up and exit, which the report is about."""
        return max(1e-9, 1.0 - self.idle.get(START, 0.0))

    def row(self, name: str) -> Row | None:
        """Return the row of an activity, if it took any time."""
        return next((row for row in self.rows if row.activity == name), None)


def analyse(
    processes: Sequence[Process],
    begun_ns: int,
    ended_ns: int,
    cores: int,
    gpu: LifetimeStats | None,
    others_cores: float | None = None,
) -> Findings:
    """Combine all measurements; `gpu` is the driver's utilisation in percent, None without a GPU."""
    seconds = (ended_ns - begun_ns) * 1e-9
    leader = _leader(processes)
    workers = [p for p in processes if p.is_worker and p is not leader]
    rows = _rows(leader, begun_ns, ended_ns) if leader else ()
    has_windows = leader is not None and leader.kernel_activity is not None
    busy, source = None, None
    idle = {row.activity: row.share for row in rows}
    utilisation = None if gpu is None else (gpu.mean or 0.0) / 100
    has_driver_readings = leader is not None and leader.has_driver_readings and _leading_thread(leader) == 0
    if has_windows or (has_driver_readings and utilisation is not None):
        source = "kineto" if has_windows else "driver"
        busy, idle = _by_row(rows)
    elif utilisation is not None:
        source = "driver, mean"
        busy, idle = utilisation, _by_overall_share(rows, utilisation)
    unattributed = max(0.0, 1.0 - (busy or 0.0) - sum(idle.values()))
    native_threads, native_share = _native(processes)
    mains = [stack for p in processes for stack in p.thread(0) if _kind(p)(stack) != START]
    runnable = sum(s.on_core + s.queued for s in mains)
    return Findings(
        seconds,
        cores,
        leader,
        rows,
        busy,
        source,
        idle,
        unattributed,
        _workers(workers, _ready_ns(leader) if leader else begun_ns),
        native_threads,
        native_share,
        sum(s.queued for s in mains) / runnable if runnable else 0.0,
        utilisation,
        None if gpu is None or has_windows else _in_use(gpu, seconds * (1 - _start(rows))),
        others_cores,
    )


def _kind(process: Process) -> Callable[[Stack], str]:
    return lambda stack: activity(stack, process.uses_cuda, trains=bool(process.phase_seconds))


def _leader(processes: Sequence[Process]) -> Process | None:
    """Return the process that trains: prefer one that uses the GPU, then one that uses torch, then the busiest.

    A worker qualifies only if it is the only one that uses the GPU: some programs learn in a child process.
    """
    candidates = [p for p in processes if not p.is_worker or p.uses_cuda] or list(processes)
    return max(candidates, key=lambda p: (p.uses_cuda, not p.is_worker, p.uses_torch, p.cpu_seconds), default=None)


def _leading_thread(process: Process) -> int:
    """Return the main thread, or another one if that did far more work."""
    by_thread: dict[int, float] = defaultdict(float)
    for stack in process.stacks:
        by_thread[stack.thread] += stack.on_core
    busiest = max(by_thread, key=lambda thread: by_thread[thread], default=0)
    return busiest if by_thread[busiest] > 4 * by_thread[0] else 0


def _rows(process: Process, begun_ns: int, ended_ns: int) -> tuple[Row, ...]:
    groups: dict[str, list[Stack]] = defaultdict(list)
    # Before the first sample and after the exit handlers, Python itself starts up and shuts down.
    edges = process.begun_ns - begun_ns + (ended_ns - process.closed_ns if process.closed_ns is not None else 0)
    groups[START].append(Stack(0, (Frame("", "Python itself", False),), max(0, edges) * 1e-9, 0.0, 0.0, 0.0, 0.0))
    kind = _kind(process)
    for stack in _scaled_to_phases(process.thread(_leading_thread(process)), process.phase_seconds):
        groups[kind(stack)].append(stack)
    whole = max((ended_ns - begun_ns) * 1e-9, sum(stack.wall for group in groups.values() for stack in group))
    found = []
    for name in (*ACTIVITIES, *sorted(groups.keys() - set(ACTIVITIES))):
        group = groups.get(name, [])
        wall = sum(s.wall for s in group)
        if not wall:
            continue
        known = sum(s.known for s in group)
        found.append(
            Row(
                name,
                wall / whole,
                sum(s.on_core for s in group) / wall,
                sum(s.queued for s in group) / wall,
                min(1.0, sum(s.active for s in group) / known) if known else None,
                place_of(group, name),
                tuple(display_name(f) for f in reversed(max(group, key=lambda s: s.wall).frames)),
            )
        )
    return tuple(found)


def _scaled_to_phases(stacks: Sequence[Stack], phase_seconds: Mapping[str, float]) -> list[Stack]:
    """Scale the stacks of each phase to the time that the run measured.

    Samples favour code that releases the interpreter often; the run's own clock does not.
    """
    sampled: dict[str, float] = defaultdict(float)
    for stack in stacks:
        if stack.phase is not None:
            sampled[stack.phase] += stack.wall
    if not sampled:  # the run was in another thread
        return list(stacks)
    scaled = [
        stack if stack.phase is None else _times(stack, phase_seconds.get(stack.phase, 0.0) / sampled[stack.phase])
        for stack in stacks
        if stack.phase is None or sampled[stack.phase]
    ]
    unseen = {phase: seconds for phase, seconds in phase_seconds.items() if not sampled.get(phase)}
    return scaled + [Stack(0, (), seconds, 0.0, 0.0, 0.0, 0.0, phase) for phase, seconds in unseen.items()]


def _times(stack: Stack, factor: float) -> Stack:
    times = {name: factor * getattr(stack, name) for name in ("wall", "on_core", "queued", "known", "active")}
    return replace(stack, **times)


def _by_row(rows: Iterable[Row]) -> tuple[float, dict[str, float]]:
    """Return busy, and idle by activity; rows with unknown GPU activity stay unattributed."""
    busy, idle = 0.0, {}
    for row in rows:
        active = 0.0 if row.activity == START else row.active  # nothing uses the GPU then
        if active is not None:
            busy += row.share * active
            idle[row.activity] = row.share * (1 - active)
    return busy, idle


def _by_overall_share(rows: Iterable[Row], busy: float) -> dict[str, float]:
    """Return idle by activity if only the overall busy share is known."""
    rows = list(rows)
    start = min(_start(rows), 1 - busy)
    idle = (1 - busy - start) / max(1e-9, 1 - start)  # share of the time after start-up
    return {row.activity: start if row.activity == START else row.share * idle for row in rows}


def _in_use(gpu: LifetimeStats, after_start: float) -> float | None:
    """Return utilisation from first to last use, if that is most of the seconds `after_start`."""
    seconds, percent = gpu.in_use or (0.0, 0.0)
    return percent / 100 if seconds > _MIN_IN_USE * after_start else None


def _start(rows: Iterable[Row]) -> float:
    """Return the share of start-up and exit."""
    return sum(row.share for row in rows if row.activity == START)


def _ready_ns(leader: Process) -> int:
    """Return the time at which start-up was over."""
    stacks = leader.thread(_leading_thread(leader))
    started = (stack.wall for stack in stacks if _kind(leader)(stack) == START)
    return leader.begun_ns + round(sum(started) * 1e9)


def _workers(workers: Sequence[Process], ready_ns: int) -> Workers | None:
    """Summarise all workers from when the main process was ready; before that they wait for it, not for a step."""
    ready: list[tuple[Process, list[Stack]]] = []
    for worker in workers:
        stacks = [s for s in worker.thread(0) if activity(s, worker.uses_cuda) != START]
        # The rest are fork servers, which run no environments.
        runs_envs = any(f.steps_env or f.name == FIRST_OF_WORKER for s in stacks for f in s.frames)
        if not worker.is_evaluator and (runs_envs or worker.is_unidle_worker):
            ready.append((worker, stacks))
    every = [s for _, stacks in ready for s in stacks]
    whole = sum(s.wall for s in every)
    if not whole:
        return None
    # A worker may leave no samples of its last seconds, so its time ends with its last sample.
    past = [(sum(s.wall for s in stacks), (worker.last_ns - ready_ns) * 1e-9) for worker, stacks in ready]
    wall = sum(min(own, max(0.0, since)) for own, since in past) or whole
    stepping = [s for s in every if activity(s, False) == ENVIRONMENT]
    stepping_wall = sum(s.wall for s in stepping)
    on_core = sum(s.on_core for s in every)
    native = sum(_native_seconds(worker) for worker, _ in ready)
    waiting = [s for s in stepping if s.on_core + s.queued < 0.5 * s.wall]
    on_network = sum(s.wall for s in waiting if is_network(s.frames))
    return Workers(
        len(ready),
        (on_core + native) / (wall / len(ready)),
        min(1.0, stepping_wall / wall),
        min(1.0, sum(s.on_core + s.queued for s in stepping) / stepping_wall) if stepping_wall else 0.0,
        min(1.0, sum(s.wall for s in every if not waits_for_message(s)) / wall),
        place_of(stepping, ENVIRONMENT),
        on_network > 0.5 * sum(s.wall for s in waiting),
    )


def _native_seconds(process: Process) -> float:
    """Return the CPU time of non-Python threads, such as an OpenMP pool."""
    return max(0.0, process.cpu_seconds - sum(stack.on_core for stack in process.stacks))


def _native(processes: Sequence[Process]) -> tuple[int, float]:
    threads, native, total = 0, 0.0, 0.0
    for process in processes:
        own = _native_seconds(process)
        total += process.cpu_seconds
        native += own
        if own > 0.2 * process.cpu_seconds:
            threads += process.tasks
    return threads, native / total if total else 0.0
