"""Where the host's time goes: every instant of a run belongs to exactly one phase, so the shares sum to 1."""

from __future__ import annotations

from time import perf_counter_ns

ENVIRONMENT, INFERENCE, LEARN, EVALUATE, CHECKPOINT, OTHER = range(6)
PHASES = ("environment", "inference", "learn", "evaluate", "checkpoint", "other")


class Timeline:
    """A clock that is always in one phase. Entering the next one ends the last: nothing is lost or counted twice."""

    def __init__(self, capacity: int = 1 << 16) -> None:
        self.totals_ns = [0] * len(PHASES)
        self._phase = OTHER
        self._since = perf_counter_ns()
        # The latest intervals, for whoever wants more than totals: (phase, start, end), oldest overwritten first.
        self._ring: list[tuple[int, int, int]] = [(OTHER, 0, 0)] * capacity
        self._written = 0

    def begin(self) -> None:
        """Let the account start now: what was before belongs to no phase."""
        self.totals_ns = [0] * len(PHASES)
        self._phase, self._since = OTHER, perf_counter_ns()

    def enter(self, phase: int) -> int:
        """Switch to `phase` and return the one that ended; about half a microsecond."""
        now = perf_counter_ns()
        ended = self._phase
        self.totals_ns[ended] += now - self._since
        self._ring[self._written % len(self._ring)] = (ended, self._since, now)
        self._written += 1
        self._phase, self._since = phase, now
        return ended

    def intervals(self) -> list[tuple[int, int, int]]:
        """The intervals still in the ring, oldest first."""
        start = self._written % len(self._ring)
        if self._written < len(self._ring):
            return self._ring[: self._written]
        return self._ring[start:] + self._ring[:start]

    def seconds(self) -> dict[str, float]:
        """Seconds per phase so far, the open phase included."""
        self.enter(self._phase)
        return {name: total * 1e-9 for name, total in zip(PHASES, self.totals_ns)}
