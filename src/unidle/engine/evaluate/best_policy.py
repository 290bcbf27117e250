"""What becomes of evaluations: a record of each, the best policy kept, and the end of the run when it is good."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from unidle.algos.dormancy import DORMANT, TOO_DORMANT, remedy
from unidle.algos.registry import Algorithm
from unidle.config import Config
from unidle.engine.callbacks import Callback, Listener, Moment
from unidle.engine.checkpoint.run_folder import RunFolder
from unidle.engine.checkpoint.saver import Progress, Saver
from unidle.engine.evaluate.evaluations import Evaluated, Evaluations
from unidle.engine.evaluate.story import write_story
from unidle.envs.protocol import Fault
from unidle.metrics.journal import Journal, how_good, read_records
from unidle.timeline import CHECKPOINT, EVALUATE, OTHER, Timeline

_WAIT_SECONDS = 0.2  # for an evaluation, before looking whether the user wants to stop


@dataclass
class Judge:
    """Has the policy evaluated, and takes note of what comes out."""

    config: Config
    algo: Algorithm
    evaluations: Evaluations
    progress: Progress
    saver: Saver
    folder: RunFolder
    journal: Journal
    listener: Listener
    timeline: Timeline
    callbacks: Sequence[Callback]
    tell_fault: Callable[[Fault, int], None]
    save: Callable[[], None]
    stop: Callable[[], None]
    is_stopping: Callable[[], bool]
    is_dormant: bool = False  # and it was said

    def evaluate(self) -> None:
        """Have the policy evaluated as it is now: at once, or beside training."""
        while self.evaluations.is_full and not self.is_stopping():
            self._wait()
        self.timeline.enter(EVALUATE)
        self.evaluations.ask(self.progress.step, self._plasticity())
        self.timeline.enter(OTHER)
        self.progress.last_evaluated = self.progress.step
        self.hear()

    def hear(self, seconds: float = 0.0) -> None:
        """Take note of the evaluations that are done; waits at most so long for one."""
        for evaluated in self.evaluations.done(seconds):
            self._note(evaluated)

    def catch_up(self) -> None:
        """Do what a run that was stopped still owes."""
        self.timeline.enter(EVALUATE)
        self.evaluations.catch_up()
        self.timeline.enter(OTHER)
        self.hear()

    def finish(self, is_interrupted: Callable[[], bool]) -> None:
        """Wait for the evaluations that are still to be done, unless the user wants to go."""
        if self.evaluations.n_open == 0:
            return
        if not is_interrupted():
            self.listener.on_message(f"Training is done; {_these(self.evaluations.n_open)} still to be done.")
        while self.evaluations.n_open and not is_interrupted():
            self._wait()
        if self.evaluations.n_open:
            self.listener.on_message(f"{_these(self.evaluations.n_open)} not done, and will be by a resume.")
        self.save()

    def _wait(self) -> None:
        self.timeline.enter(EVALUATE)  # each time: to take note of one takes time of other kinds
        self.hear(_WAIT_SECONDS)
        self.timeline.enter(OTHER)

    def _note(self, done: Evaluated) -> None:
        run, result = self.config.run, done.result
        for fault in done.faults:
            self.tell_fault(fault, done.step)
        metrics = result.metrics(self.evaluations.task_names)
        is_best = self.progress.take_note({"step": done.step, **metrics})
        if is_best:
            # The best first: a run killed before the record is written evaluates again and writes it again.
            self.timeline.enter(CHECKPOINT)
            self.saver.save_best(self.folder, done.weights, done.step)
            self.timeline.enter(OTHER)
        numbers = {name: float(value) for name, value in done.about.items()}
        record: dict[str, Any] = {"kind": "evaluation", "step": done.step, **metrics, "eval/best": is_best, **numbers}
        if self.evaluations.are_beside:
            record["eval/seconds_behind"] = self.saver.clock.wall() - record["wall"]
        self.journal.write(record)
        if result.story is not None:
            write_story(self.folder.path, done.step, result.story)
        self.listener.on_evaluation(record)
        self._warn(record)
        if is_best and not self.evaluations.are_beside:
            self.save()
        if run.target_return is not None and result.mean_return >= run.target_return:
            self.listener.on_message(f"Target return {run.target_return:g} reached at step {done.step:,}.")
            self.stop()
        if self.callbacks:
            policy = self.evaluations.with_weights(done.weights) if done.policy is None else done.policy
            for callback in self.callbacks:
                callback(Moment(record, policy, self.stop))

    # -- plasticity ----------------------------------------------------------------------------------------------------

    def _plasticity(self) -> dict[str, Tensor]:
        """What is left of the networks' ability to learn, where the algorithm measures it; read with the record."""
        return self.algo.plasticity(self.config.run.seed, self.progress.step)

    def _warn(self, record: dict[str, Any]) -> None:
        """Say it when too much of the critic has fallen asleep; once, until it wakes up."""
        was_dormant, share = self.is_dormant, record.get(DORMANT, 0.0)
        self.is_dormant = share > TOO_DORMANT
        if self.is_dormant and not was_dormant:
            self.listener.on_message(remedy(share))


def owed_by(state: dict[str, Any], folder: Path, progress: Progress) -> list[dict[str, Any]]:
    """The evaluations that a checkpoint says are not done, less those that were, up to the moment the run was killed.

    The best of those is then the best so far.
    """
    records = read_records(folder / "metrics.jsonl")
    done = {r["step"]: r for r in records if r["kind"] == "evaluation" and r["step"] <= progress.step}
    if "best_success" not in state and progress.best_step in done:  # an older checkpoint
        progress.best_success, _ = how_good(done[progress.best_step])
    owed = state.get("evaluations", [])
    for each in owed:
        if each["step"] in done:
            progress.take_note(done[each["step"]])
    return [each for each in owed if each["step"] not in done]


def _these(count: int) -> str:
    return "1 evaluation is" if count == 1 else f"{count} evaluations are"
