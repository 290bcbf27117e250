"""Phases of your own loop: `with unidle.phase("rollout"):` wherever you like, and a `PhaseMeter` around the whole.

Without a meter a phase costs a look at one variable, with one it costs two timestamps. Phases may lie within each
other: an instant belongs to the innermost, so that the table sums to 100 %. What is measured is the host: a phase that
only launches work on a GPU ends before that work does.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol

from unidle.errors import UsageError
from unidle.meter.formatting import LACKING, percent
from unidle.meter.sensors.background import Background
from unidle.timeline import PhaseClock

UNATTRIBUTED = "unattributed"


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
    utilisation: float | None
    """Mean of the driver's reading meanwhile, 0 to 1; None without a GPU, or where the phase was too short to tell."""
    watts: float | None


class PhaseMeter:
    """Measures the phases of a block: `with unidle.PhaseMeter() as meter: … ; print(meter)`.

    The thread that enters the block is the one whose time the table accounts for; phases of others are nothing.
    """

    def __init__(self, *, readings: bool = True) -> None:
        self._background = Background() if readings else None
        self._owner = 0
        self._clock: _NestedClock | None = None
        self._phases: dict[str, _Phase] = {}
        self._totals_ns: list[int] | None = None  # once it has ended

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
        if self._clock is not None:
            raise UsageError("This PhaseMeter has measured its block already; make a new one for the next.")
        if self._background:
            self._background.start()
        self._owner, self._clock = threading.get_ident(), _NestedClock()
        self._phases[UNATTRIBUTED] = _Phase(self._clock, 0)
        _active = self

    def stop(self) -> None:
        """End it, and with it the phases that are open."""
        global _active
        if _active is self and self._clock is not None:
            _active = None
            self._clock.enter(0)
            self._totals_ns = list(self._clock.totals_ns)
            if self._background:
                self._background.stop()

    def phase(self, name: str) -> Phase:
        """The block for `name`; the same object each time, for it holds nothing of its own."""
        if threading.get_ident() != self._owner or self._clock is None:
            return _NOTHING
        found = self._phases.get(name)
        if found is None:
            self._clock.grow(len(self._phases) + 1)
            found = self._phases[name] = _Phase(self._clock, len(self._phases))
        return found

    def rows(self) -> list[PhaseRow]:
        """The table so far: phases by length, then what belongs to none; shares sum to 1."""
        clock, totals = self._clock, self._totals_ns
        if clock is None:
            return []
        if totals is None:
            if threading.get_ident() == self._owner:
                clock.enter(clock.enter(0))  # bring the account up to now
            totals = clock.totals_ns
        whole = sum(totals) or 1
        intervals = list(clock.intervals)  # at once: another thread may ask
        means = self._background.means(intervals) if self._background else {}
        rows = [
            PhaseRow(name, total * 1e-9, total / whole, *means.get(number, (None, None)))
            for number, (name, total) in enumerate(zip(list(self._phases), totals))
        ]
        return [*sorted(rows[1:], key=lambda row: -row.seconds), rows[0]]

    def __str__(self) -> str:
        return "\n".join(table(self.rows()))


def table(rows: list[PhaseRow]) -> Iterator[str]:
    """Rows for a terminal; what is not known is a –."""
    width = max([14, *(len(row.phase) + 2 for row in rows)])
    yield f"{'phase':<{width}}{'share':>8}{'seconds':>10}{'GPU use':>9}{'power':>9}"
    for row in rows:
        watts = LACKING if row.watts is None else f"{row.watts:.0f} W"
        use = percent(row.utilisation, 1)
        yield f"{row.phase:<{width}}{percent(row.share, 1):>8}{row.seconds:>10.2f}{use:>9}{watts:>9}"
    yield f"{'':<{width}}{percent(sum(row.share for row in rows), 1):>8}{sum(row.seconds for row in rows):>10.2f}"


class _NestedClock(PhaseClock):
    """Phases within each other; 0 is what lies outside of all."""

    def __init__(self) -> None:
        super().__init__(1, 0)
        self._left: list[int] = []  # phases to come back to

    def push(self, phase: int) -> None:
        """Switch to `phase` for a while."""
        self._left.append(self.enter(phase))

    def pop(self) -> None:
        """Go back to the phase that the last `push` left."""
        self.enter(self._left.pop())

    def grow(self, n_phases: int) -> None:
        """Make room for phases that were named since."""
        self.totals_ns += [0] * (n_phases - len(self.totals_ns))


class _Phase:
    """A named block of the meter's thread. It holds nothing of its own but its number."""

    __slots__ = ("_clock", "_number")

    def __init__(self, clock: _NestedClock, number: int) -> None:
        self._clock, self._number = clock, number

    def __enter__(self) -> None:
        self._clock.push(self._number)

    def __exit__(self, *_: object) -> None:
        self._clock.pop()
