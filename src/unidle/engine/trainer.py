"""Runs training, from the first step or the last checkpoint to the end."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from time import perf_counter
from typing import Any

from unidle.algos.run_to_end import run_to_end
from unidle.algos.schedules import Schedule
from unidle.buffers.rollout import Rollout
from unidle.config import Config
from unidle.config.machine import available_cores
from unidle.config.settings import round_up_timesteps
from unidle.distributed.ranks import Ranks, stage
from unidle.engine.build import build_parts
from unidle.engine.callbacks import Callback, CallbackRunner, Callbacks, ProgressDisplay, TimeMeter
from unidle.engine.checkpoint.changes import record_changes
from unidle.engine.checkpoint.checkpoint_file import explain_weight_mismatch
from unidle.engine.checkpoint.kernel_versions import kernels_on
from unidle.engine.checkpoint.run_folder import RunFolder
from unidle.engine.checkpoint.saver import Saver
from unidle.engine.clock import RunClock
from unidle.engine.collect.host import HostCollector
from unidle.engine.evaluate.best_policy import BestPolicyTracker, pending_evaluations
from unidle.engine.evaluate.evaluations import Evaluations
from unidle.engine.evaluate.play import Stopped
from unidle.engine.evaluate.schedule import choose_processes, effect_delay
from unidle.engine.interrupts import Interrupts
from unidle.engine.iteration_log import IterationLog, is_due
from unidle.engine.learn.device_loop import DeviceLoop
from unidle.engine.learn.finite import NonFinite, first_non_finite, require_finite
from unidle.engine.learn.learner import Learner
from unidle.engine.other_trainers import OtherTrainers
from unidle.engine.overlap import ENV_FAILURES, Overlap
from unidle.engine.progress import Progress
from unidle.engine.run_facts import run_facts, start_notes
from unidle.engine.run_log import open_log, open_monitor
from unidle.engine.sharing import Sharing
from unidle.engine.together import Together
from unidle.engine.turns import Turns
from unidle.envs.make import EnvMaker
from unidle.envs.protocol import Fault
from unidle.metrics.log import MetricLog
from unidle.metrics.writer import MetricWriter
from unidle.nn.actor_critic import NetworkFactory
from unidle.rng import SHUFFLE, keyed_generator
from unidle.timeline import CHECKPOINT, LEARN, LOGGING, OTHER, Timeline

_NO_CALLBACKS = Callbacks()
_NO_SCHEDULES: Mapping[str, Schedule] = {}


def _no_pause() -> Turns[None]:
    yield from ()


class Trainer:
    """Collects, learns, evaluates and saves until the run is over."""

    def __init__(
        self,
        config: Config,
        maker: EnvMaker,
        display: ProgressDisplay,
        *,
        network: NetworkFactory | None = None,
        callbacks: Callbacks = _NO_CALLBACKS,
        writers: Sequence[MetricWriter] = (),
        meter: TimeMeter | None = None,
        schedules: Mapping[str, Schedule] = _NO_SCHEDULES,
        others: OtherTrainers | None = None,
        sharing: Sharing | None = None,
        interrupts: Interrupts | None = None,
        ranks: Ranks | None = None,
    ) -> None:
        """`schedules` replace those that the recipe gives. With `ranks`, this is one of them; `config` is of all.

        `others`: the trainers with which it shares the machine's cores; None: it takes all. `sharing` and `interrupts`
        are those of a group of runs in this process, if it is part of one.
        """
        self.config, self._display, self._meter, self._writers = config, display, meter, writers
        self._is_async = maker.kind == "async"
        self._callbacks = callbacks
        self._timeline = Timeline()
        say = display.on_message
        self.progress = Progress()
        self._together = Together(ranks, config, self.progress, self.save)
        self._parts = build_parts(config, maker, network, self._timeline, say, self._on_fault, others, sharing, ranks)
        self.env_spec, self.algo, self.collector = self._parts.env_spec, self._parts.algo, self._parts.collector
        self.algo.schedules.update(schedules)
        self._learner = Learner(self.algo, self._timeline, ranks)
        self._overlap = Overlap(self.collector, self._learner, self._timeline)
        self.pause: Callable[[], Turns[None]] = _no_pause  # between iterations
        self._interrupts = interrupts or Interrupts()
        self._interrupts.listeners.append(self._interrupt)
        self._stopping = self._interrupts.received is not None  # while a group of runs was being built
        self._clock = RunClock(self._timeline)
        try:
            kernels = kernels_on(self._parts.capture.device)
            parts = (config, self.env_spec, self.algo, self.collector, self.progress, self._clock)
            self._saver = Saver(*parts, kernels, display.on_message)
            self._saver.ranks = self._together.size
            workers, cores = self._parts.workers, self._parts.cores
            if sharing is not None:
                cores = sharing.share_of(cores or available_cores())
            self._evaluations = Evaluations(
                config,
                maker,
                self.env_spec,
                self.algo.policy,
                network,
                in_workers=workers > 0,
                processes=choose_processes(config, maker, self.env_spec, workers, cores),
                delay=effect_delay(config, maker, self.env_spec, has_callbacks=bool(callbacks.after_evaluation)),
                clock=self._clock.record,
                say=display.on_message,
                on_fault=self._on_fault,
                stop=self._is_interrupted,
                env_statistics=self.collector.env_statistics,
            )
        except BaseException:
            self.collector.close()
            raise

    _folder: RunFolder
    _log: MetricLog
    _iterations: IterationLog
    _tracker: BestPolicyTracker
    _runner: CallbackRunner
    _recorded: frozenset[int] = frozenset()  # see BestPolicyTracker
    _rollout: Rollout | None = None  # of the latest iteration

    def close(self) -> None:
        """Close all environments and end their processes."""
        with contextlib.suppress(ValueError):  # already closed
            self._interrupts.listeners.remove(self._interrupt)  # those of a group outlive its runs
        try:
            self.collector.close()
        finally:
            self._evaluations.close()

    # -- the run -------------------------------------------------------------------------------------------------------

    def train(self, folder: RunFolder, state: dict[str, Any] | None = None) -> None:
        """`train_in_turns`, without giving other runs a turn."""
        run_to_end(self.train_in_turns(folder, state))

    def train_in_turns(self, folder: RunFolder, state: dict[str, Any] | None = None) -> Turns[None]:
        """Train until the last step, the target return or Ctrl-C, and save a checkpoint at the end.

        Continues from `state`, by default the folder's latest checkpoint. If `state` has no `collector`, its algorithm
        and counters continue in new environments.
        """
        self._folder, self._together.path, say = folder, folder.path, self._display.on_message
        with contextlib.ExitStack() as end:  # closed in reverse order, each even if another fails
            for close in (folder.unlock, self._saver.close, self._display.on_end):
                end.callback(close)
            with self._together.start(self.algo):
                is_new = self._open(end, self._together.load(folder, say) if state is None else state)
            self._announce()
            self._clock.begin()
            end.callback(self._clock.end)
            if self._meter is not None:
                self._meter.begin(folder.path, self._timeline, self.progress.step, self._parts.capture.on_gpu())
                end.callback(self._meter.end)
            end.enter_context(self._interrupts)
            end.callback(lambda: self._call(self._callbacks.on_end))
            yield from self._run(is_new)

    def _open(self, end: contextlib.ExitStack, state: dict[str, Any] | None) -> bool:
        """Start or restore the run and open its logs, which `end` closes; returns whether the run is new."""
        folder, progress, say = self._folder, self.progress, self._display.on_message
        if state is not None and "collector" not in state:
            self._restore_algorithm(state)
            state = None
        elif state is None:
            self.collector.start()
        else:
            kernels = self._restore(state), self._saver.kernels
        monitor = open_monitor(folder.path, self.config, self.collector, self._clock.wall(), say)
        if monitor is not None:
            end.callback(monitor.close)
        if state is not None and self._is_over:
            self._saver.keep_settings(state["settings"])
        else:
            if state is not None and folder.is_kept:
                settings = folder.config(), state["settings"], self.config
                record_changes(folder.path, *settings, progress.step, self._clock.wall(), kernels, say)
            # Only now: settings that do not fit the checkpoint or the columns of monitor.csv are not saved.
            folder.save_config(self.config, progress.step)
        self._log = open_log(folder, self.config, progress.step, self._writers, say)
        end.callback(self._log.close)
        parts = self._log, self.collector, progress, self._clock
        self._iterations = IterationLog(*parts, self.config.run.timesteps, say, monitor)
        self._runner = CallbackRunner(folder.path, self._log, self.stop, self._state)
        self._tracker = BestPolicyTracker(
            self.config,
            self.algo,
            self._evaluations,
            progress,
            self._saver,
            folder,
            self._log,
            self._display,
            self._timeline,
            self._callbacks.after_evaluation,
            self._runner,
            report_fault=self._report_fault,
            save=self._save if self._together.ranks is None else self._together.request_save,
            stop=self.stop,
            is_interrupted=self._is_interrupted,
            recorded=self._recorded,
        )
        return state is None

    def _run(self, is_new: bool) -> Turns[None]:
        run, progress = self.config.run, self.progress
        self._call(self._callbacks.on_start)
        if is_new:
            with stage(self._together.ranks):
                self._save()
        yield from self._together.attempt(self._together.save_on_failure(self._tracker.run_pending()))
        self._decide()
        with contextlib.suppress(Stopped):
            while self._goes_on:
                yield from self.pause()
                if self._goes_on:
                    yield from self._iterate()
        if self._together.ranks is not None:  # while rank 0 evaluates, the others may end
            self._together.finish(self.algo)
            with stage(self._together.ranks):
                self.save()
        if run.eval_every != 0 and progress.last_evaluated != progress.step >= run.timesteps:
            yield from self._together.save_on_failure(self._tracker.evaluate())
        if self._together.is_first:
            self._save()
        yield from self._together.save_on_failure(self._tracker.finish())
        self._saver.finish()

    @property
    def _is_over(self) -> bool:
        """Whether the run has nothing left to train: then no setting that it is resumed with is its own."""
        return self.progress.step >= self.config.run.timesteps or self._has_reached_target

    @property
    def _has_reached_target(self) -> bool:
        target = self.config.run.target_return
        return target is not None and self.progress.highest_return >= target

    @property
    def _goes_on(self) -> bool:
        must_stop = self._stopping if self._together.ranks is None else self._together.stops
        return self.progress.step < self.config.run.timesteps and not must_stop

    def _call(self, callbacks: Sequence[Callback]) -> None:
        self._runner.call(callbacks, {"step": self.progress.step}, self.algo.policy)

    def _announce(self) -> None:
        """Show the run's summary, and warnings about its settings."""
        run, progress, display = self.config.run, self.progress, self._display
        total = round_up_timesteps(run.timesteps, self.config.recipe.total_batch)
        path = self._folder.path if self._folder.is_kept else None
        facts = run_facts(self.config, self._parts, path, self._evaluations.processes, progress.step)
        display.on_start(facts, max(progress.step, total), progress.step, progress.best)
        for text in start_notes(self.config, self.env_spec):
            display.on_message(text)
        if progress.step >= run.timesteps:
            has_changed = path is not None and self._folder.config() != self.config
            unused = " The settings that you changed are not used." if has_changed else ""
            display.on_message(f"All {run.timesteps:,} steps are done; raise --timesteps to train further.{unused}")
        elif self._has_reached_target:
            display.on_message(
                f"The target return is already reached; raise --target-return {run.target_return:g} to train further."
            )
            self._stopping = True

    # -- one iteration -------------------------------------------------------------------------------------------------

    def _iterate(self) -> Turns[None]:
        yield from self._together.attempt(self._learn_and_log())
        self._decide()

    def _learn_and_log(self) -> Turns[None]:
        run, progress, began, before = self.config.run, self.progress, perf_counter(), self.progress.step
        failure: Exception | None = None
        if self._parts.loop is not None:
            metrics = yield from self._iterate_on_device(self._parts.loop)
        else:
            metrics, failure = yield from self._collect_and_learn()
        self._timeline.enter(LOGGING)
        steps = progress.step - before
        record = self._iterations.record(metrics, steps, perf_counter() - began)
        self._iterations.add(record, steps, is_last=progress.step >= run.timesteps or self._stopping)
        self._display.on_iteration(record)
        self._runner.call(self._callbacks.after_iteration, record, self.algo.policy, self._rollout)
        if self._meter is not None:
            self._meter.iteration(progress.step, record["wall"], has_learned=metrics.get("updates") != 0)
        self._timeline.enter(OTHER)
        yield from self._together.save_on_failure(self._tracker.handle_results())
        if is_due(before, progress.step, run.evaluation_interval):
            yield from self._together.save_on_failure(self._tracker.evaluate())
        if failure:
            raise self._together.saved_failure(failure)
        self._saver.check()
        save_is_due = is_due(before, progress.step, self._save_every())
        if save_is_due and (run.checkpoint_every or self._saver.is_worth_saving()):
            self._together.request_save()

    def _save_every(self) -> int:
        run = self.config.run
        return run.checkpoint_every or max(1, run.timesteps // 20)

    def _collect_and_learn(self) -> Turns[tuple[dict[str, float], Exception | None]]:
        """Run one iteration; returns its metrics, and the failure if the environments failed during the update."""
        run, progress, together = self.config.run, self.progress, self._together
        if isinstance(self.collector, HostCollector):
            yield from together.fill(self.collector)
        try:
            finished = yield from self.collector.finish_in_turns()
        except ENV_FAILURES as error:
            raise together.saved_failure(error) from None  # nothing was learned since: it can resume here
        self._timeline.enter(LEARN)
        key = run.seed, SHUFFLE, progress.iteration, *together.own_key
        shuffle = keyed_generator(finished.rollout.obs.device, *key)
        self._rollout = finished.rollout
        metrics, failure = yield from self._overlap.learn(finished, min(1.0, progress.step / run.timesteps), shuffle)
        self.collector.read_episode_stats()
        self._timeline.enter(OTHER)
        progress.step += self.config.recipe.total_batch
        progress.iteration += 1
        if isinstance(self.collector, HostCollector):
            together.share_episodes(self.collector, self._report_fault)
        if metrics["experience_finite"] < 1:  # the same bits on all ranks, and exactly 1 if it is 1 on each
            with stage(together.ranks):  # all end here, before anything is logged, evaluated or saved
                if not self._learner.finite.all():
                    non_finite = first_non_finite(self._learner.finite, finished.rollout, progress.iteration - 1)
                    self._check_finite(replace(non_finite, env=together.first_env + non_finite.env), metrics)
        self._check_finite(None, metrics)
        self.collector.open_rollout()
        return metrics, failure

    def _iterate_on_device(self, loop: DeviceLoop) -> Turns[dict[str, float]]:
        """Run a burst of iterations, at most up to the next evaluation or checkpoint."""
        batch, run, progress = self.config.recipe.total_batch, self.config.run, self.progress
        due = [
            (progress.step // every + 1) * every for every in (run.evaluation_interval, self._save_every()) if every > 0
        ]
        self._timeline.enter(LEARN)
        limit = -(-(min([run.timesteps, *due]) - progress.step) // batch)
        count, metrics, non_finite = yield from loop.run_in_turns(progress.iteration, limit, batch, run.timesteps)
        self.collector.read_episode_stats()
        self._timeline.enter(OTHER)
        progress.step += count * batch
        progress.iteration += count
        self._check_finite(non_finite, metrics)
        return metrics

    # -- failures ------------------------------------------------------------------------------------------------------

    def _check_finite(self, non_finite: NonFinite | None, metrics: dict[str, float]) -> None:
        recipe, checkpoints = self.config.recipe, self._folder.checkpoints if self._folder.is_kept else None
        require_finite(non_finite, metrics, self.progress.step, recipe, checkpoints)

    def _on_fault(self, fault: Fault, rollout: int | None = None) -> None:
        """Report a fault of an environment, in this rollout or in an evaluation."""
        # Faults are logged at the step at which their rollout ends: a run that is resumed before it sees them again,
        # and the earlier record, which is past the checkpoint's step, is dropped.
        step = self.progress.step if rollout is None else (rollout + 1) * self.config.recipe.total_batch
        if not self._together.keep_fault(fault, step):
            self._report_fault(fault, step)

    def _report_fault(self, fault: Fault, step: int) -> None:
        self._log.write({"kind": "fault", "step": step, "env": fault.env, "fault": fault.kind, "text": fault.text})
        self._display.on_message(fault.text)

    # -- stopping and saving -------------------------------------------------------------------------------------------

    @property
    def workers(self) -> int:
        """Worker processes that step its environments."""
        return self._parts.workers

    @property
    def stopped_by(self) -> int | None:
        """The signal that stopped the run before it was complete."""
        is_complete = self.progress.step >= self.config.run.timesteps and self._evaluations.n_open == 0
        return None if is_complete else self._interrupts.received or self._together.signal

    def _is_interrupted(self) -> bool:
        return self._interrupts.received is not None

    def stop(self) -> None:
        """End the run after this iteration."""
        self._stopping = True

    def save(self) -> None:
        """Write a checkpoint, and wait until it is on the disk; between iterations."""
        self._save()
        self._saver.finish()

    def _interrupt(self) -> None:
        self._stopping = True
        when = "and saving, without the unfinished rollout" if self._is_async else "after this iteration and saving"
        with contextlib.suppress(RuntimeError):  # a signal that arrives during a print must not end the run
            self._display.on_message(f"Stopping {when} (Ctrl-C again: stop immediately).")
        if self._is_async and isinstance(self.collector, HostCollector):  # a website may take arbitrarily long
            self.collector.is_cancelled = True
            self._evaluations.cancel()

    def _state(self) -> dict[str, Any]:
        self._iterations.flush()  # so that the log is complete up to the checkpoint
        return self._saver.state(self._evaluations.state())

    def _save(self) -> None:
        if not self._folder.has_checkpoints:
            return
        self._iterations.flush()  # so that the log is complete up to the checkpoint
        self._timeline.enter(CHECKPOINT)
        self._saver.save(self._folder, self._evaluations.state())
        self._timeline.enter(OTHER)

    def _decide(self) -> None:
        say, signal = self._display.on_message, self._interrupts.received
        if self._together.decide(self.algo, say, stop=self._stopping, signal=signal):
            with stage(self._together.ranks):  # an earlier checkpoint of one rank may have failed
                self._save()

    def _restore_algorithm(self, state: dict[str, Any]) -> None:
        """Restore the algorithm and the counters, and start new environments."""
        self._saver.require_same_spaces(state)
        with explain_weight_mismatch():
            self.algo.load_state_dict(state["algo"])
        self.progress.load_state_dict(state)
        if isinstance(self.collector, HostCollector):
            self.collector.schedule.restart_at(self.progress.iteration)
        if "first_episode" in state and isinstance(self.collector, HostCollector):  # from other ranks of this run
            self._clock.resume(state["wall"], state["seconds"])
            self.collector.start(state["first_episode"])
            if self._together.is_first:
                self._load_pending(state)
        else:
            self.collector.start()

    def _restore(self, state: dict[str, Any]) -> str:
        """Restore a checkpoint; returns the kernels that it names."""
        kernels = self._saver.restore(state, self._together.relaying(self._display.on_message))
        self._load_pending(state)
        return kernels

    def _load_pending(self, state: dict[str, Any]) -> None:
        """Continue with the evaluations that were pending when a checkpoint was saved."""
        pending, self._recorded = pending_evaluations(state, self._folder.path, self.progress)
        self._evaluations.load_pending(pending)
