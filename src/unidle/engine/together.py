"""What the ranks of a data-parallel run agree on, at the same points of every iteration.

    collect → [can all continue?] → learn → [episodes of all] → log, evaluate → [failures, then: stop? save?] → …

Only rank 0 logs and evaluates, and only it decides what depends on time, such as when to save. A run in one process
agrees with itself: then nothing here communicates.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from unidle.algos.registry import Algorithm
from unidle.config import Config
from unidle.config.files import display_path
from unidle.distributed.ranks import Ranks
from unidle.engine.checkpoint.rank_folder import for_other_ranks, load_together, require_equal_weights, shared_tensors
from unidle.engine.checkpoint.run_folder import RunFolder
from unidle.engine.collect.host import HostCollector
from unidle.engine.evaluate.play import Stopped
from unidle.engine.overlap import ENV_FAILURES
from unidle.engine.progress import Progress
from unidle.engine.turns import Turns
from unidle.envs.protocol import Fault
from unidle.errors import DivergedError, ResumableError, TrainingError, UsageError, WriteError

_T = TypeVar("_T")
State = dict[str, Any]


@dataclass(frozen=True)
class _Request:
    """What a rank wants after an iteration."""

    stop: bool
    signal: int | None
    save: bool
    messages: list[str]  # what only this rank may know


class Together:
    """The agreements of one rank with the others; with `ranks` None, of a run in one process with itself."""

    def __init__(self, ranks: Ranks | None, config: Config, progress: Progress, save: Callable[[], None]) -> None:
        """`config` is that of the whole job; `save` writes a checkpoint, and waits until it is on the disk."""
        self.ranks, self._progress, self._save = ranks, progress, save
        self._n_envs = config.recipe.n_envs // self.size  # of this rank
        self.path = Path()  # of the run folder
        self.is_over = False  # nothing is left to agree on
        self.stops = False  # every rank stops before the next iteration
        self.signal: int | None = None  # the signal that stopped one of them
        self._wants_save = False  # this rank would like a checkpoint
        self._messages: list[str] = []
        self._faults: list[tuple[Fault, int]] = []  # of this iteration, for rank 0 to report

    @property
    def is_first(self) -> bool:
        """Whether this process writes, evaluates and shows."""
        return self.ranks is None or self.ranks.is_first

    @property
    def size(self) -> int:
        """The number of ranks."""
        return 1 if self.ranks is None else self.ranks.size

    @property
    def first_env(self) -> int:
        """The index in the job of this rank's environment 0."""
        return 0 if self.ranks is None else self.ranks.rank * self._n_envs

    @property
    def own_key(self) -> tuple[int, ...]:
        """What the key of a random stream has at its end, so that each rank has its own."""
        return () if self.ranks is None else (self.ranks.rank,)

    # -- start ---------------------------------------------------------------------------------------------------------

    def load(self, folder: RunFolder, say: Callable[[str], None]) -> State | None:
        """The state to continue from; None for a new run. Without `collector` if another number of ranks saved it."""
        state = folder.load_latest(say) if self.ranks is None else load_together(folder, self.ranks, say)
        if state is None or (saved_by := state.get("ranks", 1)) == self.size:
            return state
        say(
            f"The checkpoint was saved by {_counted(saved_by)}, but the run resumes on {self.size}: it will not match "
            "an uninterrupted one, because environments begin new episodes and replay buffers start empty."
        )
        state = for_other_ranks(state, self._n_envs)
        state["first_episode"] = 1 + int(state.pop("collector")["episode"].max())
        return state

    def start(self, algo: Algorithm) -> contextlib.AbstractContextManager[None]:
        """Take over the initial weights of rank 0; then a block in which the run is opened, on all ranks or on none."""
        if self.ranks is None:
            return contextlib.nullcontext()
        self.ranks.broadcast_(shared_tensors(algo))
        return self.ranks.stage()

    # -- one iteration -------------------------------------------------------------------------------------------------

    def fill(self, collector: HostCollector) -> Turns[None]:
        """Collect until every rank has a complete rollout; if one cannot, all stop where the previous one ended."""
        if self.ranks is None:
            return
        failure: Exception | None = None
        is_cancelled = False
        try:
            yield from collector.fill_in_turns()
        except Stopped:
            is_cancelled = True
        except ENV_FAILURES as error:
            failure = error
        if not self.ranks.all(failure is None and not is_cancelled):
            self._end_if_failed(failure)
            raise Stopped

    def share_episodes(self, collector: HostCollector, report: Callable[[Fault, int], None]) -> None:
        """Give rank 0 the episodes and faults of the latest rollout of all ranks."""
        if self.ranks is None:
            return
        found = self.ranks.gather((collector.latest_episodes, self._faults))
        self._faults = []
        if self.ranks.is_first:
            for episodes, faults in found[1:]:
                collector.stats.add(*episodes)
                for fault, step in faults:
                    collector.stats.faults[fault.kind] += 1
                    report(fault, step)

    def keep_fault(self, fault: Fault, step: int) -> bool:
        """Keep a fault of this rank for rank 0, which reports it; False if this is rank 0."""
        if not self.is_first:
            self._faults.append((fault, step))
        return not self.is_first

    # -- failures ------------------------------------------------------------------------------------------------------

    def attempt(self, work: Turns[_T]) -> Turns[_T | None]:
        """Do `work`; if the environments of a rank cannot continue, all ranks save and end."""
        if self.ranks is None:
            return (yield from work)
        failure: Exception | None = None
        result: _T | None = None
        try:
            result = yield from work
        except ENV_FAILURES as error:
            if self.ranks.have_failed:
                raise
            failure = error
        self._end_if_failed(failure)
        return result

    def _end_if_failed(self, failure: Exception | None) -> None:
        """Raise on all ranks if one has a failure, after they have saved a checkpoint from which all can resume."""
        assert self.ranks is not None
        if self.ranks.all(failure is None):
            return
        if self.ranks.all(failure is None or self._can_save(failure)):
            failure = self._save_after(failure)
        self.ranks.agree(failure)

    def save_on_failure(self, work: Turns[None]) -> Turns[None]:
        """Do `work`; if the environments cannot continue, save a checkpoint before raising."""
        try:
            yield from work
        except ENV_FAILURES as error:
            raise self.saved_failure(error) from None

    def saved_failure(self, error: Exception) -> Exception:
        """Save a checkpoint because the environments cannot continue; returns the error to raise.

        With other ranks, all save when they have agreed on the failure.
        """
        if not self._can_save(error) or (self.ranks is not None and not self.is_over):
            return error
        return self._save_after(error) or error

    def _can_save(self, error: Exception) -> bool:
        """Whether there is something to save after `error`, and somewhere to."""
        has_learned = self._progress.iteration > 0
        return not isinstance(error, (WriteError, DivergedError)) and (has_learned or not isinstance(error, UsageError))

    def _save_after(self, error: Exception | None) -> Exception | None:
        """Save after a failure, here or (None) on another rank; returns the error to raise here."""
        try:
            self._save()
        except WriteError as unsaved:
            return TrainingError(f"{str(error or '').rstrip()}\n{unsaved}".lstrip())
        command = f"unidle train --resume {display_path(self.path)}"
        return error and ResumableError(str(error).rstrip(), f"Fix it, then resume with: {command}")

    # -- decisions -----------------------------------------------------------------------------------------------------

    def relaying(self, say: Callable[[str], None]) -> Callable[[str], None]:
        """`say`, with messages that rank 0 shows even if they are of another rank."""

        def note(text: str) -> None:
            self._messages.append(text)
            say(text)

        return note

    def decide(self, algo: Algorithm, say: Callable[[str], None], *, stop: bool, signal: int | None) -> bool:
        """Decide together whether to stop; returns whether to save now, which rank 0 decides."""
        if self.ranks is None:
            wants_save, self._wants_save = self._wants_save, False
            return wants_save
        requests = self.ranks.gather(_Request(stop, signal, self._wants_save, self._messages))
        self.stops = any(request.stop for request in requests)
        self.signal = next((request.signal for request in requests if request.signal is not None), None)
        for rank, request in enumerate(requests):
            for text in request.messages:
                if text not in requests[0].messages:
                    say(f"Rank {rank}: {text}")
        self._wants_save, self._messages = False, []
        if requests[0].save:
            require_equal_weights(self.ranks, algo, self._progress.step)
        return requests[0].save

    def request_save(self) -> None:
        """Ask for a checkpoint at the end of this iteration; if there is none, rank 0 saves now."""
        self._wants_save = True
        if self.is_over:
            self._save()

    def finish(self, algo: Algorithm) -> None:
        """The last agreement: that all have the same weights."""
        if self.ranks is not None:
            require_equal_weights(self.ranks, algo, self._progress.step)
            self.is_over = True


def _counted(ranks: int) -> str:
    return "1 rank" if ranks == 1 else f"{ranks} ranks"
