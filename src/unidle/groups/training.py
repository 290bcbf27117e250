"""Trains the runs of a group in one process."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

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
from unidle.groups.scheduler import Member, Successors, no_successors, take_turns


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
            with contextlib.closing(sharing.pools):
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

    def take_turns(self, members: Iterable[Member], workers: int, successors: Successors = no_successors) -> None:
        """Run members with so many worker processes in all, and their successors, to their ends."""
        pools = self.sharing.pools
        # Whether the workers need all cores, so that this process must not keep one while it waits.
        yields_core = pools.cores is None and workers >= available_cores()
        take_turns(members, pools, yields_core=yields_core, successors=successors)


class Supervisor(Protocol):
    """Follows the training of a group, and may replace runs that have ended."""

    def begin(self, process: GroupProcess) -> None:
        """The group starts to train in this process."""

    def joined(self, member: Member, trainer: Trainer, path: Path) -> None:
        """A run is ready for its first turn."""

    def successors(self, member: Member) -> Iterable[Member]:
        """The runs that follow one that has ended."""


class Unsupervised:
    """Each run trains once. Implements `Supervisor`."""

    def begin(self, process: GroupProcess) -> None:
        """Do nothing."""

    def joined(self, member: Member, trainer: Trainer, path: Path) -> None:
        """Do nothing."""

    def successors(self, member: Member) -> Iterable[Member]:
        """None."""
        return ()


@dataclass(frozen=True)
class GroupProcess:
    """The runs of a group, as they train in this process."""

    shared: SharedProcess
    supervisor: Supervisor
    _display: GroupDisplay
    members: dict[Path, Member] = field(default_factory=dict)
    trainers: dict[Path, Trainer] = field(default_factory=dict)

    def join(self, config: Config, path: Path) -> Member:
        """A run of the group, or one that replaces it in its folder."""
        trainer, member = self.shared.new_member(config, path, self._display.of(path.name))
        self.trainers[path], self.members[path] = trainer, member
        self.supervisor.joined(member, trainer, path)
        return member

    def replace(self, config: Config, path: Path) -> list[Member]:
        """The run that replaces one that has ended; none, and a failure of that run, if it cannot be built."""
        try:
            return [self.join(config, path)]
        except Exception as error:
            self.members[path].error = error
            self._display.of(path.name).on_failure(in_words(error))
            return []

    @property
    def failures(self) -> dict[str, str]:
        """Why runs have failed, by their names."""
        members = self.members.values()
        return {member.name: in_words(member.error) for member in members if member.error is not None}


def train_group(
    configs: Mapping[Path, Config],
    new_run: NewRun,
    display: GroupDisplay,
    failures: dict[str, str],
    supervisor: Supervisor | None = None,
) -> int | None:
    """Train one run per folder in `configs`; one that fails is noted in `failures`, and does not affect the others.

    If one cannot be built, none is trained. Returns the signal that stopped the group early.
    """
    device = choose_device(next(iter(configs.values())).engine.device)
    with SharedProcess.among(len(configs), device, new_run) as shared:
        process = GroupProcess(shared, supervisor or Unsupervised(), display)
        process.supervisor.begin(process)
        with contextlib.ExitStack() as built:
            for path, config in configs.items():
                if shared.interrupts.received is not None:
                    break
                built.callback(process.join(config, path).end)
            built.pop_all()
        trainers = process.trainers.values()
        try:
            workers = sum(trainer.workers for trainer in trainers)
            shared.take_turns(list(process.members.values()), workers, process.supervisor.successors)
        finally:  # also after a second Ctrl-C
            failures.update(process.failures)
        is_complete = len(trainers) == len(configs) and all(trainer.stopped_by is None for trainer in trainers)
        return None if is_complete else shared.interrupts.received
