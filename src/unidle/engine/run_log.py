"""Opens the log of a run with the metric writers that its settings ask for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from unidle.config import Config
from unidle.metrics.jsonl import JsonlWriter
from unidle.metrics.log import MetricLog
from unidle.metrics.tags import CLEANRL_TAGS, SB3_TAGS
from unidle.metrics.tensorboard import TensorBoardWriter
from unidle.metrics.wandb import WandbWriter
from unidle.metrics.writer import MetricWriter


def open_log(
    folder: Path, config: Config, step: int, writers: Sequence[MetricWriter], say: Callable[[str], None]
) -> MetricLog:
    """The log of a run that starts, or resumes, at `step`; `writers` are the user's own."""
    run = config.run
    built_in: list[MetricWriter] = []
    jsonl = JsonlWriter(folder / "metrics.jsonl", step, say)
    tags = (*SB3_TAGS, *(CLEANRL_TAGS if run.cleanrl_tags else ()))
    if run.tensorboard:
        built_in.append(TensorBoardWriter(folder / "tensorboard", step, tags))
    if run.wandb:
        built_in.append(WandbWriter(folder, config.flat(), step, tags))
    return MetricLog(jsonl, [*built_in, *writers], say)
