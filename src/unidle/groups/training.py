"""Trains the runs of a group in one process."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from unidle.config import Config
from unidle.config.machine import available_cores
from unidle.engine.callbacks import ProgressDisplay
from unidle.engine.checkpoint.run_folder import RunFolder
from unidle.engine.interrupts import Interrupts
from unidle.engine.placement import choose_device
from unidle.engine.sharing import Sharing
from unidle.engine.trainer import Trainer
from unidle.groups.display import GroupDisplay
from unidle.groups.folder import GroupFolder
from unidle.groups.scheduler import Member, take_turns


@dataclass(frozen=True)
class GroupResult:
    """How the training of a group ended."""

    errors: dict[str, Exception]  # run → why it failed
    stopped_by: int | None  # the signal that stopped it early


# Builds the trainer of a run, and its folder.
NewRun = Callable[[Config, Path, ProgressDisplay, Sharing, Interrupts], tuple[Trainer, RunFolder]]


def train_group(group: GroupFolder, configs: Sequence[Config], new_run: NewRun, display: GroupDisplay) -> GroupResult:
    """Train one run per config; a run that fails does not affect the others."""
    device = choose_device(configs[0].engine.device)
    sharing, interrupts = Sharing.among(len(configs), device), Interrupts()
    trainers: list[Trainer] = []
    members: list[Member] = []
    with contextlib.closing(sharing.ready), interrupts:
        try:
            for config, path in zip(configs, group.runs, strict=True):
                stream = torch.cuda.Stream(device) if device.type == "cuda" else None
                with torch.cuda.stream(stream):  # None: no stream
                    trainer, folder = new_run(config, path, display.of(path.name), sharing, interrupts)
                trainers.append(trainer)
                members.append(Member(path.name, trainer.train_in_turns(folder), stream, trainer.close))
        except BaseException:
            for trainer in trainers:
                trainer.close()
            raise
        workers = sum(trainer.workers for trainer in trainers)
        take_turns(members, sharing.ready, yields_core=workers >= available_cores())
    errors = {member.name: member.error for member in members if member.error is not None}
    stopped = next((trainer.stopped_by for trainer in trainers if trainer.stopped_by is not None), None)
    return GroupResult(errors, stopped)
