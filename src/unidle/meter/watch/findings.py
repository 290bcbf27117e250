"""What samples and readings of a watched command say together: one table of its main process's time, and its workers'.

A row's share of time comes from the stacks, of which there are a hundred a second; how much the GPU computed meanwhile
comes from windows of torch's profiler, some tenths of a second each, or from the driver's utilisation, which is blurred
by the length of its readings. The two are multiplied: *busy* is share × active share, *idle* the rest, by what the
program was doing. What neither tells is unattributed; the table sums to 1. While the program starts and ends, nothing
uses the GPU.

Of a program that does not use the GPU through torch, or not in its main thread, it is not known what it did at each
reading: *busy* is then the driver's mean, and all that it did after its start is idle by the same part.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from unidle.meter.sensors.lifetime import Life
from unidle.meter.watch.samples import FIRST_OF_WORKER, Computing, Frame, Process, Stack
from unidle.meter.watch.stacks import (
    ACTIVITIES,
    ENVIRONMENT,
    START,
    activity,
    called,
    deepest_own,
    is_network,
    place,
    waits_for_message,
)

_MOST = 0.8  # of the time after the start; the driver's own start, which looks like learning, takes seconds


@dataclass(frozen=True)
class Row:
    """One activity of the leading thread; shares are of all the time watched, unless said otherwise."""

    activity: str
    share: float
    on_core: float
    """Of the row's time, the share on a core."""
    queued: float
    """Of the row's time, the share of waiting for a core."""
    active: float | None
    """Of the row's time, the share in which kernels ran on a GPU, else that in calls that last, as products do and also
    sleeps; None where nothing tells."""
    where: str
    """The function in which most of it was spent."""
    where_share: float
    """Of the row's time, the share in that function."""
    stack: tuple[str, ...]
    """The stack in which most of it was spent, from the outermost function."""


@dataclass(frozen=True)
class Workers:
    """The helpers of the leading process, together; shares are of their time since they and it were ready."""

    count: int
    cores: float
    """Cores that they used on average."""
    stepping: float
    """Share of time inside the environment's own methods."""
    stepping_busy: float
    """Of that, the share on a core or waiting for one."""
    working: float
    """Share of time in which they did not just wait for a message from the leading process."""
    where: str | None
    """Where in the environment most of it was spent."""
    is_network: bool
    """Whether most of the environment's waiting is for another machine."""


@dataclass(frozen=True)
class Findings:
    """What is known about a watched command."""

    seconds: float
    cores: int
    leader: Process | None
    rows: tuple[Row, ...]
    busy: float | None
    """Share of time in which the GPU computed; None without a GPU, or where nothing tells."""
    busy_source: str | None
    """kineto (windows) or driver, both row by row; or "driver, mean"."""
    idle: dict[str, float]
    """By activity; with `busy` and `unattributed` it sums to 1. Without a GPU: the shares of the rows."""
    unattributed: float
    workers: Workers | None
    native_threads: int
    """Threads of all processes whose native threads, such as OpenMP's, did a good part of the work."""
    native_share: float
    """Of all CPU time, the share of such threads."""
    queued: float
    """Of the time that main threads wanted a core, the share that they waited for one."""
    utilisation: float | None
    """By the driver, for comparison."""
    in_use: float | None
    """The same from the GPU's first use to its last; None where that is not most of the time after the start, or where
    windows tell more."""
    others_cores: float | None
    """Cores that other programs used on average."""

    @property
    def computing(self) -> Computing | None:
        """The leader's windows."""
        return self.leader.computing if self.leader else None

    @property
    def disagreement(self) -> float | None:
        """How far the driver's utilisation and `busy` lie apart, where both are known and independent."""
        if self.busy is None or self.utilisation is None or self.busy_source != "kineto":
            return None
        return abs(self.busy - self.utilisation)

    def row(self, name: str) -> Row | None:
        """The row of an activity, if it took any time."""
        return next((row for row in self.rows if row.activity == name), None)


def find(
    processes: Sequence[Process],
    begun_ns: int,
    ended_ns: int,
    cores: int,
    gpu: Life | None,
    others_cores: float | None = None,
) -> Findings:
    """Put everything together; `gpu` is its utilisation by the driver, in percent, or None without one."""
    seconds = (ended_ns - begun_ns) * 1e-9
    leader = _leader(processes)
    workers = [p for p in processes if p.is_worker and p is not leader]
    rows = _rows(leader, begun_ns, ended_ns) if leader else ()
    has_windows = leader is not None and leader.computing is not None
    busy, source = None, None
    idle = {row.activity: row.share for row in rows}
    utilisation = None if gpu is None else (gpu.mean or 0.0) / 100
    is_followed = leader is not None and leader.is_followed and _leading_thread(leader) == 0
    if has_windows or (is_followed and utilisation is not None):
        source = "kineto" if has_windows else "driver"
        busy, idle = _by_row(rows)
    elif utilisation is not None:
        source = "driver, mean"
        busy, idle = utilisation, _by_one_share(rows, utilisation)
    unattributed = max(0.0, 1.0 - (busy or 0.0) - sum(idle.values()))
    native_threads, native_share = _native(processes)
    mains = [stack for p in processes for stack in p.thread(0) if _kind(p)(stack) != START]
    wanted = sum(s.on_core + s.queued for s in mains)
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
        sum(s.queued for s in mains) / wanted if wanted else 0.0,
        utilisation,
        None if gpu is None or has_windows else _in_use(gpu, seconds * (1 - _start(rows))),
        others_cores,
    )


def _kind(process: Process) -> Callable[[Stack], str]:
    return lambda stack: activity(stack, process.uses_cuda)


def _leader(processes: Sequence[Process]) -> Process | None:
    """The process that trains: one that uses the GPU before one that uses torch, then the busiest.

    A helper leads only where it uses the GPU and no other does: some programs do all their learning in one.
    """
    own = [p for p in processes if not p.is_worker or p.uses_cuda] or list(processes)
    return max(own, key=lambda p: (p.uses_cuda, not p.is_worker, p.uses_torch, p.cpu_seconds), default=None)


def _leading_thread(process: Process) -> int:
    """The main thread; or another, if that one did most of the work and the main one hardly any."""
    by_thread: dict[int, float] = defaultdict(float)
    for stack in process.stacks:
        by_thread[stack.thread] += stack.on_core
    busiest = max(by_thread, key=lambda thread: by_thread[thread], default=0)
    return busiest if by_thread[busiest] > 4 * by_thread[0] else 0


def _rows(process: Process, begun_ns: int, ended_ns: int) -> tuple[Row, ...]:
    groups: dict[str, list[Stack]] = defaultdict(list)
    # Before its first sample and after its end, if it came that far, Python itself starts and ends.
    edges = process.begun_ns - begun_ns + (ended_ns - process.closed_ns if process.closed_ns is not None else 0)
    groups[START].append(Stack(0, 0, (Frame("", "Python itself", False),), max(0, edges) * 1e-9, 0.0, 0.0, 0.0, 0.0))
    kind = _kind(process)
    for stack in process.thread(_leading_thread(process)):
        groups[kind(stack)].append(stack)
    whole = max((ended_ns - begun_ns) * 1e-9, sum(stack.wall for group in groups.values() for stack in group))
    found = []
    for name in ACTIVITIES:
        group = groups.get(name, [])
        wall = sum(s.wall for s in group)
        if not wall:
            continue
        known = sum(s.known for s in group)
        where, where_wall = _largest(group, place)
        found.append(
            Row(
                name,
                wall / whole,
                sum(s.on_core for s in group) / wall,
                sum(s.queued for s in group) / wall,
                min(1.0, sum(s.active for s in group) / known) if known else None,
                where,
                where_wall / wall,
                tuple(called(f) for f in reversed(max(group, key=lambda s: s.wall).frames)),
            )
        )
    return tuple(found)


def _by_row(rows: Iterable[Row]) -> tuple[float, dict[str, float]]:
    """Busy, and idle by activity; a row of which nothing tells how active the GPU was is left to be unattributed."""
    busy, idle = 0.0, {}
    for row in rows:
        active = 0.0 if row.activity == START else row.active  # before anything uses the GPU
        if active is not None:
            busy += row.share * active
            idle[row.activity] = row.share * (1 - active)
    return busy, idle


def _by_one_share(rows: Iterable[Row], busy: float) -> dict[str, float]:
    """Idle by activity, if the GPU was busy for this share of all time."""
    rows = list(rows)
    start = min(_start(rows), 1 - busy)
    idle = (1 - busy - start) / max(1e-9, 1 - start)  # of the time after it
    return {row.activity: start if row.activity == START else row.share * idle for row in rows}


def _in_use(gpu: Life, after_start: float) -> float | None:
    """Its utilisation from its first use to its last, if that is most of these seconds."""
    seconds, percent = gpu.in_use or (0.0, 0.0)
    return percent / 100 if seconds > _MOST * after_start else None


def _start(rows: Iterable[Row]) -> float:
    """Share of time in which the program started and ended."""
    return sum(row.share for row in rows if row.activity == START)


def _ready_ns(leader: Process) -> int:
    """When it was past its start."""
    stacks = leader.thread(_leading_thread(leader))
    started = (stack.wall for stack in stacks if _kind(leader)(stack) == START)
    return leader.begun_ns + round(sum(started) * 1e9)


def _workers(workers: Sequence[Process], ready_ns: int) -> Workers | None:
    """All of them together, from when the leading process was ready: before, they wait for it, not for a step."""
    ready: list[tuple[Process, list[Stack]]] = []
    for worker in workers:
        stacks = [s for s in worker.thread(0) if activity(s, worker.uses_cuda) != START]
        # Others are the servers that start workers, and know nothing of environments.
        if any(f.steps_env or f.name == FIRST_OF_WORKER for s in stacks for f in s.frames):
            ready.append((worker, stacks))
    every = [s for _, stacks in ready for s in stacks]
    whole = sum(s.wall for s in every)
    if not whole:
        return None
    # A worker may leave no samples of its last seconds: so it is its own last one that counts.
    past = [(sum(s.wall for s in stacks), (worker.last_ns - ready_ns) * 1e-9) for worker, stacks in ready]
    wall = sum(min(own, max(0.0, since)) for own, since in past) or whole
    stepping = [s for s in every if activity(s, False) == ENVIRONMENT]
    stepping_wall = sum(s.wall for s in stepping)
    on_core = sum(s.on_core for s in every)
    native = sum(_native_seconds(worker) for worker, _ in ready)
    waiting = [s for s in stepping if s.on_core + s.queued < 0.5 * s.wall]
    talking = sum(s.wall for s in waiting if is_network(s.frames))
    where = _largest(stepping, lambda s: deepest_own(s) or place(s))[0] if stepping else None
    return Workers(
        len(ready),
        (on_core + native) / (wall / len(ready)),
        min(1.0, stepping_wall / wall),
        min(1.0, sum(s.on_core + s.queued for s in stepping) / stepping_wall) if stepping_wall else 0.0,
        min(1.0, sum(s.wall for s in every if not waits_for_message(s)) / wall),
        where,
        talking > 0.5 * sum(s.wall for s in waiting),
    )


def _native_seconds(process: Process) -> float:
    """CPU time of threads that are not Python's, such as a pool of OpenMP's."""
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


def _largest(stacks: Iterable[Stack], name: Callable[[Stack], str]) -> tuple[str, float]:
    """The name that most of the time goes by, and that time."""
    walls: dict[str, float] = defaultdict(float)
    for stack in stacks:
        walls[name(stack)] += stack.wall
    where = max(walls, key=lambda key: walls[key])
    return where, walls[where]
