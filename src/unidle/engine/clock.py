"""The wall time of a run, including the time before it was resumed."""

from __future__ import annotations

from time import perf_counter

from unidle.timeline import PHASES, Timeline

_NAMES = [f"time/{phase}" for phase in PHASES]


class RunClock:
    """Seconds of training, in total and by phase, including the time before a resume."""

    def __init__(self, timeline: Timeline) -> None:
        self._timeline = timeline
        self._began: float | None = None
        self._wall_before = 0.0  # seconds before the resume
        self._seconds_before: dict[str, float] = {}

    def begin(self) -> None:
        """Start counting."""
        self._timeline.begin()
        self._began = perf_counter()

    def end(self) -> None:
        """The run is over."""
        self._timeline.end()

    def wall(self) -> float:
        """Seconds in total."""
        return self._wall_before + (0.0 if self._began is None else perf_counter() - self._began)

    def seconds(self) -> dict[str, float]:
        """Seconds by phase."""
        return {name: s + self._seconds_before.get(name, 0.0) for name, s in self._timeline.seconds().items()}

    def record(self) -> dict[str, float]:
        """Total and seconds by phase, as metrics of a record."""
        return {"wall": self.wall(), **dict(zip(_NAMES, self.seconds().values()))}

    def resume(self, wall: float, seconds: dict[str, float]) -> None:
        """Continue from a checkpoint's times."""
        self._wall_before, self._seconds_before = wall, seconds
