"""One run from its first step, or its last checkpoint, to its end."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import torch

from unidle.config import Config
from unidle.config.settings import whole_steps
from unidle.engine.build import too_many_workers
from unidle.engine.callbacks import Accountant, Callback, Listener, Moment
from unidle.engine.checkpoint.changes import note_changes
from unidle.engine.checkpoint.kernel_versions import kernels_on
from unidle.engine.checkpoint.run_folder import RunFolder, load_checkpoint
from unidle.engine.checkpoint.saver import Progress, Saver
from unidle.engine.clock import RunClock
from unidle.engine.collect.host import Collector
from unidle.engine.evaluate.best_policy import Judge, owed_by
from unidle.engine.evaluate.evaluations import Evaluations, choose_processes
from unidle.engine.evaluate.play import Stopped
from unidle.engine.interrupts import Interrupts
from unidle.engine.learn.device_loop import DeviceLoop, Flaw
from unidle.engine.learn.learner import Learner
from unidle.engine.parts import build_parts
from unidle.engine.run_facts import facts_of
from unidle.envs.make import EnvMaker
from unidle.envs.protocol import Fault
from unidle.errors import TrainingError, UsageError, WriteError
from unidle.metrics.journal import Journal
from unidle.nn.actor_critic import NetworkFactory
from unidle.rng import SHUFFLE, keyed_generator
from unidle.timeline import CHECKPOINT, LEARN, LOGGING, OTHER, SYNC, Timeline

_FAILURES = TrainingError, UsageError  # of environments, in whatever words
_FEW_ITERATIONS = 10
_RECORDS, _STEPS_PER_RECORD = 1000, 1000  # as many iterations of a run, or one in so many steps, are written down
_NOTICED_SECONDS, _SAVING_SHARE = 0.25, 0.05  # what a checkpoint may take at any time, and of all time if it is more
_PATIENCE_SECONDS = 0.0005  # how long to wait for environments before looking whether learning is over


class Trainer:
    """Collect, learn, evaluate, save; again."""

    def __init__(
        self,
        config: Config,
        maker: EnvMaker,
        listener: Listener,
        *,
        network: NetworkFactory | None = None,
        after_iteration: Sequence[Callback] = (),
        after_evaluation: Sequence[Callback] = (),
        accountant: Accountant | None = None,
    ) -> None:
        self.config, self._listener, self._accountant = config, listener, accountant
        self._waits_for_others = maker.kind == "async"
        self._after_iteration, self._after_evaluation = after_iteration, after_evaluation
        self._timeline = Timeline()
        self._parts = build_parts(config, maker, network, self._timeline, listener.on_message, self._on_fault)
        self.env_spec, self.algo, self.collector = self._parts.env_spec, self._parts.algo, self._parts.collector
        self._learner = Learner(self.algo, self._timeline)
        self._stopping = self._interrupted = False
        self.progress, self._clock = Progress(), RunClock(self._timeline)
        self._saved, self._saving_took = perf_counter(), 0.0  # the latest checkpoint
        must_wait = config.run.target_return is not None or bool(after_evaluation)
        try:
            kernels = kernels_on(self._parts.capture.device)
            self._saver = Saver(config, self.env_spec, self.algo, self.collector, self.progress, self._clock, kernels)
            workers = self._parts.workers
            self._evaluations = Evaluations(
                config,
                maker,
                self.env_spec,
                self.algo.policy,
                network,
                in_workers=workers > 0,
                processes=choose_processes(config, maker, self.env_spec, workers, must_wait=must_wait),
                clock=self._clock.record,
                say=listener.on_message,
                on_fault=self._on_fault,
                stop=lambda: self._stopping,
            )
        except BaseException:
            self.collector.close()
            raise

    # -- the loop ----------------------------------------------------------------------------------------------------

    def train(self, folder: RunFolder) -> None:
        """Run to the end of the run, a reached target, or Ctrl-C; leaves a checkpoint in every case but a failure."""
        try:
            self._train(folder)
        finally:
            folder.unlock()

    def _train(self, folder: RunFolder) -> None:
        run = self.config.run
        self._folder = folder
        checkpoint = folder.latest()
        if checkpoint is None:
            self.collector.start()
        else:
            kernels = self._restore(checkpoint), self._saver.kernels
            note_changes(folder.path, folder.config(), self.config, self.progress.step, self._clock.wall(), kernels)
            folder.save_config(self.config)  # which may be another now, and is known to go with the checkpoint
        self._journal = Journal(
            self._folder.path,
            step=self.progress.step,
            tensorboard=run.tensorboard,
            wandb=run.wandb,
            name=self._folder.path.name,
            config=self.config.flat(),
        )
        self._judge = Judge(
            self.config,
            self.algo,
            self._evaluations,
            self.progress,
            self._saver,
            folder,
            self._journal,
            self._listener,
            self._timeline,
            self._after_evaluation,
            tell_fault=self._tell_fault,
            save=self._save,
            stop=self._stop,
            is_stopping=lambda: self._stopping,
        )
        progress, batch = self.progress, self.config.recipe.total_batch
        total = whole_steps(run.timesteps, batch)
        facts = facts_of(self.config, self._parts, folder.path, self._evaluations.processes, progress.step)
        self._listener.on_start(facts, max(progress.step, total), progress.step, progress.best)
        warning = too_many_workers(self.config.engine)
        if warning:
            self._listener.on_message(warning)
        few = total // batch
        if self.env_spec.on_device and few < _FEW_ITERATIONS:
            self._listener.on_message(
                f"{run.timesteps:,} steps are {few} iteration{'s' * (few > 1)} of {batch:,}; "
                "to learn more, raise --timesteps or lower --n-envs."
            )
        if progress.step >= run.timesteps:
            self._listener.on_message(f"All of its {run.timesteps:,} steps are done; give it more with --timesteps.")
        elif run.target_return is not None and progress.highest_return >= run.target_return:
            self._listener.on_message(f"It has reached its target return; raise --target-return {run.target_return:g}.")
            self._stopping = True
        self._clock.begin()
        if self._accountant is not None:
            self._accountant.begin(folder.path, self._timeline, progress.step, self._parts.capture.on_gpu())
        try:
            with Interrupts(self._interrupt):
                if checkpoint is None:
                    self._save()
                self._judged(self._judge.catch_up)
                with contextlib.suppress(Stopped):
                    while progress.step < run.timesteps and not self._stopping:
                        self._iterate()
                if run.eval_every != 0 and progress.last_evaluated != progress.step >= run.timesteps:
                    self._judged(self._judge.evaluate)
                self._save()
                self._judged(lambda: self._judge.finish(lambda: self._interrupted))
        finally:
            if self._accountant is not None:
                self._accountant.end()
            self._journal.close()
            self._listener.on_end()

    def _iterate(self) -> None:
        run, began, before = self.config.run, perf_counter(), self.progress.step
        failure: Exception | None = None
        if self._parts.loop is not None:
            numbers = self._iterate_on_device(self._parts.loop)
        else:
            numbers, failure = self._collect_and_learn()
        self._timeline.enter(LOGGING)
        record = self._record(numbers, self.progress.step - before, perf_counter() - began)
        # Not every one of a million short iterations: to write it down would take longer than some of them do.
        is_over = self.progress.step >= run.timesteps or self._stopping
        if is_over or _due(before, self.progress.step, max(1, min(_STEPS_PER_RECORD, run.timesteps // _RECORDS))):
            self._write_down(record)
        else:
            self._unwritten = record
        self._listener.on_iteration(record)
        for callback in self._after_iteration:
            callback(Moment(record, self.algo.policy, self._stop))
        if self._accountant is not None:
            self._accountant.iteration(self.progress.step, record["wall"], has_learned=numbers.get("updates") != 0)
        self._timeline.enter(OTHER)
        self._judged(self._judge.hear)
        if _due(before, self.progress.step, self._eval_every()):
            self._judged(self._judge.evaluate)
        if failure:
            raise self._ended(failure)
        every = run.checkpoint_every or max(1, run.timesteps // 20)
        if _due(before, self.progress.step, every) and (run.checkpoint_every or self._saving_is_worth_it()):
            self._save()

    def _eval_every(self) -> int:
        run = self.config.run
        return run.eval_every if run.eval_every is not None else max(1, run.timesteps // 10)

    def _collect_and_learn(self) -> tuple[dict[str, float], Exception | None]:
        """One iteration; the failure is one that it outlived."""
        recipe, run, timeline = self.config.recipe, self.config.run, self._timeline
        try:
            lane = self.collector.finish()
        except _FAILURES as error:
            raise self._ended(error) from None  # nothing was learned since the last rollout: go on from there
        timeline.enter(LEARN)
        shuffle = keyed_generator(lane.rollout.obs.device, run.seed, SHUFFLE, self.progress.iteration)
        self._learner.begin(lane, min(1.0, self.progress.step / run.timesteps), shuffle)
        failure = self._learn()
        timeline.enter(SYNC)
        numbers = self._learner.numbers()
        self.collector.settle()
        timeline.enter(OTHER)
        self.progress.step += recipe.total_batch
        self.progress.iteration += 1
        if not numbers["experience_finite"]:
            step, env = (int(i) for i in torch.nonzero(~self._learner.finite)[0])
            is_reward = not bool(torch.isfinite(lane.rollout.rewards[step, env]))
            self._refuse(Flaw(self.progress.iteration - 1, step, env, is_reward))
        self._check_finite(numbers)
        self.collector.open()
        return numbers, failure

    def _iterate_on_device(self, loop: DeviceLoop) -> dict[str, float]:
        """Some iterations, up to where something else is due."""
        batch, run, progress = self.config.recipe.total_batch, self.config.run, self.progress
        every = [self._eval_every(), run.checkpoint_every or max(1, run.timesteps // 20)]
        stops = [run.timesteps, *((progress.step // steps + 1) * steps for steps in every if steps > 0)]
        self._timeline.enter(LEARN)
        most = -(-(min(stops) - progress.step) // batch)
        count, numbers, flaw = loop.run(progress.iteration, most, batch, run.timesteps)
        self.collector.settle()
        self._timeline.enter(OTHER)
        progress.step += count * batch
        progress.iteration += count
        if flaw is not None:
            self._refuse(flaw)
        self._check_finite(numbers)
        return numbers

    def _ended(self, error: Exception) -> Exception:
        """Save, and say so: the environments cannot go on."""
        has_learned = self.progress.iteration > 0
        if isinstance(error, WriteError) or (isinstance(error, UsageError) and not has_learned):
            return error  # nothing can be saved, or there is nothing to save
        try:
            self._save()
        except WriteError as unsaved:
            return TrainingError(f"{str(error).rstrip()}\n{unsaved}")
        return TrainingError(
            f"{str(error).rstrip()}\nMend it, then go on with: unidle train --resume {self._folder.path}"
        )

    def _learn(self) -> Exception | None:
        """Learn from the rollout at hand, and let the environments go on meanwhile if they may.

        Should they fail for good, what is being learned is still learned to its end, so that there is something whole
        to save; the failure is returned.
        """
        learner, collector = self._learner, self.collector
        failure: Exception | None = None
        going_on, more = collector.ahead > 1, True
        while more or (going_on and not learner.finished()):
            is_busy = going_on and (not more or learner.busy())
            if not is_busy:
                self._timeline.enter(LEARN)
                more = learner.advance()
                is_busy = not more or learner.busy()
            if going_on:
                try:
                    # False: all environments wait for the weights that are being learned.
                    going_on = collector.turn(_PATIENCE_SECONDS if is_busy else 0.0)
                except _FAILURES as error:
                    failure, going_on = error, False
        return failure

    def _record(self, numbers: dict[str, float], steps: int, seconds: float) -> dict[str, Any]:
        collector = self.collector
        record: dict[str, Any] = {"kind": "iteration", "step": self.progress.step, "iteration": self.progress.iteration}
        if collector.recent_returns:
            record["rollout/return_mean"] = float(np.mean(collector.recent_returns))
            record["rollout/length_mean"] = float(np.mean(collector.recent_lengths))
        if isinstance(collector, Collector) and collector.recent_successes:
            record["rollout/success"] = float(np.mean(collector.recent_successes))
        record["rollout/episodes"] = collector.episodes
        record |= {f"faults/{kind}": count for kind, count in collector.faults.items()}
        record |= {f"requests/{kind}": count for kind, count in collector.request_counts().items()}
        record["rollout/steps_per_second"] = steps / seconds
        record |= {f"train/{name}": value for name, value in numbers.items() if not name.endswith("_finite")}
        return record | self._clock.record()

    def _refuse(self, flaw: Flaw) -> None:
        """Nothing can be learned from numbers that are none."""
        recipe = self.config.recipe
        what = "reward" if flaw.is_reward else "observation"
        at = flaw.iteration * recipe.total_batch + flaw.step * recipe.n_envs
        raise TrainingError(
            f"Environment {flaw.env} returned a NaN or infinite {what} near step {at}; {self._kept_checkpoint()}."
        )

    def _kept_checkpoint(self) -> str:
        return f"the last good checkpoint is kept in {self._folder.checkpoints}"

    def _check_finite(self, numbers: dict[str, float]) -> None:
        bad = [name for name, value in numbers.items() if not np.isfinite(value) and name != "explained_variance"]
        if bad or not numbers["weights_finite"]:
            what = ", ".join(bad) or "a weight"
            normalise = ", or normalise observations and rewards (--normalize-obs --normalize-reward)"
            raise TrainingError(
                f"Learning diverged: {what} is not finite at step {self.progress.step}; {self._kept_checkpoint()}. "
                f"Lower the learning rate{normalise if self.config.recipe.on_policy else ''}."
            )

    def _on_fault(self, fault: Fault, rollout: int | None = None) -> None:
        """An environment failed and was set going again; in training, in that rollout."""
        # A run resumed from before the rollout's end sees the fault again: it must not be told twice.
        self._tell_fault(
            fault, self.progress.step if rollout is None else (rollout + 1) * self.config.recipe.total_batch
        )

    def _tell_fault(self, fault: Fault, step: int) -> None:
        self._journal.write({"kind": "fault", "step": step, "env": fault.env, "fault": fault.kind, "text": fault.text})
        self._listener.on_message(fault.text)

    def _stop(self) -> None:
        self._stopping = True

    def _interrupt(self) -> None:
        self._stopping = self._interrupted = True
        when = "and saving, without what is under way" if self._waits_for_others else "after this iteration and saving"
        with contextlib.suppress(RuntimeError):  # a signal that comes in the middle of a print must not end the run
            self._listener.on_message(f"Stopping {when} (Ctrl-C again: at once).")
        if self._waits_for_others and isinstance(self.collector, Collector):  # nobody knows how long a website takes
            self.collector.is_broken_off = True
            self._evaluations.break_off()

    # -- evaluating and saving -----------------------------------------------------------------------------------------

    def _judged(self, call: Callable[[], None]) -> None:
        """Do something about evaluations; if their environments cannot go on, nothing that was learned is lost."""
        try:
            call()
        except _FAILURES as error:
            raise self._ended(error) from None

    def _saving_is_worth_it(self) -> bool:
        """Whether there is enough that is not saved yet: a large memory may take longer to save than to collect."""
        took = self._saving_took
        return took < _NOTICED_SECONDS or took < _SAVING_SHARE * (perf_counter() - self._saved)

    def _write_down(self, record: dict[str, Any]) -> None:
        self._journal.write(record)
        self._unwritten = None

    def _save(self) -> None:
        if self._unwritten is not None:  # a signal may have come too late for it: what is saved is also written down
            self._write_down(self._unwritten)
        self._timeline.enter(CHECKPOINT)
        began = perf_counter()
        self._saver.save(self._folder, self._evaluations.state())
        self._saved = perf_counter()
        self._saving_took = self._saved - began
        self._timeline.enter(OTHER)

    def _restore(self, checkpoint: Path) -> str:
        """Go on from there; returns the kernels that computed it."""
        state = load_checkpoint(checkpoint)
        kernels = self._saver.restore(state, self._listener.on_message)
        self._evaluations.owe(owed_by(state, self._folder.path, self.progress))
        return kernels

    def close(self) -> None:
        """End all environments and their processes."""
        try:
            self.collector.close()
        finally:
            self._evaluations.close()

    _folder: RunFolder
    _journal: Journal
    _judge: Judge
    _unwritten: dict[str, Any] | None = None  # the record of the latest iteration


def _due(before: int, after: int, every: int) -> bool:
    """Whether a multiple of `every` was passed; never if it is 0."""
    return every > 0 and after // every > before // every
