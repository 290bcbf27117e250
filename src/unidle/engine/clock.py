"""The time that a run has taken, over all processes that worked on it."""

from __future__ import annotations

from time import perf_counter

from unidle.timeline import Timeline


class RunClock:
    """Seconds since the run began, in all and by what they went to; resumed parts are counted in."""

    def __init__(self, timeline: Timeline) -> None:
        self._timeline = timeline
        self._began: float | None = None
        self._wall_before = 0.0  # seconds trained before this process took over
        self._seconds_before: dict[str, float] = {}

    def begin(self) -> None:
        """From here on it is the run's time."""
        self._timeline.begin()
        self._began = perf_counter()

    def wall(self) -> float:
        """Seconds in all."""
        return self._wall_before + (0.0 if self._began is None else perf_counter() - self._began)

    def seconds(self) -> dict[str, float]:
        """Seconds by phase."""
        return {name: s + self._seconds_before.get(name, 0.0) for name, s in self._timeline.seconds().items()}

    def record(self) -> dict[str, float]:
        """Both, as a metrics record names them."""
        return {"wall": self.wall(), **{f"time/{name}": seconds for name, seconds in self.seconds().items()}}

    def go_on_from(self, wall: float, seconds: dict[str, float]) -> None:
        """Take over from the process that wrote a checkpoint."""
        self._wall_before, self._seconds_before = wall, seconds
