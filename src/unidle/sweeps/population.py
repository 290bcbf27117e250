"""`unidle train --seeds 8 --pbt`: population-based training of a group.

Members are compared at each evaluation, at the same step. The worst end there, and go on in the same slots as new runs
of the same folders: with their environments, the weights and optimiser of a better member, and its settings, perturbed.

Results do not depend on timing: all wait until each has reached the step, and a decision follows from the seed, the
step and the evaluations. A comparison is recorded once all checkpoints that belong to it are written. So a population
that is killed repeats at most one comparison, with the same outcome.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from unidle.config import Config
from unidle.config.resolve import learned_with, learning_settings
from unidle.engine.checkpoint.checkpoint_file import load_checkpoint
from unidle.engine.checkpoint.run_folder import RunFolder
from unidle.engine.trainer import Trainer
from unidle.engine.turns import Turns
from unidle.groups.exploits import Comparison, Exploit, read_comparisons, write_comparisons
from unidle.groups.folder import GroupFolder
from unidle.groups.scheduler import Member
from unidle.groups.training import GroupProcess
from unidle.report.history import number, read_history
from unidle.sweeps.exploit import compare
from unidle.sweeps.space import Space, trial_config

_OF_THE_ENVIRONMENTS = ("experience", "return_carry")  # parts of an algorithm's state that a member keeps


@dataclass(eq=False)
class _Slot:
    """A member of the population that trains."""

    path: Path
    trainer: Trainer
    waits_at: int | None = None  # the comparison that it has reached


class Population:
    """Compares the members of a group as they train, and replaces the worst. Implements `Supervisor`."""

    def __init__(self, group: GroupFolder, space: Space, initial: Mapping[str, dict[str, Any]], config: Config) -> None:
        """`initial`: the settings with which the members start, by their names; `config` is that of one of them."""
        self._group, self._space = group, space
        self._interval, self._seed = config.run.evaluation_interval, group.seeds[0]
        self._comparisons = read_comparisons(group.path)
        self._done = self._comparisons[-1].step // self._interval if self._comparisons else 0
        self.settings = dict(initial)
        for comparison in self._comparisons:
            self.settings |= {each.member: each.after for each in comparison.exploits}
        self._slots: dict[Member, _Slot] = {}
        self._decided: Comparison | None = None  # whose exploits are not complete
        self._leaving: list[tuple[Path, Config]] = []  # those of its members that have ended

    _process: GroupProcess

    # -- groups.training.Supervisor ------------------------------------------------------------------------------------

    def begin(self, process: GroupProcess) -> None:
        """The group starts to train in this process."""
        self._process = process

    def joined(self, member: Member, trainer: Trainer, path: Path) -> None:
        """A member is ready for its first turn."""
        self._slots[member] = slot = _Slot(path, trainer)
        trainer.pause = lambda: self._wait(slot)

    def successors(self, member: Member) -> Iterable[Member]:
        """Those that replace the members that a comparison has ended, once all of these have."""
        slot, decided = self._slots.pop(member), self._decided
        if decided is None or self._is_stopping:
            return ()
        if self._is_replaced(slot) and member.error is None:
            self._leaving.append((slot.path, slot.trainer.config))
        if any(map(self._is_replaced, self._slots.values())):
            return ()
        del slot
        for path, _ in self._leaving:
            self._process.trainers.pop(path, None)
        gc.collect()  # networks and CUDA graphs, before those of the successors are built
        leaving, self._leaving, self._decided = self._leaving, [], None
        exploits = {each.member: each for each in decided.exploits}
        configs = {path: self._apply(exploits[path.name], path, config) for path, config in leaving}
        self._record(replace(decided, exploits=tuple(exploits[path.name] for path in configs)))
        return [member for path, config in configs.items() for member in self._process.replace(config, path)]

    # -- comparing -----------------------------------------------------------------------------------------------------

    @property
    def _is_stopping(self) -> bool:
        return self._process.shared.interrupts.received is not None

    def _is_replaced(self, slot: _Slot) -> bool:
        return self._decided is not None and any(slot.path.name == each.member for each in self._decided.exploits)

    def _all_wait_at(self, mark: int) -> bool:
        return self._decided is None and all(slot.waits_at == mark for slot in self._slots.values())

    def _wait(self, slot: _Slot) -> Turns[None]:
        """Between two iterations of a member: at a comparison, wait for the others and for its outcome."""
        mark = slot.trainer.progress.step // self._interval
        if mark <= self._done:
            return
        slot.trainer.save()  # what a killed population continues from
        slot.waits_at = mark

        def goes_on() -> bool:
            return mark <= self._done or self._is_stopping or self._is_replaced(slot)

        while not goes_on():
            if self._all_wait_at(mark):
                self._compare(mark)
            else:
                yield lambda: goes_on() or self._all_wait_at(mark)

    def _compare(self, mark: int) -> None:
        """Decide who is replaced; all members wait."""
        scores = {}
        for slot in self._slots.values():
            latest = read_history(slot.path).final_evaluation
            mean_return = None if latest is None else number(latest, "eval/return_mean")
            if latest is not None and latest["step"] == slot.trainer.progress.step and mean_return is not None:
                scores[slot.path.name] = mean_return
        step = max(slot.trainer.progress.step for slot in self._slots.values())
        decided = compare(step, scores, self.settings, self._space, self._seed)
        if not decided.exploits:
            self._record(decided)
            return
        self._decided = decided
        for slot in self._slots.values():
            if self._is_replaced(slot):
                slot.trainer.stop()

    # -- replacing -----------------------------------------------------------------------------------------------------

    def _apply(self, exploit: Exploit, path: Path, config: Config) -> Config:
        """Write the checkpoint and the config with which a member that has ended goes on."""
        folder = RunFolder.open(path)
        own, other = _latest(path), _latest(self._group.path / exploit.source)
        kept = {name: own["algo"][name] for name in _OF_THE_ENVIRONMENTS if name in own["algo"]}
        config = trial_config(config, exploit.after)
        state = {**own, "algo": {**other["algo"], **kept}, "settings": learning_settings(config)}
        folder.save(state, own["step"], config.run.keep_checkpoints)
        folder.save_config(config, own["step"])
        return config

    def _record(self, comparison: Comparison) -> None:
        self._comparisons.append(comparison)
        write_comparisons(self._group.path, self._comparisons)
        self.settings |= {each.member: each.after for each in comparison.exploits}
        self._done = comparison.step // self._interval


def _latest(path: Path) -> dict[str, Any]:
    """The latest checkpoint of a member."""
    checkpoint = RunFolder.open(path).latest()
    assert checkpoint is not None  # it has saved one while it waited
    return load_checkpoint(checkpoint)


def complete_exploit(path: Path) -> None:
    """Write the config of a replaced member, if the process was killed right after it wrote the checkpoint."""
    folder = RunFolder.open(path)
    checkpoint = folder.latest()
    if checkpoint is not None:
        config = folder.config()
        learned = config.with_values(learned_with(load_checkpoint(checkpoint)["settings"]), "checkpoint")
        if learned != config:
            folder.save_config(learned)
