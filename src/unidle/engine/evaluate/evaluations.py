"""The evaluations of one run: requested regularly, run in this process or asynchronously, returned when done.

Asynchronous evaluations give the same results, so where one runs may depend on timing: those of a short run are over
before other processes have started, so the trainer plays the first ones itself, if they take less than half a second
together.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

from torch import Tensor

from unidle.algos.registry import AnyPolicy
from unidle.config import Config
from unidle.engine.build import make_envs
from unidle.engine.evaluate.async_evaluator import AsyncEvaluator
from unidle.engine.evaluate.play import (
    FIRST_EVALUATION_ENV,
    Evaluation,
    Stopped,
    longest_episode,
    n_evaluation_envs,
    play,
    use_statistics,
)
from unidle.engine.placement import choose_workers
from unidle.envs.make import EnvMaker
from unidle.envs.protocol import Fault, HostEnvs
from unidle.envs.spec import EnvSpec
from unidle.errors import TrainingError
from unidle.nn.actor_critic import NetworkFactory
from unidle.rng import preserved_random_state

Record = dict[str, Any]

_PATIENCE_SECONDS = 0.5  # for evaluations in the trainer, before other processes start


@dataclass(frozen=True)
class FinishedEvaluation:
    """An evaluation that is done."""

    step: int
    due: int  # the iteration before which its result has no effect
    extra: Record  # further fields of its record: the time, and those passed with the request
    result: Evaluation
    weights: dict[str, Tensor]  # of the evaluated policy; valid until the next request
    policy: AnyPolicy | None = None  # the evaluated policy, if it is in this process
    faults: list[Fault] = field(default_factory=list)  # not reported yet


class Evaluations:
    """Plays `eval_episodes` episodes with deterministic actions, in separate environments."""

    def __init__(
        self,
        config: Config,
        maker: EnvMaker,
        env_spec: EnvSpec,
        policy: AnyPolicy,
        network: NetworkFactory | None,
        *,
        in_workers: bool,
        processes: int,
        delay: int = 0,
        clock: Callable[[], Record],
        say: Callable[[str], None],
        on_fault: Callable[[Fault], None],
        stop: Callable[[], bool],
        env_statistics: Callable[[], Record] = dict,
    ) -> None:
        """Asynchronous, in `processes` processes; 0: in this process, with environments in workers if `in_workers`.

        Results are returned `delay` iterations after the request or later. `stop`: the user wants the run to end.
        `env_statistics`: the running means with which wrappers of the training environments normalise now.
        """
        self._env_statistics = env_statistics
        self._config, self._maker, self._env_spec = config, maker.for_evaluation(), env_spec
        self._policy, self._network, self._in_workers = policy, network, in_workers
        self.processes, self._delay, self._say = processes, delay, say
        self._clock, self._on_fault, self._stop = clock, on_fault, stop
        self._envs: HostEnvs | None = None
        self._is_playing = False
        self._done: list[FinishedEvaluation] = []
        self._pending: list[Record] = []  # interrupted, or waiting for a slot in the queue
        self.task_names = _task_names(maker, env_spec, config.recipe.n_tasks)
        self._patience, self._latest_seconds = _PATIENCE_SECONDS, 0.0  # left, and of the latest evaluation
        self._async: AsyncEvaluator | None = None
        self._async_works = config.engine.eval_workers is not None  # otherwise the trainer can take over
        if processes and not self._can_start_here():
            self._start_processes()  # to be ready for the first evaluation; pickling errors are raised at the start

    @property
    def is_async(self) -> bool:
        """Whether training continues during evaluations."""
        return self.processes > 0

    @property
    def n_open(self) -> int:
        """Number of evaluations whose results have not been returned."""
        running = len(self._async.requests) if self._async else 0
        return len(self._done) + running + len(self._pending)

    @property
    def is_full(self) -> bool:
        """Whether an evaluation must finish before the next can be requested: pending ones come first."""
        return self._async is not None and (self._async.is_full or bool(self._pending))

    def request(self, step: int, iteration: int, extra: Record) -> None:
        """Evaluate the current policy. If the run is stopped before it is done, it stays pending."""
        due = iteration + self._delay if self._delay else 0
        if self.is_async:
            extra = {**self._clock(), **extra}
        try:
            if self._async is None:
                self._done.append(self._play(step, due, extra, self._policy))
                return
        except Stopped:
            if self._needs_processes():
                self._start_processes()
        weights = self._policy.state_dict()
        if self._async is None or self.is_full:  # the run is stopping: do not wait for a free slot
            self._pending.append({"step": step, "due": due, "about": extra, "weights": _copied(weights)})
        else:
            self._async.request(step, due, extra, weights)

    def done(self, iteration: float, seconds: float = 0.0) -> Iterator[FinishedEvaluation]:
        """Finished evaluations in the order of their requests, those that are due at `iteration`.

        Waits at most `seconds` for the first.
        """
        while self._done and self._done[0].due <= iteration:
            yield self._done.pop(0)
        while self._async is not None and not self._done:
            self.run_pending()
            requests = self._async.requests
            if not requests or requests[0].due > iteration:
                return
            try:
                taken = self._async.take(seconds)
            except TrainingError as error:
                if self._async_works:
                    raise
                self._fall_back(error)
                yield from self.done(iteration)
                return
            if taken is None:
                return
            self._async_works = True
            request, result = taken
            weights = self._async.weights(request)
            yield FinishedEvaluation(request.step, request.due, request.extra, result, weights, faults=request.faults)
            self._async.release()
            seconds = 0.0

    def is_overdue(self, iteration: int) -> bool:
        """Whether training must wait for a result, which has an effect at `iteration`."""
        if self._delay == 0 or self._done:
            return False
        running = [each.due for each in self._async.requests] if self._async else []
        return min([*running, *(_due(each) for each in self._pending)], default=iteration + 1) <= iteration

    # -- where ---------------------------------------------------------------------------------------------------------

    def _can_start_here(self) -> bool:
        """Whether the first evaluations may run in the trainer instead of another process, with the same results.

        They may not if a GPU rounds differently, if state survives the environment's episodes,
        or if the user asked for processes.
        """
        engine, env_spec = self._config.engine, self._env_spec
        on_cpu = next(self._policy.parameters()).device.type == "cpu"
        asked = engine.eval_workers is not None or engine.workers is not None or engine.subproc
        return on_cpu and not (asked or env_spec.stateful_wrappers or env_spec.unsaved)

    def _needs_processes(self) -> bool:
        return self.is_async and self._async is None and not self._stop()

    def _start_processes(self) -> None:
        parts = (self._config, self._maker, self._env_spec, self._network, self._policy.state_dict())
        self._async = AsyncEvaluator(*parts, self.processes, self._say)
        if self._envs is not None:
            self._envs.close()
            self._envs = None

    def _fall_back(self, error: TrainingError) -> None:
        """Evaluate in the trainer after all, because the processes that unidle chose to start do not work."""
        assert self._async is not None
        self._say(f"{error} Evaluations run in the trainer from now on.")
        self._pending, self.processes, evaluator = self.state(), 0, self._async
        self._async = None
        evaluator.close()
        self.run_pending()

    def _play(self, step: int, due: int, extra: Record, policy: AnyPolicy) -> FinishedEvaluation:
        """Play in this process; raises Stopped if the run is stopping, or if it takes too long."""
        episodes, faults, began = self._config.run.eval_episodes, list[Fault](), perf_counter()
        if self.is_async and self._latest_seconds > self._patience:
            raise Stopped  # it would take too long again

        def must_stop() -> bool:
            return self._stop() or (self.is_async and perf_counter() - began > self._patience)

        # Environments may seed the global generators, which those of training draw from too.
        with preserved_random_state():
            if self._envs is None:
                self._envs = self._make_envs()
            use_statistics(self._envs, self._env_statistics())
            self._is_playing = True
            try:
                limit = longest_episode(self._config.run, self._env_spec)
                result = play(policy, self._envs, episodes, stop=must_stop, on_fault=faults.append, max_steps=limit)
            except Stopped:
                raise
            except Exception:
                for fault in faults:
                    self._on_fault(fault)
                raise
            finally:
                self._is_playing = False
                self._latest_seconds = perf_counter() - began
                self._patience -= self._latest_seconds
        extra, weights = {**self._clock(), **extra}, policy.state_dict()
        if self._delay:  # the policy changes before the result is returned
            return FinishedEvaluation(step, due, extra, result, _copied(weights), faults=faults)
        return FinishedEvaluation(step, due, extra, result, weights, policy, faults)

    def _make_envs(self) -> HostEnvs:
        run, engine, workers = self._config.run, self._config.engine, 0
        n_envs = n_evaluation_envs(run.eval_episodes)
        if self._in_workers and not (self.is_async or self._env_spec.vectorised):
            workers = choose_workers(engine, n_envs, self._env_spec.step_seconds, is_busy=True)
        return make_envs(self._maker, self._env_spec, n_envs, run.seed, workers, engine, FIRST_EVALUATION_ENV)

    # -- stopping and resuming -----------------------------------------------------------------------------------------

    def cancel(self) -> None:
        """Raise Stopped in the middle of the evaluation that runs in this process, if any; for a signal handler.

        It need not wait for the end of a step, as `stop` does, because the environments are discarded.
        """
        if self._is_playing:
            raise Stopped

    def state(self) -> list[Record]:
        """For a checkpoint: every evaluation that is not done or not handled, with its weights."""
        evaluator = self._async
        kept = [(each.step, each.due, each.extra, each.weights) for each in self._done]
        if evaluator is not None:
            kept += [(each.step, each.due, each.extra, evaluator.weights(each)) for each in evaluator.requests]
        copies = [
            {"step": step, "due": due, "about": extra, "weights": _copied(weights)}
            for step, due, extra, weights in kept
        ]
        return sorted(self._pending + copies, key=lambda each: int(each["step"]))

    def load_pending(self, state: Iterable[Record]) -> None:
        """Continue with the pending evaluations of a checkpoint."""
        self._pending = list(state)

    def run_pending(self) -> None:
        """Run pending evaluations, or submit as many as the asynchronous queue has free slots."""
        with contextlib.suppress(Stopped):
            while self._pending and not (self._async is not None and self._async.is_full):
                step, extra, weights = (self._pending[0][name] for name in ("step", "about", "weights"))
                due = _due(self._pending[0])
                try:
                    if self._async is None:
                        self._done.append(self._play(step, due, extra, self.with_weights(weights)))
                except Stopped:
                    if not self._needs_processes():
                        raise
                    self._start_processes()
                if self._async is not None:
                    self._async.request(step, due, {**self._clock(), **extra}, weights)
                self._pending.pop(0)

    def with_weights(self, weights: dict[str, Tensor]) -> AnyPolicy:
        """A copy of the policy with these weights."""
        policy = copy.deepcopy(self._policy)
        policy.load_state_dict(weights)
        return policy

    def close(self) -> None:
        """Close all environments and end their processes."""
        with contextlib.ExitStack() as stack:
            for part in (self._envs, self._async):
                if part is not None:
                    stack.callback(part.close)


def _due(pending: Record) -> int:
    """When the result of a pending evaluation takes effect: at once if an earlier version wrote the checkpoint."""
    return int(pending.get("due", 0))


def _copied(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in weights.items()}


def _task_names(maker: EnvMaker, env_spec: EnvSpec, n_tasks: int) -> list[str]:
    """The names of the environment's tasks (from its attribute `names`), or their indices."""
    names: list[str] = []
    if n_tasks > 1 and not (env_spec.on_device or env_spec.vectorised):
        with contextlib.closing(maker()) as env:
            names = [str(name) for name in getattr(env.unwrapped, "names", ())]
    return names if len(names) == n_tasks else [str(task) for task in range(n_tasks)]
