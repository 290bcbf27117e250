"""Phases of your own loop: `with unidle.phase("rollout"):` wherever you like, and a `PhaseMeter` around the whole.

Without a meter a phase costs a look at one variable. With one it costs two timestamps; with `cuda=True` also two CUDA
events, which tell how long the phase's work took on the device and not only how long the host was in it. Phases may
lie within each other: an instant belongs to the innermost, so that the table sums to 100 %.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Protocol

from unidle.errors import UsageError
from unidle.meter.attribution import HostSpan
from unidle.meter.background import Background
from unidle.meter.lane import Lane

UNATTRIBUTED = "unattributed"
_MOST_EVENTS = 4096  # pairs that the device may not have come to yet


class Phase(Protocol):
    """What `phase` returns."""

    def __enter__(self) -> object:
        """Begin."""

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """End."""


class _Nothing:
    __slots__ = ()

    def __enter__(self) -> None:
        return None

    def __exit__(self, *_: object) -> None:
        return None


_NOTHING = _Nothing()
_active: PhaseMeter | None = None


def phase(name: str) -> Phase:
    """Account for the time in a `with` block under `name`, if a `PhaseMeter` is active in this process."""
    meter = _active
    return _NOTHING if meter is None else meter.phase(name)


@dataclass(frozen=True)
class PhaseRow:
    """A phase's part of the time."""

    phase: str
    seconds: float
    share: float
    device: float | None
    """Share of the phase in which its work was on the device, by CUDA events; None without `cuda=True`."""
    utilisation: float | None
    """Mean of the driver's reading meanwhile, 0 to 1; None without a GPU, or where the phase was too short to tell."""
    watts: float | None


class PhaseMeter:
    """Measures the phases of a block: `with unidle.PhaseMeter() as meter: … ; print(meter)`.

    The thread that enters the block is the one whose time the table accounts for. Other threads may use phases too;
    theirs are kept apart, in `spans`.
    """

    def __init__(self, *, cuda: bool = False, readings: bool = True) -> None:
        self._numbers: dict[str, int] = {UNATTRIBUTED: 0}
        self._phases: dict[str, _Phase] = {}
        self._lock, self._local = threading.Lock(), threading.local()
        self._lanes: dict[int, tuple[str, Lane]] = {}
        self._events = _Events() if cuda else None
        self._background = Background() if readings else None
        self._owner = 0
        self._seconds: float | None = None

    def __enter__(self) -> PhaseMeter:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        """Begin the account."""
        global _active
        if _active is not None:
            raise UsageError("A PhaseMeter is active already; end it before you start another.")
        self._owner = threading.get_ident()
        self.lane()
        if self._background:
            self._background.start()
        _active = self

    def stop(self) -> None:
        """End it."""
        global _active
        if _active is self:
            _active = None
            own = self.lane()
            own.enter(0)
            self._seconds = sum(own.totals_ns) * 1e-9
            if self._background:
                self._background.stop()

    def phase(self, name: str) -> _Phase:
        """The block for `name`; the same object each time, for it holds nothing of its own."""
        found = self._phases.get(name)
        return found if found is not None else self._new(name)

    def lane(self) -> Lane:
        """The calling thread's row of phases."""
        lane: Lane | None = getattr(self._local, "lane", None)
        if lane is None:
            with self._lock:
                lane = self._local.lane = Lane(len(self._numbers), 0)
                self._lanes[threading.get_ident()] = (threading.current_thread().name, lane)
        return lane

    def _new(self, name: str) -> _Phase:
        with self._lock:
            number = self._numbers.setdefault(name, len(self._numbers))
            for _, lane in self._lanes.values():
                lane.grow(len(self._numbers))
            return self._phases.setdefault(name, _Phase(self, number))

    def spans(self) -> list[HostSpan]:
        """The latest phases of all threads, for `attribute_idle`."""
        names = list(self._numbers)
        return [
            HostSpan(names[number], start, end, lane_name)
            for lane_name, lane in list(self._lanes.values())
            for number, start, end in lane.intervals()
            if number
        ]

    def rows(self) -> list[PhaseRow]:
        """The table so far: phases by length, then what belongs to none; shares sum to 1."""
        lane = self.lane() if threading.get_ident() == self._owner else self._lanes[self._owner][1]
        if self._seconds is None and threading.get_ident() == self._owner:
            lane.enter(lane.enter(0))  # bring the account up to now
        whole = sum(lane.totals_ns) or 1
        device = self._events.seconds() if self._events else {}
        means = self._background.means(lane.intervals()) if self._background else {}
        found = []
        for name, number in self._numbers.items():
            total = lane.totals_ns[number]
            seconds = total * 1e-9
            utilisation, watts = means.get(number, (None, None))
            on_device = min(1.0, device.get(number, 0.0) / seconds) if self._events and number and seconds else None
            found.append(PhaseRow(name, seconds, total / whole, on_device, utilisation, watts))
        return [*sorted(found[1:], key=lambda row: -row.seconds), found[0]]

    def __str__(self) -> str:
        return "\n".join(table(self.rows()))


def table(rows: list[PhaseRow]) -> Iterator[str]:
    """Rows for a terminal; what is not known is a –."""
    width = max(14, *(len(row.phase) + 2 for row in rows))
    yield f"{'phase':<{width}}{'share':>8}{'seconds':>10}{'on device':>11}{'GPU use':>9}{'power':>9}"
    for row in rows:
        cells = (
            f"{_percent(row.share):>8}{row.seconds:>10.2f}{_percent(row.device):>11}{_percent(row.utilisation):>9}"
            f"{'–' if row.watts is None else f'{row.watts:.0f} W':>9}"
        )
        yield f"{row.phase:<{width}}{cells}"
    yield f"{'':<{width}}{_percent(sum(row.share for row in rows)):>8}{sum(row.seconds for row in rows):>10.2f}"


def _percent(share: float | None) -> str:
    return "–" if share is None else f"{100 * share:.1f} %"


class _Phase:
    """A named block. It holds nothing of its own but its number: threads do not meet in it."""

    __slots__ = ("_events", "_local", "_meter", "_number")

    def __init__(self, meter: PhaseMeter, number: int) -> None:
        self._meter, self._number = meter, number
        self._local, self._events = meter._local, meter._events

    def __enter__(self) -> None:
        try:
            lane = self._local.lane
        except AttributeError:  # the thread's first phase
            lane = self._meter.lane()
        lane.push(self._number)
        if self._events is not None:
            self._events.begin(self._number)

    def __exit__(self, *_: object) -> None:
        if self._events is not None:
            self._events.end()
        self._local.lane.pop()


class _Events:
    """Pairs of CUDA events on the current stream, read once the device has come to them, and used again."""

    def __init__(self) -> None:
        import torch

        if not torch.cuda.is_available():
            raise UsageError("PhaseMeter(cuda=True) needs a CUDA GPU; leave cuda out to measure the host alone.")
        self._torch: Any = torch
        self._free: list[Any] = []
        self._open: list[tuple[int, Any]] = []
        self._waiting: deque[tuple[int, Any, Any]] = deque()
        self._totals: dict[int, float] = {}

    def begin(self, number: int) -> None:
        event = self._free.pop() if self._free else self._torch.cuda.Event(enable_timing=True)
        event.record()
        self._open.append((number, event))

    def end(self) -> None:
        number, first = self._open.pop()
        last = self._free.pop() if self._free else self._torch.cuda.Event(enable_timing=True)
        last.record()
        self._waiting.append((number, first, last))
        if len(self._waiting) > _MOST_EVENTS:
            self._read(wait=True, most=_MOST_EVENTS // 2)
        elif len(self._waiting) > 64:
            self._read(wait=False, most=64)

    def seconds(self) -> dict[int, float]:
        """Seconds on the device by phase; waits for what is still under way."""
        self._read(wait=True, most=len(self._waiting))
        return self._totals

    def _read(self, *, wait: bool, most: int) -> None:
        for _ in range(min(most, len(self._waiting))):
            number, first, last = self._waiting[0]
            if wait:
                last.synchronize()
            elif not last.query():
                return
            self._waiting.popleft()
            self._totals[number] = self._totals.get(number, 0.0) + first.elapsed_time(last) * 1e-3
            self._free += [first, last]
