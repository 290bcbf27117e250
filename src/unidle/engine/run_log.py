"""Opens the log of a run, its metric writers and its monitor.csv, as its settings ask for."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from pathlib import Path

from unidle.config import Config
from unidle.engine.checkpoint.run_folder import RunFolder
from unidle.engine.collect.device import DeviceCollector
from unidle.engine.collect.host import HostCollector
from unidle.metrics.jsonl import JsonlWriter
from unidle.metrics.log import MetricLog
from unidle.metrics.monitor_csv import FILE, MonitorCsv
from unidle.metrics.tags import CLEANRL_TAGS, SB3_TAGS
from unidle.metrics.tensorboard import TensorBoardWriter
from unidle.metrics.wandb import WandbWriter
from unidle.metrics.writer import MetricWriter


def open_log(
    folder: RunFolder, config: Config, step: int, writers: Sequence[MetricWriter], say: Callable[[str], None]
) -> MetricLog:
    """The log of a run that starts, or resumes, at `step`; `writers` are the user's own."""
    if not folder.is_kept:
        return MetricLog(None, writers, say)
    run, path = config.run, folder.path
    built_in: list[MetricWriter] = []
    tags = (*SB3_TAGS, *(CLEANRL_TAGS if run.cleanrl_tags else ()))
    with contextlib.ExitStack() as opened:  # closes them if another one cannot be opened
        jsonl = opened.enter_context(contextlib.closing(JsonlWriter(path / "metrics.jsonl", step, say)))
        if run.tensorboard:
            writer = TensorBoardWriter(path / "tensorboard", step, tags)
            built_in.append(opened.enter_context(contextlib.closing(writer)))
        if run.wandb:
            built_in.append(WandbWriter(path, config.flat(), step, tags))
        opened.pop_all()
    return MetricLog(jsonl, [*built_in, *writers], say)


def open_monitor(
    folder: Path,
    config: Config,
    collector: HostCollector | DeviceCollector,
    wall: float,
    say: Callable[[str], None],
) -> MonitorCsv | None:
    """The file of a run's episodes, which continues after those in the checkpoint; None if the settings ask for none.

    The run has trained for `wall` seconds.
    """
    run = config.run
    if not run.monitor_csv or not isinstance(collector, HostCollector):
        return None
    return MonitorCsv(folder / FILE, run.env, run.log_info, collector.stats.rows_taken, wall, say)
