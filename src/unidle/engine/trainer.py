"""One run from its first step, or its last checkpoint, to its end."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Sequence
from time import perf_counter
from typing import Any

import numpy as np
import torch

from unidle.algos.algorithm import new_policy
from unidle.algos.capturing import Capturer, as_it_is
from unidle.algos.ppo import PPO
from unidle.config import Config
from unidle.engine.build import (
    choose_device,
    choose_slices,
    choose_workers,
    make_envs,
    new_algorithm,
    set_numerics,
    spaces_to_plain,
    too_many_workers,
)
from unidle.engine.capture import Capture
from unidle.engine.checkpoint import RunFolder, load_checkpoint, random_state, restore_random_state, without_memory
from unidle.engine.collector import Collector
from unidle.engine.device_collector import DeviceCollector
from unidle.engine.device_loop import DeviceLoop, Flaw, fits
from unidle.engine.evaluate import FIRST_EVALUATION_ENV, Evaluation, Stopped, play
from unidle.engine.interrupts import Interrupts
from unidle.engine.learner import Learner
from unidle.engine.listener import Callback, Listener, Moment
from unidle.envs.contract import probe
from unidle.envs.host import Fault
from unidle.envs.make import EnvMaker
from unidle.errors import TrainingError, UsageError
from unidle.journal import Journal
from unidle.memory.rollout import Rollout
from unidle.nn.policy import NetworkFactory, n_parameters
from unidle.streams import SHUFFLE, keyed_generator
from unidle.timeline import CHECKPOINT, EVALUATE, LEARN, OTHER, Timeline

_EVALUATION_ENVS = 10
_FEW_ITERATIONS = 10
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
    ) -> None:
        recipe, run = config.recipe, config.run
        self.config, self._listener = config, listener
        self._after_iteration, self._after_evaluation = after_iteration, after_evaluation
        self._maker = maker
        device = choose_device(config.engine.device)
        torch.set_num_threads(config.engine.threads)
        self._precision = set_numerics(device, recipe)
        self.contract = probe(maker, recipe.discretize, run.seed)
        if self.contract.on_device and recipe.overlap == "strict":
            raise UsageError(
                f"{run.env} lives on the device and has nothing to overlap with learning; use --overlap off."
            )
        # After the probe, which takes as many steps as there is time for and may draw from these.
        random.seed(run.seed)
        np.random.seed(run.seed % 2**32)  # noqa: NPY002  # for environments and callbacks that draw from it
        torch.manual_seed(run.seed)
        policy = new_policy(self.contract.rows, self.contract.actions, recipe, network).to(device)
        self._capture = Capture(device, listener.on_message)
        env = maker.on_device(recipe.n_envs, run.seed, device) if self.contract.on_device else None
        # Iterations that are captured whole have no captured parts.
        is_whole = recipe.algo == "ppo" and env is not None and fits(env, recipe)
        capture_parts: Capturer = as_it_is if is_whole else self._capture
        self.algo = new_algorithm(policy, recipe, capture_parts, self._capture.fall_back)
        self._timeline = Timeline()
        # It serves a GPU, or learns while the environments go on.
        is_busy = device.type == "cuda" or recipe.overlap == "strict"
        workers = choose_workers(config.engine, recipe.n_envs, self.contract.step_seconds, is_busy=is_busy)
        rollouts = [
            Rollout(
                recipe.n_steps,
                recipe.n_envs,
                self.contract.rows.row_bytes,
                self.contract.actions.width,
                policy.state_size,
                device,
            )
            for _ in range(2 if recipe.overlap == "strict" else 1)
        ]
        engine = config.engine
        self.collector: Collector | DeviceCollector
        self._loop: DeviceLoop | None = None
        if env is not None:
            self._workers = 0
            self.collector = DeviceCollector(
                env, self.contract, policy, rollouts[0], run.seed, self._timeline, capture_parts, listener.on_message
            )
            if engine.compile:
                self.collector.compile_steps()
            if is_whole:
                assert isinstance(self.algo, PPO)
                self._loop = DeviceLoop(self.collector, self.algo, run.seed, self._capture)
        else:
            slices = choose_slices(engine, recipe.n_envs, workers, self.contract.step_seconds, device)
            envs = make_envs(maker, self.contract, recipe.n_envs, run.seed, workers, engine, slices=slices)
            self._workers = envs.workers
            try:
                self.collector = Collector(
                    envs, policy, rollouts, run.seed, self._timeline, self._capture, self._on_fault
                )
            except BaseException:
                envs.close()
                raise
        self.collector.until = -(-run.timesteps // recipe.total_batch)
        self._learner = Learner(self.algo)
        self._evaluation_envs: Any = None
        self.step = self.iteration = 0
        self.best_return, self._best_step = -float("inf"), -1
        self._wall_before = 0.0  # seconds trained before this process took over
        self._seconds_before: dict[str, float] = {}
        self._stopping = False
        self._last_evaluated = -1
        self._owes_evaluation = False  # it was stopped in the middle of one

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
            self._restore(load_checkpoint(checkpoint))
            folder.save_config(self.config)  # which may be another now, and is known to go with the checkpoint
        self._journal = Journal(
            self._folder.path,
            step=self.step,
            tensorboard=run.tensorboard,
            wandb=run.wandb,
            name=self._folder.path.name,
            config=self.config.flat(),
        )
        best = {"step": self._best_step, "eval/return_mean": self.best_return} if self._best_step >= 0 else None
        self._listener.on_start(self._facts(), run.timesteps, self.step, best)
        warning = too_many_workers(self.config.engine)
        if warning:
            self._listener.on_message(warning)
        few = -(-run.timesteps // self.config.recipe.total_batch)
        if self.contract.on_device and few < _FEW_ITERATIONS:
            self._listener.on_message(
                f"{run.timesteps:,} steps are {few} iteration{'s' * (few > 1)} of {self.config.recipe.total_batch:,}; "
                "to learn more, raise --timesteps or lower --n-envs."
            )
        if self.step >= run.timesteps:
            self._listener.on_message(f"All of its {run.timesteps:,} steps are done; give it more with --timesteps.")
        elif run.target_return is not None and self.best_return >= run.target_return:
            self._listener.on_message(f"It has reached its target return; raise --target-return {run.target_return:g}.")
            self._stopping = True
        self._timeline.begin()
        self._began = perf_counter()
        try:
            with Interrupts(self._interrupt):
                if checkpoint is None:
                    self._save()
                if self._owes_evaluation:
                    self._evaluate()
                while self.step < run.timesteps and not self._stopping:
                    self._iterate()
                if run.eval_every != 0 and self._last_evaluated != self.step and self.step >= run.timesteps:
                    self._evaluate()
                self._save()
        finally:
            self._journal.close()
            self._listener.on_end()

    def _iterate(self) -> None:
        run, began, before = self.config.run, perf_counter(), self.step
        failure: TrainingError | None = None
        if self._loop is not None:
            numbers = self._iterate_on_device(self._loop)
        else:
            numbers, failure = self._collect_and_learn()
        record = self._record("iteration", numbers, self.step - before, perf_counter() - began)
        self._journal.write(record)
        self._listener.on_iteration(record)
        self._call(self._after_iteration, record)
        if _due(before, self.step, self._eval_every()):
            self._evaluate()
        if failure:
            raise self._ended(failure)
        if _due(before, self.step, run.checkpoint_every or max(1, run.timesteps // 20)):
            self._save()

    def _eval_every(self) -> int:
        run = self.config.run
        return run.eval_every if run.eval_every is not None else max(1, run.timesteps // 10)

    def _collect_and_learn(self) -> tuple[dict[str, float], TrainingError | None]:
        """One iteration; the failure is one that it outlived."""
        recipe, run, timeline = self.config.recipe, self.config.run, self._timeline
        try:
            lane = self.collector.finish()
        except TrainingError as error:
            raise self._ended(error) from None  # nothing was learned since the last rollout: go on from there
        timeline.enter(LEARN)
        shuffle = keyed_generator(lane.rollout.rows.device, run.seed, SHUFFLE, self.iteration)
        self._learner.begin(lane, min(1.0, self.step / run.timesteps), shuffle)
        failure = self._learn()
        timeline.enter(LEARN)
        numbers = self._learner.numbers()
        self.collector.settle()
        timeline.enter(OTHER)
        self.step += recipe.total_batch
        self.iteration += 1
        if not numbers["experience_finite"]:
            step, env = (int(i) for i in torch.nonzero(~self._learner.finite)[0])
            is_reward = not bool(torch.isfinite(lane.rollout.rewards[step, env]))
            self._refuse(Flaw(self.iteration - 1, step, env, is_reward))
        self._check_finite(numbers)
        self.collector.open()
        return numbers, failure

    def _iterate_on_device(self, loop: DeviceLoop) -> dict[str, float]:
        """Some iterations, up to where something else is due."""
        batch, run = self.config.recipe.total_batch, self.config.run
        every = [self._eval_every(), run.checkpoint_every or max(1, run.timesteps // 20)]
        stops = [run.timesteps, *((self.step // steps + 1) * steps for steps in every if steps > 0)]
        self._timeline.enter(LEARN)
        most = -(-(min(stops) - self.step) // batch)
        count, numbers, flaw = loop.run(self.iteration, most, batch, run.timesteps)
        self.collector.settle()
        self._timeline.enter(OTHER)
        self.step += count * batch
        self.iteration += count
        if flaw is not None:
            self._refuse(flaw)
        self._check_finite(numbers)
        return numbers

    def _ended(self, error: TrainingError) -> TrainingError:
        """Save, and say so: the environments cannot go on."""
        self._save()
        return TrainingError(
            f"{str(error).rstrip()}\nMend it, then go on with: unidle train --resume {self._folder.path}"
        )

    def _learn(self) -> TrainingError | None:
        """Learn from the rollout at hand, and let the environments go on meanwhile if they may.

        Should they fail for good, what is being learned is still learned to its end, so that there is something whole
        to save; the failure is returned.
        """
        learner, collector = self._learner, self.collector
        failure: TrainingError | None = None
        going_on, more = collector.ahead > 1, True
        while more or (going_on and not learner.finished()):
            if more and not (going_on and learner.busy()):
                self._timeline.enter(LEARN)
                more = learner.advance()
            if going_on:
                try:
                    # False: all environments wait for the weights that are being learned.
                    going_on = collector.turn(0.0 if more and not learner.busy() else _PATIENCE_SECONDS)
                except TrainingError as error:
                    failure, going_on = error, False
        return failure

    def _record(self, kind: str, numbers: dict[str, float], steps: int, seconds: float) -> dict[str, Any]:
        collector = self.collector
        record: dict[str, Any] = {"kind": kind, "step": self.step, "iteration": self.iteration, "wall": self._wall()}
        if collector.recent_returns:
            record["rollout/return_mean"] = float(np.mean(collector.recent_returns))
            record["rollout/length_mean"] = float(np.mean(collector.recent_lengths))
        record["rollout/episodes"] = collector.episodes
        record |= {f"faults/{kind}": count for kind, count in collector.faults.items()}
        record["rollout/steps_per_second"] = steps / seconds
        record |= {f"train/{name}": value for name, value in numbers.items() if not name.endswith("_finite")}
        return record | self._time_record()

    def _time_record(self) -> dict[str, float]:
        return {f"time/{name}": seconds for name, seconds in self._seconds().items()}

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
                f"Learning diverged: {what} is not finite at step {self.step}; {self._kept_checkpoint()}. "
                f"Lower the learning rate{normalise if self.config.recipe.algo == 'ppo' else ''}."
            )

    def _on_fault(self, fault: Fault, rollout: int | None = None) -> None:
        """An environment failed and was set going again; in training, in that rollout."""
        # A run resumed from before the rollout's end sees the fault again: it must not be told twice.
        step = self.step if rollout is None else (rollout + 1) * self.config.recipe.total_batch
        self._journal.write({"kind": "fault", "step": step, "env": fault.env, "fault": fault.kind, "text": fault.text})
        self._listener.on_message(fault.text)

    def _call(self, callbacks: Sequence[Callback], record: dict[str, Any]) -> None:
        for callback in callbacks:
            callback(Moment(record, self.algo.policy, self._stop))

    def _stop(self) -> None:
        self._stopping = True

    def _interrupt(self) -> None:
        self._stopping = True
        with contextlib.suppress(RuntimeError):  # a signal that comes in the middle of a print must not end the run
            self._listener.on_message("Stopping after this iteration and saving (Ctrl-C again: at once).")

    # -- evaluating and saving -----------------------------------------------------------------------------------------

    def evaluate(self, episodes: int) -> Evaluation:
        """Play `episodes` episodes with the mode action, in environments of their own; may raise Stopped."""
        if self._evaluation_envs is None:
            n_envs = min(self.config.run.eval_episodes, _EVALUATION_ENVS)
            workers = min(self._workers, n_envs)
            seed = self.config.run.seed
            self._evaluation_envs = make_envs(
                self._maker, self.contract, n_envs, seed, workers, self.config.engine, FIRST_EVALUATION_ENV
            )
        return play(
            self.algo.policy,
            self._evaluation_envs,
            episodes,
            stop=lambda: self._stopping,
            on_fault=self._on_fault,
        )

    def _evaluate(self) -> None:
        run = self.config.run
        self._timeline.enter(EVALUATE)
        try:
            result = self.evaluate(run.eval_episodes)
        except Stopped:
            self._owes_evaluation = True
            return
        except TrainingError as error:
            raise self._ended(error) from None
        self._timeline.enter(OTHER)
        self._last_evaluated, self._owes_evaluation = self.step, False
        is_best = result.mean_return > self.best_return
        record = {
            "kind": "evaluation",
            "step": self.step,
            "wall": self._wall(),
            "eval/return_mean": result.mean_return,
            "eval/return_std": result.std_return,
            "eval/length_mean": result.mean_length,
            "eval/episodes": result.episodes,
            "eval/best": is_best,
            **self._time_record(),
        }
        self._journal.write(record)
        self._listener.on_evaluation(record)
        if is_best:
            self.best_return, self._best_step = result.mean_return, self.step
            # The best first: a run killed in between evaluates again and writes it again.
            self._timeline.enter(CHECKPOINT)
            self._folder.save_best(without_memory(self._state()))
            self._save()
        if run.target_return is not None and result.mean_return >= run.target_return:
            self._listener.on_message(f"Target return {run.target_return:g} reached at step {self.step:,}.")
            self._stopping = True
        self._call(self._after_evaluation, record)

    def _save(self) -> Any:
        self._timeline.enter(CHECKPOINT)
        state = self._state() if self.config.run.save_replay else without_memory(self._state())
        path = self._folder.save(state, self.step, self.config.run.keep_checkpoints)
        self._timeline.enter(OTHER)
        return path

    def _state(self) -> dict[str, Any]:
        return {
            "spaces": spaces_to_plain(self.contract),
            "algo": self.algo.state_dict(),
            "collector": self.collector.state_dict(),
            "random": random_state(),
            "step": self.step,
            "iteration": self.iteration,
            "best_return": self.best_return,
            "best_step": self._best_step,
            "last_evaluated": self._last_evaluated,
            "owes_evaluation": self._owes_evaluation,
            "wall": self._wall(),
            "seconds": self._seconds(),
        }

    def _restore(self, state: dict[str, Any]) -> None:
        if state["spaces"] != spaces_to_plain(self.contract):
            raise UsageError(
                "The environment has other spaces than the checkpoint; resume with the one it was trained on."
            )
        was_on_device = "moving" in state["collector"]
        if was_on_device != self.contract.on_device:
            raise UsageError(
                "This run's environments live on the device, those of worker processes are their twins; leave out "
                "--workers and --subproc."
                if was_on_device
                else "This run's environments are in worker processes; go on there: --subproc."
            )
        self.algo.load_state_dict(state["algo"])
        if "memory" not in state["algo"].get("experience", {"memory": None}):
            self._listener.on_message(
                f"What was remembered is not in the checkpoint (--no-save-replay): learning goes on when "
                f"{self.config.recipe.learning_starts:,} steps are collected anew."
            )
        lost = self.collector.load_state_dict(state["collector"])
        if lost:
            self._listener.on_message(
                f"{len(lost)} of {self.config.recipe.n_envs} environments are not deterministic: their open episode "
                "could not be replayed and starts anew, so this run will differ from one that was never stopped."
            )
        self.step, self.iteration = state["step"], state["iteration"]
        self.best_return, self._best_step = state["best_return"], state["best_step"]
        self._last_evaluated, self._owes_evaluation = state["last_evaluated"], state["owes_evaluation"]
        self._wall_before, self._seconds_before = state["wall"], state["seconds"]
        restore_random_state(state["random"])

    def close(self) -> None:
        """End all environments and their processes."""
        try:
            self.collector.close()
        finally:
            if self._evaluation_envs is not None:
                self._evaluation_envs.close()

    # -- what is said --------------------------------------------------------------------------------------------------

    _began: float = 0.0
    _folder: RunFolder
    _journal: Journal

    def _wall(self) -> float:
        return self._wall_before + (perf_counter() - self._began if self._began else 0.0)

    def _seconds(self) -> dict[str, float]:
        return {name: s + self._seconds_before.get(name, 0.0) for name, s in self._timeline.seconds().items()}

    def _facts(self) -> dict[str, str]:
        """What the start prints."""
        recipe, run = self.config.recipe, self.config.run
        policy = self.algo.policy
        step = f"a step takes {self.contract.step_seconds * 1e6:.0f} µs"
        backend = f"{self._workers} worker processes ({step})" if self._workers else f"in this process ({step})"
        if self.contract.on_device:
            backend = "on the device"
        how_often = f"{recipe.n_epochs} epochs"
        if recipe.algo != "ppo":
            how_often = f"{recipe.updates_per_step:g} updates a step, from {recipe.buffer_size:,} steps"
        layers = ",".join(map(str, recipe.network_arch)) or "linear"
        core = f"{recipe.recurrent} {recipe.recurrent_size} → " if recipe.recurrent != "none" else ""
        device = next(policy.parameters()).device
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
        return {
            "run": str(self._folder.path),
            "environment": f"{run.env}, {backend}",
            "preset": run.preset or "none",
            "total batch": f"n_envs {recipe.n_envs} × n_steps {recipe.n_steps} = {recipe.total_batch:,}",
            "batch size": f"{recipe.batch_size:,}, {how_often}",
            "overlap": recipe.overlap,
            "network": f"{core}{layers} {recipe.activation}, {n_parameters(policy):,} parameters",
            "device": f"{name}, {self._precision}",
        }


def _due(before: int, after: int, every: int) -> bool:
    """Whether a multiple of `every` was passed; never if it is 0."""
    return every > 0 and after // every > before // every
