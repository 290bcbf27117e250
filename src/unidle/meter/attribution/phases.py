"""Phase timing for your own training loop: `with unidle.phase("rollout"):` blocks inside a `PhaseMeter`.

Without an active meter a phase costs one variable lookup, with one it costs two timestamps. Phases may be nested: time
counts for the innermost one, so the table sums to 100 %. Phases measure the host: one that only launches GPU work ends
before that work does.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol

from unidle.errors import UsageError
from unidle.formatting import MISSING, percent
from unidle.meter.sensors.background import Background
from unidle.timeline import PhaseClock

UNATTRIBUTED = "unattributed"


class Phase(Protocol):
    """The context manager that `phase` returns."""

    def __enter__(self) -> object:
        """Begin."""

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """End."""


class _NoPhase:
    __slots__ = ()

    def __enter__(self) -> None:
        return None

    def __exit__(self, *_: object) -> None:
        return None


_NO_PHASE = _NoPhase()
_active: PhaseMeter | None = None


def phase(name: str) -> Phase:
    """Record the time spent in a `with` block under `name`, if a `PhaseMeter` is active in this process."""
    meter = _active
    return _NO_PHASE if meter is None else meter.phase(name)


@dataclass(frozen=True)
class PhaseRow:
    """Time spent in one phase."""

    phase: str
    seconds: float
    share: float
    utilisation: float | None
    """Mean GPU utilisation by the driver, 0 to 1; None without a GPU or if the phase was too short."""
    watts: float | None


class PhaseMeter:
    """Measures the phases of a block: `with unidle.PhaseMeter() as meter: … ; print(meter)`.

    It measures the thread that enters the block and ignores phases of other threads.
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
        """Start measuring."""
        global _active
        if _active is not None:
            raise UsageError("A PhaseMeter is already active; stop it before you start another.")
        if self._clock is not None:
            raise UsageError("This PhaseMeter has already been used; create a new one for each block.")
        if self._background:
            self._background.start()
        self._owner, self._clock = threading.get_ident(), _NestedClock()
        self._phases[UNATTRIBUTED] = _Phase(self._clock, 0)
        _active = self

    def stop(self) -> None:
        """Stop measuring and close all open phases."""
        global _active
        if _active is self and self._clock is not None:
            _active = None
            self._clock.enter(0)
            self._totals_ns = list(self._clock.totals_ns)
            if self._background:
                self._background.stop()

    def phase(self, name: str) -> Phase:
        """Return the context manager for `name`; it is stateless and shared between calls."""
        if threading.get_ident() != self._owner or self._clock is None:
            return _NO_PHASE
        found = self._phases.get(name)
        if found is None:
            self._clock.grow(len(self._phases) + 1)
            found = self._phases[name] = _Phase(self._clock, len(self._phases))
        return found

    def rows(self) -> list[PhaseRow]:
        """Return the table so far: phases by length, then unattributed time; shares sum to 1."""
        clock, totals = self._clock, self._totals_ns
        if clock is None:
            return []
        if totals is None:
            if threading.get_ident() == self._owner:
                clock.enter(clock.enter(0))  # bring the totals up to date
            totals = clock.totals_ns
        whole = sum(totals) or 1
        intervals = list(clock.intervals)  # a copy: another thread may read concurrently
        means = self._background.means(intervals) if self._background else {}
        rows = [
            PhaseRow(name, total * 1e-9, total / whole, *means.get(number, (None, None)))
            for number, (name, total) in enumerate(zip(list(self._phases), totals))
        ]
        return [*sorted(rows[1:], key=lambda row: -row.seconds), rows[0]]

    def __str__(self) -> str:
        return "\n".join(table(self.rows()))


def table(rows: list[PhaseRow]) -> Iterator[str]:
    """Format rows for a terminal; unknown values are shown as –."""
    width = max([14, *(len(row.phase) + 2 for row in rows)])
    yield f"{'phase':<{width}}{'share':>8}{'seconds':>10}{'GPU use':>9}{'power':>9}"
    for row in rows:
        watts = MISSING if row.watts is None else f"{row.watts:.0f} W"
        use = percent(row.utilisation, 1)
        yield f"{row.phase:<{width}}{percent(row.share, 1):>8}{row.seconds:>10.2f}{use:>9}{watts:>9}"
    yield f"{'':<{width}}{percent(sum(row.share for row in rows), 1):>8}{sum(row.seconds for row in rows):>10.2f}"


class _NestedClock(PhaseClock):
    """A clock for nested phases; phase 0 is the time outside all of them."""

    def __init__(self) -> None:
        super().__init__(1, 0)
        self._enclosing: list[int] = []  # phases to return to

    def push(self, phase: int) -> None:
        """Enter a nested phase."""
        self._enclosing.append(self.enter(phase))

    def pop(self) -> None:
        """Return to the enclosing phase."""
        self.enter(self._enclosing.pop())

    def grow(self, n_phases: int) -> None:
        """Make room for new phases."""
        self.totals_ns += [0] * (n_phases - len(self.totals_ns))


class _Phase:
    """A phase of the meter's thread; stateless except for its number."""

    __slots__ = ("_clock", "_number")

    def __init__(self, clock: _NestedClock, number: int) -> None:
        self._clock, self._number = clock, number

    def __enter__(self) -> None:
        self._clock.push(self._number)

    def __exit__(self, *_: object) -> None:
        self._clock.pop()
