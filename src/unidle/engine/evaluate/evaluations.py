"""The evaluations of one run: requested regularly, run in this process or asynchronously, returned when done."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from unidle.algos.registry import AnyPolicy
from unidle.config import Config
from unidle.config.machine import available_cores
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
from unidle.errors import UsageError
from unidle.nn.actor_critic import NetworkFactory
from unidle.rng import preserved_random_state

Record = dict[str, Any]


@dataclass(frozen=True)
class FinishedEvaluation:
    """An evaluation that is done."""

    step: int
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
        clock: Callable[[], Record],
        say: Callable[[str], None],
        on_fault: Callable[[Fault], None],
        stop: Callable[[], bool],
        env_statistics: Callable[[], Record] = dict,
    ) -> None:
        """Asynchronous, in `processes` processes; 0: in this process, with environments in workers if `in_workers`.

        `env_statistics`: the running means with which wrappers of the training environments normalise now.
        """
        self._env_statistics = env_statistics
        self._config, self._maker, self._env_spec = config, maker, env_spec
        self._policy, self._in_workers, self.processes = policy, in_workers, processes
        self._clock, self._on_fault, self._stop = clock, on_fault, stop
        self._envs: HostEnvs | None = None
        self._is_playing = False
        self._done: list[FinishedEvaluation] = []
        self._pending: list[Record] = []  # interrupted, or waiting for a slot in the queue
        self.task_names = _task_names(maker, env_spec, config.recipe.n_tasks)
        # Started now, to be ready for the first evaluation, and so that pickling errors are raised at the start.
        parts = (config, maker, env_spec, network, policy.state_dict())
        self._async = AsyncEvaluator(*parts, processes, say) if processes else None

    @property
    def is_async(self) -> bool:
        """Whether training continues during evaluations."""
        return self._async is not None

    @property
    def n_open(self) -> int:
        """Number of asynchronous evaluations that are not done."""
        return len(self._async.requests) + len(self._pending) if self._async else 0

    @property
    def all_done(self) -> bool:
        """Whether no evaluation was interrupted or still runs."""
        return not self._pending and self.n_open == 0

    @property
    def is_full(self) -> bool:
        """Whether an evaluation must finish before the next can be requested: pending ones come first."""
        return self._async is not None and (self._async.is_full or bool(self._pending))

    def request(self, step: int, extra: Record) -> None:
        """Evaluate the current policy. If the run is stopped before it is done, it stays pending."""
        weights = self._policy.state_dict()
        try:
            if self._async is None:
                self._done.append(self._play(step, extra, self._policy))
                return
            extra = {**self._clock(), **extra}
            if self.is_full:
                raise Stopped  # the run is stopping: do not wait for a free slot
            self._async.request(step, extra, weights)
        except Stopped:
            self._pending.append({"step": step, "about": extra, "weights": _copied(weights)})

    def done(self, seconds: float = 0.0) -> Iterator[FinishedEvaluation]:
        """Finished evaluations in the order of their requests; waits at most `seconds` for the first."""
        while self._done:
            yield self._done.pop(0)
        while self._async is not None:
            self.run_pending()
            taken = self._async.take(seconds)
            if taken is None:
                return
            request, result = taken
            yield FinishedEvaluation(
                request.step, request.extra, result, self._async.weights(request), faults=request.faults
            )
            self._async.release()
            seconds = 0.0

    def _play(self, step: int, extra: Record, policy: AnyPolicy) -> FinishedEvaluation:
        episodes = self._config.run.eval_episodes
        # Environments may seed the global generators, which those of training draw from too.
        with preserved_random_state():
            if self._envs is None:
                self._envs = self._make_envs()
            use_statistics(self._envs, self._env_statistics())
            self._is_playing = True
            try:
                limit = longest_episode(self._config.run, self._env_spec)
                result = play(policy, self._envs, episodes, stop=self._stop, on_fault=self._on_fault, max_steps=limit)
            finally:
                self._is_playing = False
        return FinishedEvaluation(step, {**self._clock(), **extra}, result, policy.state_dict(), policy)

    def _make_envs(self) -> HostEnvs:
        run, engine, workers = self._config.run, self._config.engine, 0
        n_envs = n_evaluation_envs(run.eval_episodes)
        if self._in_workers:
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
        kept = [(each.step, each.extra, each.weights) for each in self._done]
        if evaluator is not None:
            kept += [(each.step, each.extra, evaluator.weights(each)) for each in evaluator.requests]
        copies = [{"step": step, "about": extra, "weights": _copied(weights)} for step, extra, weights in kept]
        return sorted(self._pending + copies, key=lambda each: int(each["step"]))

    def load_pending(self, state: Iterable[Record]) -> None:
        """Continue with the pending evaluations of a checkpoint."""
        self._pending = list(state)

    def run_pending(self) -> None:
        """Run pending evaluations, or submit as many as the asynchronous queue has free slots."""
        with contextlib.suppress(Stopped):
            while self._pending and not (self._async is not None and self._async.is_full):
                step, extra, weights = (self._pending[0][name] for name in ("step", "about", "weights"))
                if self._async is not None:
                    self._async.request(step, {**self._clock(), **extra}, weights)
                else:
                    self._done.append(self._play(step, extra, self.with_weights(weights)))
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


def choose_processes(config: Config, maker: EnvMaker, env_spec: EnvSpec, workers: int, *, must_wait: bool) -> int:
    """Number of processes for asynchronous evaluation; 0: the trainer evaluates, and training waits.

    `must_wait`: results decide how training continues, so it must wait for them.
    """
    processes = config.engine.eval_workers
    if processes == 0 or config.run.eval_every == 0:
        return 0
    is_single = not (env_spec.on_device or env_spec.vectorised or maker.kind == "async")
    if processes:
        if not is_single:
            raise UsageError(
                f"{maker.name} steps many environments together, which asynchronous evaluation does not support; leave "
                "out --eval-workers."
            )
    elif config.recipe.n_tasks > 1 and workers > 0 and is_single and not must_wait:  # evaluating many tasks takes long
        processes = max(1, available_cores() // 2)  # they run at low priority
    return min(processes or 0, n_evaluation_envs(config.run.eval_episodes))


def _copied(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in weights.items()}


def _task_names(maker: EnvMaker, env_spec: EnvSpec, n_tasks: int) -> list[str]:
    """The names of the environment's tasks (from its attribute `names`), or their indices."""
    names: list[str] = []
    if n_tasks > 1 and not (env_spec.on_device or env_spec.vectorised):
        with contextlib.closing(maker()) as env:
            names = [str(name) for name in getattr(env.unwrapped, "names", ())]
    return names if len(names) == n_tasks else [str(task) for task in range(n_tasks)]
