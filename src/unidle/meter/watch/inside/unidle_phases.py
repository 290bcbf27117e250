"""Reads the phases of an unidle run in this process, which measures them exactly.

A stack shows only where a thread is; the run knows which phase that belongs to. Nothing is imported: in a program
without unidle there are no phases.
"""

from __future__ import annotations

import sys
import threading
from typing import Any

NO_PHASE = -1


def current_phases() -> dict[int, int]:
    """Return the number of the phase that each thread is in, if it runs training."""
    return {thread: timeline.current for thread, timeline in list(_timelines().items())}


def phase_names() -> list[str]:
    """Return the names of all phases; empty without unidle."""
    return list(getattr(sys.modules.get("unidle.timeline"), "PHASES", ()))


class PhaseTotals:
    """The time of each phase in all runs of the main thread so far."""

    def __init__(self) -> None:
        self.totals_ns: list[int] = []
        self._timeline: Any = None
        self._counted: list[int] = []

    def update(self) -> None:
        """Add the time since the last call."""
        if self._timeline is not None:
            now = self._timeline.totals_now_ns()
            self.totals_ns += [0] * (len(now) - len(self.totals_ns))
            for number, total in enumerate(now):
                self.totals_ns[number] += max(0, total - self._counted[number])
            self._counted = now
        timeline = _timelines().get(threading.main_thread().ident or 0)
        if timeline is not self._timeline:
            self._timeline, self._counted = timeline, [0] * len(phase_names())


def _timelines() -> dict[int, Any]:
    return getattr(sys.modules.get("unidle.timeline"), "running", None) or {}
