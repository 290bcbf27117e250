"""Tuning: changes engine settings one at a time and keeps those that are measurably faster.

Changes are tried in the order of their predicted speed-up, with a bonus for defaults. The current job and the changed
job are two trials that alternate, A B B A …, in segments of whole iterations, until the confidence interval of their
ratio is clear or the change's share of the budget is used up. A change is kept if the interval is above 1; the next
change starts from there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from time import monotonic
from typing import Any

from unidle.config import Config
from unidle.errors import LESS_MEMORY, TrainingError
from unidle.tuning.pipeline_model import overlap_speedup, predicted_speedup
from unidle.tuning.probes.profile import Profile
from unidle.tuning.search.changes import Change, engine_changes, halved, recipe_changes
from unidle.tuning.search.compare import Comparison, compare
from unidle.tuning.search.interval import INSPECT_AFTER, interval
from unidle.tuning.search.outcomes import Outcome, Tuned, TuningProgress
from unidle.tuning.search.trial import Failure, JobSetup, Trial, TrialError

_SHARE = 1 / 3  # of the remaining time that one change may use
_PROBE_LIMIT = 3 / 8  # of the remaining time, the limit for probing, start-up included
_PROBE_TARGET = 1 / 16  # of the remaining time, the target for probing
_MAX_PROBE_SECONDS = 8.0  # seconds
_MIN_PROBE_BUDGET = 40.0  # seconds; smaller budgets go into trials only
_DEFAULT_BONUS = 1.2  # defaults are tried first up to this predicted ratio, since predictions err by as much
_MIN_PREDICTED = 0.8  # changes with a lower predicted ratio are not tried
_SEGMENTS = 120  # per budget, which sets the length of a segment
_MIN_SEGMENT, _MAX_SEGMENT = 0.4, 2.0
# A trial hangs if it takes this many times as long as the current settings, and at least this many seconds.
_PATIENCE, _MIN_PATIENCE = 4, 5.0
_SLOW_START = 75.0  # least seconds to start for a change that compiles, captures or loads kernels
_SEEDS = 3  # runs of each side to compare recipe changes


def tune(config: Config, budget: float, progress: TuningProgress) -> Tuned:
    """Search for faster engine settings for a validated `config` in about `budget` seconds.

    The recipe stays the same unless the run allows recipe changes. Ctrl-C ends the search and keeps its results.
    """
    tuner = _Tuner(config, budget, progress)
    try:
        tuner.run()
    except KeyboardInterrupt:
        tuner.tuned.ended_by = "Ctrl-C"
    finally:
        tuner.close()
    return tuner.tuned


class _Tuner:
    def __init__(self, config: Config, budget: float, progress: TuningProgress) -> None:
        self.tuned = Tuned(config)
        self._began, self._budget, self._progress = monotonic(), budget, progress
        # Monotonic clock; recipe changes, if allowed, use the second half.
        self._until = self._began + (budget / 2 if config.run.allow_recipe_change else budget)
        self._segment = min(_MAX_SEGMENT, max(_MIN_SEGMENT, budget / _SEGMENTS))
        self._profile: Profile | None = None
        self._trial: Trial | None = None  # with the kept settings
        self._candidate: Trial | None = None
        self._start_seconds = self._segment_seconds = 0.0  # of the kept settings
        self._tried: set[tuple[tuple[str, Any], ...]] = set()
        self._halved: list[Change] = []

    def run(self) -> None:
        if self._budget >= _MIN_PROBE_BUDGET:
            self._progress.on_stage("measuring the parts of the job for predictions")
            self._probe()
        self._progress.on_stage("starting the job with its current settings")
        self._begin()
        while not self.tuned.ended_by and (change := self._next(engine_changes)) is not None:
            if self._remaining() < self._start_seconds + 2 * INSPECT_AFTER[0] * self._segment_seconds:
                self.tuned.ended_by = "budget"
            else:
                self._try(change)
        if self.tuned.config.run.allow_recipe_change and self.tuned.ended_by != "failure":
            self.tuned.ended_by, self._until = "", self._began + self._budget
            self._halved.clear()
            self._tune_recipe()

    def close(self) -> None:
        for trial in (self._trial, self._candidate):
            if trial is not None:
                trial.close()
        self.tuned.seconds = monotonic() - self._began

    def _remaining(self) -> float:
        return self._until - monotonic()

    # -- start ---------------------------------------------------------------------------------------------------------

    def _probe(self) -> None:
        """Measure a profile for predictions; if the probes fail, there are none."""
        self._candidate = Trial(self.tuned.config)
        try:
            seconds = min(_MAX_PROBE_SECONDS, _PROBE_TARGET * self._remaining())
            self._profile = self._candidate.profile(seconds, _PROBE_LIMIT * self._remaining())
        except TrialError as error:
            self._progress.on_stage(f"no predictions: {error}")
        self._close_candidate()

    def _begin(self) -> None:
        self._trial = Trial(self.tuned.config)
        began = monotonic()
        try:
            self.tuned.setup = self._trial.start(self._remaining())
            self._start_seconds = monotonic() - began
            segment = self._trial.train_segment(self._segment, self._remaining())
        except TrialError as error:
            if error.kind == "hang":
                raise TrainingError(
                    f"The job did not finish its first iterations in {self._budget:.0f} seconds; give more --budget "
                    "or check that `unidle train` works."
                ) from None
            advice = f"; {LESS_MEMORY}" if error.kind == "memory" else ""
            raise TrainingError(
                f"The job fails with its current settings, so it cannot be tuned: {str(error).rstrip('.')}{advice}."
            ) from None
        self._segment_seconds = segment.seconds
        self.tuned.first_rate = self.tuned.rate = segment.rate
        self._progress.on_start(self.tuned)

    # -- one change at a time ------------------------------------------------------------------------------------------

    def _next(self, changes: Callable[[Config, JobSetup], list[Change]]) -> Change | None:
        """Return the most promising untried change."""
        assert self.tuned.setup is not None
        found = [*self._halved, *changes(self.tuned.config, self.tuned.setup)]
        untried = [change for change in found if change.values not in self._tried]
        for change in untried:
            predicted = self._predicted(change)
            if predicted is not None and predicted < _MIN_PREDICTED:
                self._record_outcome(Outcome(change, predicted, None, False, "not tried"))
        rest = [change for change in untried if change.values not in self._tried]
        return max(rest, key=self._priority, default=None)

    def _priority(self, change: Change) -> float:
        return (self._predicted(change) or 1.0) * (_DEFAULT_BONUS if change.is_default else 1.0)

    def _predicted(self, change: Change) -> float | None:
        if self._profile is None:
            return None
        now, then = self.tuned.config, change.applied(self.tuned.config)
        if now.recipe == then.recipe:
            return predicted_speedup(self._profile, now.engine, then.engine)
        only_overlap = replace(now.recipe, overlap=then.recipe.overlap) == then.recipe
        return overlap_speedup(self._profile, now.engine) if only_overlap else None

    def _record_outcome(self, outcome: Outcome) -> None:
        self._tried.add(outcome.change.values)
        self.tuned.outcomes.append(outcome)
        self._progress.on_outcome(outcome)

    def _try(self, change: Change) -> None:
        """Measure a change against the kept settings, and keep it if it is faster."""
        assert self.tuned.setup is not None
        assert self._trial is not None
        predicted = self._predicted(change)
        self._progress.on_stage(f"starting {change.text}")
        then = change.applied(self.tuned.config)
        self._candidate = Trial(then)
        began = monotonic()
        patience = self._patience(self._start_seconds, _SLOW_START if change.starts_slowly else _MIN_PATIENCE)
        try:
            setup = self._start_candidate(self._candidate, patience)
            started = monotonic() - began
            found = self._compare(change, self._candidate)
        except TrialError as error:
            if error.kind == "memory" and (half := halved(change, self.tuned.config, self.tuned.setup)):
                self._halved.append(half)
            self._close_candidate()
            note = _FAILURES[error.kind].format(error)
            if not self._trial.is_alive:
                note = f"the current settings failed at the same time, {note}"
                self._restart()
            self._record_outcome(Outcome(change, predicted, None, False, note))
            return
        kept = found.measured.low > 1
        if kept:
            self._tried.add(change.restored(self.tuned.config))
            self._trial, self._candidate = self._candidate, self._trial
            self.tuned.config, self.tuned.setup, self.tuned.rate = then, setup, found.rate
            self._start_seconds, self._segment_seconds = started, found.seconds
        self._close_candidate()
        self._record_outcome(Outcome(change, predicted, found.measured, kept))

    def _start_candidate(self, candidate: Trial, patience: float) -> JobSetup:
        """Start the rival next to the current trial, in at most half of the remaining time."""
        left = max(1.0, self._remaining() / 2)
        try:
            setup = candidate.start(min(patience, left))
        except TrialError as error:
            if error.kind == "hang" and left < patience:
                text = f"it did not start within {left:.0f} seconds, half of the remaining time; give more --budget"
                raise TrialError("late", text) from None
            raise
        now = self.tuned.setup
        assert now is not None
        if setup.on_gpu and now.on_gpu and setup.replay_off_device != now.replay_off_device:
            raise TrialError("incomparable", "two replay buffers do not fit on the GPU")
        return setup

    def _restart(self) -> None:
        """Restart the kept settings; tuning ends if they fail."""
        assert self._trial is not None
        self._trial.close()
        self._trial = Trial(self.tuned.config)
        try:
            self._trial.start(self._patience(self._start_seconds))
        except TrialError:
            self.tuned.ended_by = "failure"

    def _compare(self, change: Change, candidate: Trial) -> Comparison:
        assert self._trial is not None
        return compare(
            self._trial,
            candidate,
            self._segment,
            self._patience(self._segment_seconds),
            monotonic() + _SHARE * self._remaining(),
            self._until,
            lambda measured, pairs: self._progress.on_interim_result(change, measured, pairs),
        )

    def _patience(self, usual: float, least: float = _MIN_PATIENCE) -> float:
        return max(least, _PATIENCE * usual)

    def _close_candidate(self) -> None:
        if self._candidate is not None:
            self._candidate.close()
        self._candidate = None

    # -- recipe changes, if allowed ------------------------------------------------------------------------------------

    def _tune_recipe(self) -> None:
        """Try recipe changes; they change learning, so compare return gained per second instead of steps/s."""
        assert self._trial is not None
        assert self.tuned.setup is not None
        self._trial.close()
        self._trial = None
        changes = recipe_changes(self.tuned.config, self.tuned.setup)
        if not changes:
            return
        runs = _SEEDS * (1 + len(changes))
        seconds = max(self._segment, self._remaining() / runs - 1.5 * self._start_seconds)
        each = _SEEDS * (seconds + self._start_seconds)
        if self._remaining() < 2 * each:
            self.tuned.ended_by = "budget"
            return
        self._progress.on_stage(f"training with the current recipe, {_SEEDS} times {seconds:.0f} seconds")
        own = self._gains(self.tuned.config, seconds)
        while (change := self._next(recipe_changes)) is not None:
            predicted, then = self._predicted(change), change.applied(self.tuned.config)
            if isinstance(own, str):
                note = f"the current settings cannot be measured: {own}"
                self._record_outcome(Outcome(change, predicted, None, False, note))
                continue
            if self._remaining() < each:
                self.tuned.ended_by = "budget"
                return
            self._progress.on_stage(f"training with {change.text}, {_SEEDS} times {seconds:.0f} seconds")
            gains = self._gains(then, seconds)
            if isinstance(gains, str):
                self._record_outcome(Outcome(change, predicted, None, False, gains))
                continue
            measured = interval([after - before for before, after in zip(own, gains)])
            kept = measured.low > 0
            if kept:
                self._tried.add(change.restored(self.tuned.config))
                self.tuned.config, own = then, gains
            self._record_outcome(Outcome(change, predicted, measured, kept))

    def _gains(self, config: Config, seconds: float) -> list[float] | str:
        """Return the gain of each seed, or the reason for failure."""
        try:
            return [self._gain(config, seed, seconds) for seed in range(_SEEDS)]
        except TrialError as error:
            self._close_candidate()
            return _FAILURES[error.kind].format(error)

    def _gain(self, config: Config, seed: int, seconds: float) -> float:
        """Return the increase in episode return per second of a run of about `seconds`."""
        self._candidate = Trial(replace(config, run=replace(config.run, seed=config.run.seed + seed)))
        self._candidate.start(self._patience(self._start_seconds))
        learned = self._candidate.train_segment(seconds, self._patience(seconds))
        self._close_candidate()
        if learned.mean_return is None or learned.first_return is None:
            raise TrialError("crash", f"no episode ended within {learned.trained:.0f} seconds")
        return (learned.mean_return - learned.first_return) / learned.trained


_FAILURES: dict[Failure, str] = {
    "memory": "out of memory: {}",
    "crash": "crashed: {}",
    "hang": f"stopped: more than {_PATIENCE} times slower",
    "late": "not measured: {}",
    "incomparable": "not measured: {}",
}
