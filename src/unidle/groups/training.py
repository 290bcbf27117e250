"""Trains the runs of a group in one process."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from unidle.config import Config
from unidle.config.machine import available_cores
from unidle.engine.callbacks import ProgressDisplay
from unidle.engine.checkpoint.run_folder import RunFolder
from unidle.engine.interrupts import Interrupts
from unidle.engine.other_trainers import OtherTrainers
from unidle.engine.placement import choose_device
from unidle.engine.sharing import Sharing
from unidle.engine.trainer import Trainer
from unidle.errors import TrainingError, UsageError
from unidle.groups.display import GroupDisplay, MemberDisplay
from unidle.groups.scheduler import Member, take_turns


def in_words(error: Exception, *, with_traceback: bool = False) -> str:
    """Why a run failed; with the kind of error, and where it was raised, if that is no message of unidle's."""
    if isinstance(error, (TrainingError, UsageError)):
        return str(error)
    lines = traceback.format_exception(error) if with_traceback else traceback.format_exception_only(error)
    return "".join(lines).rstrip()


# Builds the trainer of a run, and its folder.
NewRun = Callable[[Config, Path, ProgressDisplay, Sharing, Interrupts], tuple[Trainer, RunFolder]]


@dataclass(frozen=True)
class SharedProcess:
    """What the runs of a group share, and how each of them is built."""

    device: torch.device
    sharing: Sharing
    interrupts: Interrupts
    _new_run: NewRun

    @staticmethod
    @contextlib.contextmanager
    def among(members: int, device: torch.device, new_run: NewRun) -> Iterator[SharedProcess]:
        """For up to so many runs at a time; inside the block, Ctrl-C stops them."""
        interrupts = Interrupts()
        with OtherTrainers() as others, interrupts:
            sharing = Sharing.among(members, device, others)
            with contextlib.closing(sharing.ready):
                yield SharedProcess(device, sharing, interrupts, new_run)

    def new_member(self, config: Config, path: Path, display: MemberDisplay) -> tuple[Trainer, Member]:
        """A run, ready for its first turn."""
        stream = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None
        with torch.cuda.stream(stream):  # None: no stream
            trainer, folder = self._new_run(config, path, display, self.sharing, self.interrupts)

        def close() -> None:
            folder.unlock()  # a run that has had no turn still has the lock
            trainer.close()

        def say(error: Exception) -> None:
            display.on_failure(in_words(error, with_traceback=True))

        return trainer, Member(path.name, trainer.train_in_turns(folder), stream, close, say)


def yields_core(trainers: Iterable[Trainer]) -> bool:
    """Whether the workers of these runs need all cores, so that the trainer must not keep one while it waits."""
    return sum(trainer.workers for trainer in trainers) >= available_cores()


def train_group(
    configs: Mapping[Path, Config], new_run: NewRun, display: GroupDisplay, failures: dict[str, str]
) -> int | None:
    """Train one run per folder in `configs`; one that fails is noted in `failures`, and does not affect the others.

    If one cannot be built, none is trained. Returns the signal that stopped the group early.
    """
    trainers: list[Trainer] = []
    members: list[Member] = []
    device = choose_device(next(iter(configs.values())).engine.device)
    with SharedProcess.among(len(configs), device, new_run) as process:
        with contextlib.ExitStack() as built:
            for path, config in configs.items():
                if process.interrupts.received is not None:
                    break
                trainer, member = process.new_member(config, path, display.of(path.name))
                built.callback(member.end)
                trainers.append(trainer)
                members.append(member)
            built.pop_all()
        try:
            take_turns(members, process.sharing.ready, yields_core=yields_core(trainers))
        finally:  # also after a second Ctrl-C
            failures.update({member.name: in_words(member.error) for member in members if member.error is not None})
    is_complete = len(members) == len(configs) and all(trainer.stopped_by is None for trainer in trainers)
    return None if is_complete else process.interrupts.received
