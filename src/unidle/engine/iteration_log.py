"""The records of iterations: their contents, and which of them are written."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from unidle.engine.clock import RunClock
from unidle.engine.collect.device import DeviceCollector
from unidle.engine.collect.host import HostCollector
from unidle.engine.progress import Progress
from unidle.metrics.log import MetricLog
from unidle.metrics.monitor_csv import MonitorCsv

# A run writes about this many records, or more if they would be more than this many steps apart.
_RECORDS, _STEPS_PER_RECORD = 1000, 1000
_FIRST_EPISODES = 10  # after these, keys of `log_info` that none of them had are reported


class IterationLog:
    """Writes iteration records, but not all of them: writing each of a million short iterations would be slow."""

    def __init__(
        self,
        log: MetricLog,
        collector: HostCollector | DeviceCollector,
        progress: Progress,
        clock: RunClock,
        timesteps: int,
        say: Callable[[str], None],
        monitor: MonitorCsv | None = None,
    ) -> None:
        """`monitor` gets every episode, not only those of iterations that are written."""
        self._say, self._info_is_checked = say, False
        self._monitor = monitor
        if monitor is not None and isinstance(collector, HostCollector):
            collector.stats.keeps_rows = True
        self._log, self._collector, self._progress, self._clock = log, collector, progress, clock
        self._every = max(1, min(_STEPS_PER_RECORD, timesteps // _RECORDS))
        self._unwritten: dict[str, Any] | None = None  # the latest record

    def record(self, metrics: dict[str, float], steps: int, seconds: float) -> dict[str, Any]:
        """The record of an iteration of `steps` steps that took `seconds`."""
        progress = self._progress
        if self._monitor is not None and isinstance(self._collector, HostCollector):
            self._monitor.write(self._collector.stats.take_rows(), self._clock.wall())
        record: dict[str, Any] = {"kind": "iteration", "step": progress.step, "iteration": progress.iteration}
        record |= self._collector.metrics()
        record["rollout/steps_per_second"] = steps / seconds
        record |= {f"train/{name}": value for name, value in metrics.items() if not name.endswith("_finite")}
        return record | self._clock.record()

    def add(self, record: dict[str, Any], steps: int, *, is_last: bool) -> None:
        """Write the record of an iteration of `steps` steps, or keep it for `flush` if none is due."""
        self._unwritten = record
        if not self._info_is_checked and isinstance(self._collector, HostCollector):
            self._check_info(self._collector, self._collector.stats.episodes >= (1 if is_last else _FIRST_EPISODES))
        if is_last or is_due(self._progress.step - steps, self._progress.step, self._every):
            self.flush()

    def _check_info(self, collector: HostCollector, has_episodes: bool) -> None:
        """Report keys of `log_info` that no episode had, once some episodes have ended."""
        if not has_episodes:
            return
        self._info_is_checked = True
        missing = [f"`{key}`" for key, numbers in collector.stats.recent_info.items() if not numbers]
        if missing:
            found = ", ".join(collector.envs.block.names_in_info())
            has = f"the numbers there are {found}" if found else "there are no numbers"
            self._say(f"--log-info: no episode has ended with {' or '.join(missing)} in info so far; {has}.")

    def flush(self) -> None:
        """Write the latest record if it is not written yet."""
        if self._unwritten is not None:
            self._log.write(self._unwritten)
            self._unwritten = None


def is_due(before: int, after: int, every: int) -> bool:
    """Whether there is a multiple of `every` in (before, after]; False if `every` is 0."""
    return every > 0 and after // every > before // every
