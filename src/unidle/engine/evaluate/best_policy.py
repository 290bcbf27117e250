"""Handles evaluation results: records them, keeps the best policy, and ends the run at the target return."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import Any

from torch import Tensor

from unidle.algos.dormancy import DORMANT, IN_A_ROW, MIN_UPDATES, TOO_DORMANT, dormancy_warning
from unidle.algos.registry import Algorithm
from unidle.config import Config, OffPolicyRecipe
from unidle.engine.callbacks import Callback, CallbackRunner, ProgressDisplay
from unidle.engine.checkpoint.run_folder import RunFolder
from unidle.engine.checkpoint.saver import Saver
from unidle.engine.evaluate.episode_trace import write_trace
from unidle.engine.evaluate.evaluations import Evaluations, FinishedEvaluation
from unidle.engine.progress import Progress, evaluation_rank
from unidle.engine.turns import Turns
from unidle.envs.protocol import Fault
from unidle.metrics.jsonl import read_records
from unidle.metrics.log import MetricLog
from unidle.timeline import CHECKPOINT, EVALUATE, OTHER, Timeline

_WAIT_SECONDS = 0.2  # for an evaluation, before checking whether the user pressed Ctrl-C


@dataclass
class BestPolicyTracker:
    """Requests evaluations of the policy and handles their results."""

    config: Config
    algo: Algorithm
    evaluations: Evaluations
    progress: Progress
    saver: Saver
    folder: RunFolder
    log: MetricLog
    display: ProgressDisplay
    timeline: Timeline
    callbacks: Sequence[Callback]
    runner: CallbackRunner
    report_fault: Callable[[Fault, int], None]
    save: Callable[[], None]
    stop: Callable[[], None]
    is_interrupted: Callable[[], bool]  # by the user
    recorded: frozenset[int] = frozenset()  # steps of pending evaluations that were recorded before the run was killed
    has_cut_off: bool = False  # a message has said that an episode was cut off
    n_dormant: int = 0  # latest evaluations in a row with too many dormant neurons

    def evaluate(self) -> Turns[None]:
        """Evaluate the current policy, immediately or asynchronously."""
        while self.evaluations.is_full and not self.is_interrupted():
            yield from self._wait()
        self.timeline.enter(EVALUATE)
        self.evaluations.request(self.progress.step, self.progress.iteration, self._plasticity())
        self.timeline.enter(OTHER)
        self.progress.last_evaluated = self.progress.step
        yield from self.handle_results()

    def handle_results(self) -> Turns[None]:
        """Handle finished evaluations, and wait for those whose results have an effect now."""
        self._handle_done()
        while self.evaluations.is_overdue(self.progress.iteration) and not self.is_interrupted():
            yield from self._wait()

    def _handle_done(self, seconds: float = 0.0, iteration: float | None = None) -> None:
        for finished in self.evaluations.done(self.progress.iteration if iteration is None else iteration, seconds):
            self._handle(finished)

    def run_pending(self) -> Turns[None]:
        """Run the evaluations that were pending when the run was stopped."""
        self.timeline.enter(EVALUATE)
        self.evaluations.run_pending()
        self.timeline.enter(OTHER)
        yield from self.handle_results()

    def finish(self) -> Turns[None]:
        """Wait for pending evaluations, unless the user interrupts."""
        if self.evaluations.n_open and not self.is_interrupted():
            self._handle_done(iteration=math.inf)
            if self.evaluations.n_open:
                self.display.on_message(f"Training is done; waiting for {_count(self.evaluations.n_open)}.")
            while self.evaluations.n_open and not self.is_interrupted():
                yield from self._wait(math.inf)
            self.save()
        if self.evaluations.n_open:
            self.display.on_message(f"{_count(self.evaluations.n_open)} left; resuming the run completes them.")

    def _wait(self, iteration: float | None = None) -> Turns[None]:
        self.timeline.enter(EVALUATE)  # each time: handling a result enters other phases
        until = monotonic() + _WAIT_SECONDS
        yield lambda: monotonic() >= until
        self._handle_done(max(0.0, until - monotonic()), iteration)
        self.timeline.enter(OTHER)

    def _handle(self, done: FinishedEvaluation) -> None:
        run, result = self.config.run, done.result
        metrics = result.metrics(self.evaluations.task_names)
        is_best = self.progress.update_best({"step": done.step, **metrics})
        if is_best:
            # The checkpoint is saved first: a run that is killed before it writes the record evaluates and saves again.
            self.timeline.enter(CHECKPOINT)
            self.saver.save_best(self.folder, done.weights, done.step)
            self.timeline.enter(OTHER)
        numbers = {name: float(value) for name, value in done.extra.items()}
        record: dict[str, Any] = {"kind": "evaluation", "step": done.step, **metrics, "eval/best": is_best, **numbers}
        if self.evaluations.is_async:
            record["eval/seconds_behind"] = self.saver.clock.wall() - record["wall"]
        if done.step not in self.recorded:
            for fault in done.faults:
                self.report_fault(fault, done.step)
            self.log.write(record)
        if result.trace is not None:
            write_trace(self.folder.path, done.step, result.trace)
        self.display.on_evaluation(record)
        self._warn_if_dormant(record)
        if result.cut_off and run.eval_max_steps is None:
            self._say_cut_off(max(result.lengths))
        if is_best and not self.evaluations.is_async:
            self.save()
        if run.target_return is not None and result.mean_return >= run.target_return:
            self.display.on_message(f"Target return {run.target_return:g} reached at step {done.step:,}.")
            self.stop()
        if self.callbacks:
            policy = self.evaluations.with_weights(done.weights) if done.policy is None else done.policy
            self.runner.call(self.callbacks, record, policy)

    def _say_cut_off(self, steps: int) -> None:
        if not self.has_cut_off:
            self.has_cut_off = True
            self.display.on_message(
                f"An evaluation episode was cut off after {steps:,} steps, because {self.config.run.env} has no time "
                "limit; set one with --env-kwargs '{max_episode_steps: …}', or another limit with --eval-max-steps."
            )

    # -- plasticity ----------------------------------------------------------------------------------------------------

    def _plasticity(self) -> dict[str, Tensor]:
        """Plasticity metrics, if the algorithm measures them, as tensors that are read when the record is written."""
        return self.algo.plasticity(self.config.run.seed, self.progress.step)

    def _warn_if_dormant(self, record: dict[str, Any]) -> None:
        """Warn if too many of the critic's neurons stay dormant; again only after they recovered."""
        recipe, share = self.config.recipe, record.get(DORMANT, 0.0)
        if not isinstance(recipe, OffPolicyRecipe):
            return
        updates = recipe.utd_ratio * (record["step"] - recipe.learning_starts)
        self.n_dormant = self.n_dormant + 1 if share > TOO_DORMANT and updates >= MIN_UPDATES else 0
        if self.n_dormant == IN_A_ROW:
            self.display.on_message(dormancy_warning(share))


def pending_evaluations(
    state: dict[str, Any], folder: Path, progress: Progress
) -> tuple[list[dict[str, Any]], frozenset[int]]:
    """The pending evaluations of a checkpoint, without those that finished before the run was killed.

    The latter count towards the best evaluation so far, except those whose results take effect later: these are run
    again. Returns their steps too, because they have been recorded.
    """
    records = read_records(folder / "metrics.jsonl")
    evaluations = [r for r in records if r.get("kind") == "evaluation" and r["step"] <= progress.step]
    # A record without a return is damaged, and evaluated again.
    done = {r["step"]: r for r in evaluations if evaluation_rank(r)[1] > -math.inf}
    if "best_success" not in state and progress.best_step in done:
        progress.best_success, _ = evaluation_rank(done[progress.best_step])
    pending: list[dict[str, Any]] = state.get("evaluations", [])
    again = [each for each in pending if each["step"] not in done or each.get("due", 0) >= progress.iteration > 0]
    recorded = frozenset(each["step"] for each in again if each["step"] in done)
    for each in pending:
        if each["step"] in done and each["step"] not in recorded:
            progress.update_best(done[each["step"]])
    return again, recorded


def _count(evaluations: int) -> str:
    return "1 evaluation" if evaluations == 1 else f"{evaluations} evaluations"
