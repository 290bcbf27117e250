"""Tuning: engine settings changed one at a time, kept if they are measured to be faster.

Changes are tried in the order of the speed-up that the pipeline model predicts, with some advance for the defaults. The
job as it stands and the job with the change are two trials that take turns, A B B A …, a stretch of whole iterations
each, until the interval of their ratio is clear or the change's share of the budget is used. A change is kept if that
interval lies above 1; the next one starts from there.
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
from unidle.tuning.search.interval import LOOKS, interval
from unidle.tuning.search.outcomes import Outcome, Tuned, Watcher
from unidle.tuning.search.trial import Failure, Situation, Trial, TrialError

_SHARE = 1 / 3  # of the time that is left, which one change may take
_PROBING = 3 / 8  # of the time there is, which the probes behind the predictions may take, to start included
_PROBED = 1 / 16  # of it, which they are told to take; no more than what they need
_ENOUGH_PROBED = 8.0  # seconds
_WORTH_PROBING = 40.0  # seconds: of a smaller budget, all goes into measuring
_USUAL = 1.2  # a default is tried before what is predicted to be up to so much faster: predictions are off by as much
_HOPELESS = 0.8  # predicted to be that much slower: not worth the time
_STRETCHES = 120  # of the budget, so many seconds a stretch
_LEAST_STRETCH, _LONGEST_STRETCH = 0.4, 2.0
_PATIENCE, _LEAST_PATIENCE = 4, 5.0  # times what the present settings take, and seconds, before a trial counts as hung
_SLOW_START = 75.0  # seconds that a change has to start in at least, if it compiles, captures or loads kernels
_SEEDS = 3  # runs of each side by which a change of the recipe is judged


def tune(config: Config, budget: float, watcher: Watcher) -> Tuned:
    """Spend about `budget` seconds on faster engine settings for a validated `config`.

    The recipe is left alone unless the run says that it may be changed. Ctrl-C ends it with what is known by then.
    """
    tuner = _Tuner(config, budget, watcher)
    try:
        tuner.run()
    except KeyboardInterrupt:
        tuner.tuned.ended_by = "Ctrl-C"
    finally:
        tuner.close()
    return tuner.tuned


class _Tuner:
    def __init__(self, config: Config, budget: float, watcher: Watcher) -> None:
        self.tuned = Tuned(config)
        self._began, self._budget, self._watcher = monotonic(), budget, watcher
        # Of the monotonic clock; the recipe, if it may be changed, has the second half.
        self._until = self._began + (budget / 2 if config.run.allow_recipe_change else budget)
        self._stretch = min(_LONGEST_STRETCH, max(_LEAST_STRETCH, budget / _STRETCHES))
        self._profile: Profile | None = None
        self._trial: Trial | None = None  # of the settings that are kept
        self._rival: Trial | None = None
        self._start_seconds = self._go_seconds = 0.0  # that the present one took
        self._tried: set[tuple[tuple[str, Any], ...]] = set()
        self._halves: list[Change] = []

    def run(self) -> None:
        if self._budget >= _WORTH_PROBING:
            self._watcher.on_stage("probing what the parts of the job can do, for predictions")
            self._probe()
        self._watcher.on_stage("starting the job as it is")
        self._begin()
        while not self.tuned.ended_by and (change := self._next(engine_changes)) is not None:
            if self._left() < self._start_seconds + 2 * LOOKS[0] * self._go_seconds:
                self.tuned.ended_by = "budget"
            else:
                self._try(change)
        if self.tuned.config.run.allow_recipe_change and self.tuned.ended_by != "failure":
            self.tuned.ended_by, self._until = "", self._began + self._budget
            self._halves.clear()
            self._tune_recipe()

    def close(self) -> None:
        for trial in (self._trial, self._rival):
            if trial is not None:
                trial.close()
        self.tuned.seconds = monotonic() - self._began

    def _left(self) -> float:
        return self._until - monotonic()

    # -- where it starts -----------------------------------------------------------------------------------------------

    def _probe(self) -> None:
        """Predictions are good to have; where the probes fail, changes are tried all the same."""
        self._rival = Trial(self.tuned.config)
        try:
            seconds = min(_ENOUGH_PROBED, _PROBED * self._left())
            self._profile = self._rival.profile(seconds, _PROBING * self._left())
        except TrialError as error:
            self._watcher.on_stage(f"no predictions: {error}")
        self._drop_rival()

    def _begin(self) -> None:
        self._trial = Trial(self.tuned.config)
        began = monotonic()
        try:
            self.tuned.situation = self._trial.start(self._left())
            self._start_seconds = monotonic() - began
            stretch = self._trial.go(self._stretch, self._left())
        except TrialError as error:
            if error.kind == "hang":
                raise TrainingError(
                    f"In {self._budget:.0f} seconds the job did not get through its first iterations; give more "
                    "--budget, or see whether `unidle train` does."
                ) from None
            advice = f"; {LESS_MEMORY}" if error.kind == "memory" else ""
            raise TrainingError(
                f"The job does not run as it is, so there is nothing to tune: {str(error).rstrip('.')}{advice}."
            ) from None
        self._go_seconds = stretch.seconds
        self.tuned.first_rate = self.tuned.rate = stretch.rate
        self._watcher.on_start(self.tuned)

    # -- one change after the other ------------------------------------------------------------------------------------

    def _next(self, changes: Callable[[Config, Situation], list[Change]]) -> Change | None:
        """The most promising change that was not tried yet."""
        assert self.tuned.situation is not None
        found = [*self._halves, *changes(self.tuned.config, self.tuned.situation)]
        untried = [change for change in found if change.values not in self._tried]
        for change in untried:
            predicted = self._predicted(change)
            if predicted is not None and predicted < _HOPELESS:
                self._settle(Outcome(change, predicted, None, False, "not tried"))
        rest = [change for change in untried if change.values not in self._tried]
        return max(rest, key=self._promise, default=None)

    def _promise(self, change: Change) -> float:
        return (self._predicted(change) or 1.0) * (_USUAL if change.is_usual else 1.0)

    def _predicted(self, change: Change) -> float | None:
        if self._profile is None:
            return None
        now, then = self.tuned.config, change.applied(self.tuned.config)
        if now.recipe == then.recipe:
            return predicted_speedup(self._profile, now.engine, then.engine)
        only_overlap = replace(now.recipe, overlap=then.recipe.overlap) == then.recipe
        return overlap_speedup(self._profile, now.engine) if only_overlap else None

    def _settle(self, outcome: Outcome) -> None:
        self._tried.add(outcome.change.values)
        self.tuned.outcomes.append(outcome)
        self._watcher.on_outcome(outcome)

    def _try(self, change: Change) -> None:
        """Measure a change against what is kept so far, and keep it if it is faster."""
        assert self.tuned.situation is not None
        assert self._trial is not None
        predicted = self._predicted(change)
        self._watcher.on_stage(f"starting {change.text}")
        then = change.applied(self.tuned.config)
        self._rival = Trial(then)
        began = monotonic()
        patience = self._patience(self._start_seconds, _SLOW_START if change.starts_slowly else _LEAST_PATIENCE)
        try:
            situation = self._start_rival(self._rival, patience)
            started = monotonic() - began
            found = self._compare(change, self._rival)
        except TrialError as error:
            if error.kind == "memory" and (half := halved(change, self.tuned.config, self.tuned.situation)):
                self._halves.append(half)
            self._drop_rival()
            note = _FAILURES[error.kind].format(error)
            if not self._trial.is_alive:
                note = f"the present settings failed beside it, {note}"
                self._restart()
            self._settle(Outcome(change, predicted, None, False, note))
            return
        kept = found.measured.low > 1
        if kept:
            self._tried.add(change.restored(self.tuned.config))
            self._trial, self._rival = self._rival, self._trial
            self.tuned.config, self.tuned.situation, self.tuned.rate = then, situation, found.rate
            self._start_seconds, self._go_seconds = started, found.seconds
        self._drop_rival()
        self._settle(Outcome(change, predicted, found.measured, kept))

    def _start_rival(self, rival: Trial, patience: float) -> Situation:
        """Start it, in no more than half of the time that is left, beside what is."""
        left = max(1.0, self._left() / 2)
        try:
            situation = rival.start(min(patience, left))
        except TrialError as error:
            if error.kind == "hang" and left < patience:
                text = f"it had {left:.0f} seconds to start in, half of what was left; give more --budget"
                raise TrialError("late", text) from None
            raise
        now = self.tuned.situation
        assert now is not None
        if situation.on_gpu and now.on_gpu and situation.memory_apart != now.memory_apart:
            raise TrialError("unlike", "what is remembered does not fit on the GPU twice")
        return situation

    def _restart(self) -> None:
        """Start the present settings again; if they do not run, there is nothing to compare with any more."""
        assert self._trial is not None
        self._trial.close()
        self._trial = Trial(self.tuned.config)
        try:
            self._trial.start(self._patience(self._start_seconds))
        except TrialError:
            self.tuned.ended_by = "failure"

    def _compare(self, change: Change, rival: Trial) -> Comparison:
        assert self._trial is not None
        return compare(
            self._trial,
            rival,
            self._stretch,
            self._patience(self._go_seconds),
            monotonic() + _SHARE * self._left(),
            self._until,
            lambda measured, pairs: self._watcher.on_look(change, measured, pairs),
        )

    def _patience(self, usual: float, least: float = _LEAST_PATIENCE) -> float:
        return max(least, _PATIENCE * usual)

    def _drop_rival(self) -> None:
        if self._rival is not None:
            self._rival.close()
        self._rival = None

    # -- the recipe, if it may be changed ------------------------------------------------------------------------------

    def _tune_recipe(self) -> None:
        """What is learned differs now, so steps a second say nothing: what counts is the return gained a second."""
        assert self._trial is not None
        assert self.tuned.situation is not None
        self._trial.close()
        self._trial = None
        changes = recipe_changes(self.tuned.config, self.tuned.situation)
        if not changes:
            return
        runs = _SEEDS * (1 + len(changes))
        seconds = max(self._stretch, self._left() / runs - 1.5 * self._start_seconds)
        each = _SEEDS * (seconds + self._start_seconds)
        if self._left() < 2 * each:
            self.tuned.ended_by = "budget"
            return
        self._watcher.on_stage(f"learning as it is, {_SEEDS} times {seconds:.0f} seconds")
        own = self._gains(self.tuned.config, seconds)
        while (change := self._next(recipe_changes)) is not None:
            predicted, then = self._predicted(change), change.applied(self.tuned.config)
            if isinstance(own, str):
                self._settle(Outcome(change, predicted, None, False, f"the present settings cannot be judged: {own}"))
                continue
            if self._left() < each:
                self.tuned.ended_by = "budget"
                return
            self._watcher.on_stage(f"learning by {change.text}, {_SEEDS} times {seconds:.0f} seconds")
            gains = self._gains(then, seconds)
            if isinstance(gains, str):
                self._settle(Outcome(change, predicted, None, False, gains))
                continue
            measured = interval([after - before for before, after in zip(own, gains)])
            kept = measured.low > 0
            if kept:
                self._tried.add(change.restored(self.tuned.config))
                self.tuned.config, own = then, gains
            self._settle(Outcome(change, predicted, measured, kept))

    def _gains(self, config: Config, seconds: float) -> list[float] | str:
        """Of every seed; or why there are none."""
        try:
            return [self._gain(config, seed, seconds) for seed in range(_SEEDS)]
        except TrialError as error:
            self._drop_rival()
            return _FAILURES[error.kind].format(error)

    def _gain(self, config: Config, seed: int, seconds: float) -> float:
        """Return gained a second by a run that learns for about so many seconds."""
        self._rival = Trial(replace(config, run=replace(config.run, seed=config.run.seed + seed)))
        self._rival.start(self._patience(self._start_seconds))
        learned = self._rival.go(seconds, self._patience(seconds))
        self._drop_rival()
        if learned.mean_return is None or learned.first_return is None:
            raise TrialError("crash", f"no episode came to its end in {learned.trained:.0f} seconds")
        return (learned.mean_return - learned.first_return) / learned.trained


_FAILURES: dict[Failure, str] = {
    "memory": "out of memory: {}",
    "crash": "crashed: {}",
    "hang": f"more than {_PATIENCE} times as slow: stopped",
    "late": "not measured: {}",
    "unlike": "not measured: {}",
}
