"""A thread's time as a row of phases without a gap: entering the next ends the last, and a ring keeps the latest."""

from __future__ import annotations

from time import perf_counter_ns


class Lane:
    """A clock that is always in one phase, a number below `n_phases`; `rest` is the one outside of all others."""

    __slots__ = ("_capacity", "_phase", "_ring", "_since", "_stack", "_written", "totals_ns")

    def __init__(self, n_phases: int, rest: int, capacity: int = 1 << 16) -> None:
        self._capacity = capacity
        self.totals_ns = [0] * n_phases
        self._ring: list[tuple[int, int, int]] = [(rest, 0, 0)] * capacity
        self._written = 0
        self._stack: list[int] = []  # phases to come back to
        self._phase, self._since = rest, perf_counter_ns()

    def enter(self, phase: int) -> int:
        """Switch to `phase` and return the one that ended."""
        now = perf_counter_ns()
        ended, since = self._phase, self._since
        self.totals_ns[ended] += now - since
        self._ring[self._written % self._capacity] = (ended, since, now)
        self._written += 1
        self._phase, self._since = phase, now
        return ended

    def push(self, phase: int) -> None:
        """Switch to `phase` for a while."""
        self._stack.append(self.enter(phase))

    def pop(self) -> None:
        """Go back to the phase that the last `push` left."""
        self.enter(self._stack.pop())

    def grow(self, n_phases: int) -> None:
        """Make room for phases that were named since."""
        self.totals_ns += [0] * (n_phases - len(self.totals_ns))

    def intervals(self) -> list[tuple[int, int, int]]:
        """(phase, start, end) of the intervals still in the ring, oldest first; the open one is not among them."""
        start = self._written % self._capacity
        if self._written <= self._capacity:
            return self._ring[: self._written]
        return self._ring[start:] + self._ring[:start]
