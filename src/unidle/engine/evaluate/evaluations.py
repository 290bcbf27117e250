"""The evaluations of one run: asked for now and then, played here or beside training, handed back when done."""

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
from unidle.engine.build import choose_workers, make_envs
from unidle.engine.evaluate.async_evaluator import Beside
from unidle.engine.evaluate.play import FIRST_EVALUATION_ENV, Evaluation, Stopped, n_evaluation_envs, play
from unidle.envs.make import EnvMaker
from unidle.envs.protocol import Fault, HostEnvs
from unidle.envs.spec import EnvSpec
from unidle.errors import UsageError
from unidle.nn.actor_critic import NetworkFactory

Record = dict[str, Any]


@dataclass(frozen=True)
class Evaluated:
    """An evaluation that is done."""

    step: int
    about: Record  # what goes into its record beside the result: the time, and whatever was given when it was asked for
    result: Evaluation
    weights: dict[str, Tensor]  # of the policy that played; valid until the next one is asked for
    policy: AnyPolicy | None = None  # that played, if it did so here
    faults: list[Fault] = field(default_factory=list)  # that were not told yet


class Evaluations:
    """Plays `eval_episodes` episodes with the mode action, in environments of their own."""

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
    ) -> None:
        """Beside training, in so many `processes`; if none, here, with environments `in_workers` or not."""
        self._config, self._maker, self._env_spec = config, maker, env_spec
        self._policy, self._in_workers, self.processes = policy, in_workers, processes
        self._clock, self._on_fault, self._stop = clock, on_fault, stop
        self._envs: HostEnvs | None = None
        self._is_playing = False
        self._done: list[Evaluated] = []
        self._owed: list[Record] = []  # by a run that was stopped, or for want of a place
        self.task_names = _task_names(maker, env_spec, config.recipe.n_tasks)
        # Now, so that they are ready when the first evaluation is due, and what cannot be sent to them is told at once.
        parts = (config, maker, env_spec, network, policy.state_dict())
        self._beside = Beside(*parts, processes, say) if processes else None

    @property
    def are_beside(self) -> bool:
        """Whether training goes on meanwhile."""
        return self._beside is not None

    @property
    def n_open(self) -> int:
        """How many are still to be done beside training."""
        return len(self._beside.asked) + len(self._owed) if self._beside else 0

    @property
    def is_full(self) -> bool:
        """Whether one must be done before the next can be asked for: the owed ones come first."""
        return self._beside is not None and (self._beside.is_full or bool(self._owed))

    def ask(self, step: int, about: Record) -> None:
        """Evaluate the policy as it is now. If the user wants to stop before it is, it is owed."""
        weights = self._policy.state_dict()
        try:
            if self._beside is None:
                self._done.append(self._played(step, about, self._policy))
                return
            about = {**self._clock(), **about}
            if self.is_full:
                raise Stopped  # nobody waited for a place
            self._beside.ask(step, about, weights)
        except Stopped:
            self._owed.append({"step": step, "about": about, "weights": _copied(weights)})

    def done(self, seconds: float = 0.0) -> Iterator[Evaluated]:
        """Those that are done, in the order they were asked for; waits at most so long for the first."""
        while self._done:
            yield self._done.pop(0)
        while self._beside is not None:
            self.catch_up()
            taken = self._beside.take(seconds)
            if taken is None:
                return
            asked, result = taken
            yield Evaluated(asked.step, asked.about, result, self._beside.weights(asked), faults=asked.faults)
            self._beside.release()
            seconds = 0.0

    def _played(self, step: int, about: Record, policy: AnyPolicy) -> Evaluated:
        run = self._config.run
        if self._envs is None:
            n_envs = n_evaluation_envs(run.eval_episodes)
            engine, workers = self._config.engine, 0
            if self._in_workers:
                workers = choose_workers(engine, n_envs, self._env_spec.step_seconds, is_busy=True)
            place = (self._env_spec, n_envs, run.seed, workers, engine, FIRST_EVALUATION_ENV)
            self._envs = make_envs(self._maker, *place)
        self._is_playing = True
        try:
            result = play(policy, self._envs, run.eval_episodes, stop=self._stop, on_fault=self._on_fault)
        finally:
            self._is_playing = False
        return Evaluated(step, {**self._clock(), **about}, result, policy.state_dict(), policy)

    # -- stopping and resuming -----------------------------------------------------------------------------------------

    def break_off(self) -> None:
        """For a signal's handler: raises Stopped out of what is being played here, if anything is.

        It is thrown away whole, with its environments, and so may end anywhere; `stop` is heard only between two steps.
        """
        if self._is_playing:
            raise Stopped

    def state(self) -> list[Record]:
        """What a checkpoint holds: each that is not done or not handed back, with the weights to do it anew."""
        beside = self._beside
        kept = [(each.step, each.about, each.weights) for each in self._done]
        if beside is not None:
            kept += [(each.step, each.about, beside.weights(each)) for each in beside.asked]
        copies = [{"step": step, "about": about, "weights": _copied(weights)} for step, about, weights in kept]
        return sorted(self._owed + copies, key=lambda each: int(each["step"]))

    def owe(self, state: Iterable[Record]) -> None:
        """Take over those that a checkpoint says are not done."""
        self._owed = list(state)

    def catch_up(self) -> None:
        """Do what is owed, or have it done: beside training, as much of it as there are places for."""
        with contextlib.suppress(Stopped):
            while self._owed and not (self._beside is not None and self._beside.is_full):
                step, about, weights = (self._owed[0][name] for name in ("step", "about", "weights"))
                if self._beside is not None:
                    self._beside.ask(step, {**self._clock(), **about}, weights)
                else:
                    self._done.append(self._played(step, about, self.with_weights(weights)))
                self._owed.pop(0)

    def with_weights(self, weights: dict[str, Tensor]) -> AnyPolicy:
        """A copy of the policy, with these weights."""
        policy = copy.deepcopy(self._policy)
        policy.load_state_dict(weights)
        return policy

    def close(self) -> None:
        """End all environments and their processes."""
        with contextlib.ExitStack() as stack:
            for part in (self._envs, self._beside):
                if part is not None:
                    stack.callback(part.close)


def choose_processes(config: Config, maker: EnvMaker, env_spec: EnvSpec, workers: int, *, must_wait: bool) -> int:
    """Processes that evaluate beside training; 0: the trainer does it, and waits.

    `must_wait` says that what comes out decides how training goes on: it is then to be known before that does.
    """
    asked = config.engine.eval_workers
    if asked == 0 or config.run.eval_every == 0:
        return 0
    one_by_one = not (env_spec.on_device or env_spec.vectorised or maker.kind == "async")
    if asked:
        if not one_by_one:
            raise UsageError(
                f"{maker.name} steps many environments together, which is not done beside training; leave out "
                "--eval-workers."
            )
    elif config.recipe.n_tasks > 1 and workers > 0 and one_by_one and not must_wait:  # it takes long
        asked = max(1, available_cores() // 2)  # which give way to training
    return min(asked or 0, n_evaluation_envs(config.run.eval_episodes))


def _copied(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in weights.items()}


def _task_names(maker: EnvMaker, env_spec: EnvSpec, n_tasks: int) -> list[str]:
    """What the environment calls its tasks (its attribute `names`), or their numbers."""
    names: list[str] = []
    if n_tasks > 1 and not (env_spec.on_device or env_spec.vectorised):
        with contextlib.closing(maker()) as env:
            names = [str(name) for name in getattr(env.unwrapped, "names", ())]
    return names if len(names) == n_tasks else [str(task) for task in range(n_tasks)]
