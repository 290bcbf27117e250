"""Builds and trains runs in their folders, and writes their reports."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any

from unidle.algos.schedules import Schedule
from unidle.api.trained import TrainedGroup, TrainedRun, print_message
from unidle.config import Config
from unidle.config.files import display_path
from unidle.config.machine import limit_threads
from unidle.config.resolve import shown_notes
from unidle.distributed.place import require_one_rank
from unidle.distributed.ranks import Ranks, stage
from unidle.distributed.share import quiet_share
from unidle.engine.callbacks import Callbacks, ProgressDisplay, SilentDisplay
from unidle.engine.checkpoint.no_folder import NoFolder
from unidle.engine.checkpoint.provenance import provenance
from unidle.engine.checkpoint.rank_folder import RankFolder
from unidle.engine.checkpoint.run_folder import RunFolder
from unidle.engine.checkpoint.warm_start import warm_start
from unidle.engine.interrupts import Interrupts
from unidle.engine.other_trainers import OtherTrainers
from unidle.engine.placement import choose_device
from unidle.engine.sharing import Sharing
from unidle.engine.trainer import Trainer
from unidle.envs.make import EnvMaker
from unidle.errors import TrainingError, UsageError
from unidle.groups.display import GroupDisplay
from unidle.groups.folder import GroupFolder
from unidle.groups.page import write_group_page
from unidle.groups.training import Supervisor, train_group
from unidle.meter.attribution.run_meter import RunMeter
from unidle.metrics.writer import MetricWriter
from unidle.nn.actor_critic import NetworkFactory
from unidle.output import guarded_output
from unidle.report.page.report import write_report
from unidle.report.terminal.messages import Messages
from unidle.report.terminal.progress import Display


@dataclasses.dataclass(frozen=True)
class Build:
    """The arguments that new and resumed runs have in common."""

    maker: EnvMaker
    network: NetworkFactory | None
    callbacks: Callbacks
    writers: Sequence[MetricWriter]
    quiet: bool
    cwd: Path  # before an environment could change it
    state: dict[str, Any] | None = None
    schedules: Mapping[str, Schedule] = dataclasses.field(default_factory=dict)

    @guarded_output()
    def train(
        self, config: Config, path: Path, notes: Sequence[str], is_new: bool, ranks: Ranks | None = None
    ) -> TrainedRun:
        """Train one run in the folder `path`; with `ranks`, as one of them."""
        limit_threads()
        if ranks is not None and not ranks.is_first:
            return self._train_rank(config, path, ranks)
        with nullcontext(_Quiet()) if self.quiet else Display() as display, OtherTrainers() as others:
            for note in shown_notes(notes, self.quiet):
                display.on_message(note)
            meter = RunMeter(display.on_message, display.on_meter, trace=config.run.trace)
            with stage(ranks):
                trainer = self._trainer(config, display, meter=meter, others=others, ranks=ranks)
            try:
                with stage(ranks):
                    folder = self._folder(trainer, path, display, is_new=is_new)
                folder.ranks = 1 if ranks is None else ranks.size
                try:
                    trainer.train(folder, self.state)
                except KeyboardInterrupt:
                    kept = "the last checkpoint is kept" if folder.latest() else "there is no checkpoint yet"
                    raise KeyboardInterrupt(kept) from None
                except Exception:
                    with suppress(Exception):  # raise the original error
                        write_report(path)
                    raise
            finally:
                trainer.close()
        self.report(write_report, path, display)
        trained = TrainedRun(path, self.maker, self.network)
        trained.stopped_by = trainer.stopped_by
        return trained

    def _train_rank(self, config: Config, path: Path, ranks: Ranks) -> TrainedRun:
        """Train as one of `ranks` other than rank 0, silently; only its part of checkpoints is written."""
        display = _Silent()
        with stage(ranks):
            trainer = Trainer(
                quiet_share(config), self.maker, display, network=self.network, schedules=self.schedules, ranks=ranks
            )
        try:
            with stage(ranks):  # rank 0 creates the folder
                folder = RankFolder(path, ranks.rank)
            trainer.train(folder)
        finally:
            trainer.close()
        return TrainedRun(path, self.maker, self.network)

    @guarded_output()
    def train_without_folder(self, config: Config) -> int | None:
        """Train one run that keeps no files; returns the signal that stopped it early, if one did.

        Its callbacks get the state, with which `state` of another run continues.
        """
        limit_threads()
        require_one_rank("A run without a folder")
        with nullcontext(_Quiet()) if self.quiet else Display() as display, OtherTrainers() as others:
            trainer = self._trainer(config, display, others=others)
            try:
                if config.run.init_from is not None and self.state is None:
                    warm_start(config, trainer.algo, trainer.collector, trainer.env_spec, display.on_message)
                trainer.train(NoFolder(), self.state)
            finally:
                trainer.close()
        return trainer.stopped_by

    @guarded_output()
    def train_group(
        self,
        group: GroupFolder,
        configs: Mapping[Path, Config],
        notes: Sequence[str],
        failures: Mapping[str, str] | None = None,
        supervisor: Supervisor | None = None,
    ) -> TrainedGroup:
        """Train the runs of a group, each in its own folder; TrainingError at the end if some of them failed.

        `failures`: why those that have no config cannot be trained, by the names of their folders.
        """
        limit_threads()
        require_one_rank("A group of runs")
        failed = dict(failures or {})
        with GroupDisplay([path.name for path in group.runs], quiet=self.quiet) as display:
            for note in shown_notes(notes, self.quiet):
                display.on_message(note)
            for name, reason in failed.items():
                display.of(name).on_failure(reason)
            try:
                stopped_by = train_group(configs, self.new_run, display, failed, supervisor)
            except BaseException as error:
                if group.has_checkpoint:
                    with suppress(Exception):  # raise the original error
                        self._close_group(group, failed, display)
                if isinstance(error, KeyboardInterrupt):
                    kept = "the last checkpoints are kept" if group.has_checkpoint else "there is no checkpoint yet"
                    raise KeyboardInterrupt(kept) from None
                raise
        self._close_group(group, failed, display)
        if failed:
            reasons = "\n".join(f"{name}: {reason}" for name, reason in failed.items())
            raise TrainingError(
                f"{len(failed)} of {len(group.runs)} runs in {display_path(group.path)} failed.\n{reasons}"
            )
        trained = TrainedGroup(group.path, self.maker, self.network)
        trained.stopped_by = stopped_by
        return trained

    def _close_group(self, group: GroupFolder, failures: Mapping[str, str], display: GroupDisplay) -> None:
        """Write what has failed, and the reports."""
        group.save(failures)
        for path in group.runs:
            with suppress(UsageError):  # its files cannot be read: the page of the group says so
                self.report(write_report, path, display)
        self.report(partial(write_group_page, runs=group.runs, failures=group.failures), group.path, display)

    def new_run(
        self, config: Config, path: Path, display: ProgressDisplay, sharing: Sharing, interrupts: Interrupts
    ) -> tuple[Trainer, RunFolder]:
        """A run of a group, new or resumed: its trainer, and its folder."""
        trainer = self._trainer(config, display, others=sharing.others, sharing=sharing, interrupts=interrupts)
        try:
            is_new = not (path / "config.yaml").is_file()
            return trainer, self._folder(trainer, path, display, is_new=is_new)
        except BaseException:
            trainer.close()
            raise

    def _trainer(self, config: Config, display: ProgressDisplay, **parts: Any) -> Trainer:
        own: dict[str, Any] = {"network": self.network, "callbacks": self.callbacks, "writers": self.writers}
        return Trainer(config, self.maker, display, schedules=self.schedules, **own, **parts)

    def _folder(self, trainer: Trainer, path: Path, display: ProgressDisplay, *, is_new: bool) -> RunFolder:
        """The folder of the run, locked; for a new run, only once its networks are known to fit."""
        config = trainer.config
        if config.run.init_from is not None and RunFolder(path).latest() is None:
            parts = trainer.algo, trainer.collector, trainer.env_spec
            warm_start(config, *parts, display.on_message)
        made_with = provenance(choose_device(config.engine.device), self.cwd)
        if is_new:
            return RunFolder.create(path, config, made_with)
        folder = RunFolder.open(path)
        folder.lock()
        folder.provenance = made_with
        return folder

    def report(self, write: Callable[[Path], Path], path: Path, display: Display | GroupDisplay | _Quiet) -> None:
        """Write the report of the run or group in the folder `path`."""
        try:
            write(path)
        except OSError as error:  # the run itself is complete and saved
            display.on_message(f"The report could not be written to {display_path(path)} ({error.strerror}).")


class _Silent(SilentDisplay):
    """Shows nothing: rank 0 does."""

    def on_message(self, text: str) -> None:
        """Show nothing."""


class _Quiet(SilentDisplay):
    """Prints messages only."""

    def __init__(self) -> None:
        self._messages = Messages(lambda text, style: print_message(text))

    def on_message(self, text: str) -> None:
        self._messages.show(text)

    def on_end(self) -> None:
        self._messages.close()
