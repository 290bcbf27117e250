"""Where evaluations run, and when their results take effect."""

from __future__ import annotations

from unidle.config import Config
from unidle.config.machine import available_cores
from unidle.engine.evaluate.play import n_evaluation_envs
from unidle.envs.make import EnvMaker
from unidle.envs.spec import EnvSpec
from unidle.errors import UsageError

_TYPICAL_STEPS = 1000  # of an episode
_SECONDS_PER_PROCESS = 10.0  # of stepping, in one evaluation


def can_be_async(maker: EnvMaker, env_spec: EnvSpec) -> bool:
    """Whether other processes can step some of the environments, with the same episodes."""
    is_fixed_batch = env_spec.vectorised and maker.native is None
    return not (env_spec.on_device or is_fixed_batch or maker.kind == "async")


def choose_processes(config: Config, maker: EnvMaker, env_spec: EnvSpec, workers: int, cores: int | None = None) -> int:
    """Number of processes for asynchronous evaluation; 0: the trainer evaluates, and training waits.

    Training steps its environments in this process and in `workers` others. `cores` defaults to those of this machine.
    """
    processes, cores = config.engine.eval_workers, cores or available_cores()
    if processes == 0 or config.run.eval_every == 0:
        return 0
    if not can_be_async(maker, env_spec):
        if processes:
            raise UsageError(
                f"{maker.name} steps many environments together, which asynchronous evaluation does not support; leave "
                "out --eval-workers."
            )
        return 0
    if processes is None:
        if cores == 1 or maker.pickle_error():
            return 0
        if config.recipe.n_tasks > 1:  # evaluating many tasks takes long
            processes = cores // 2
        else:
            seconds = config.run.eval_episodes * _TYPICAL_STEPS * env_spec.step_seconds
            processes = min(cores - max(1, workers), int(seconds / _SECONDS_PER_PROCESS))
    return min(max(1, processes), n_evaluation_envs(config.run.eval_episodes))


def effect_delay(config: Config, maker: EnvMaker, env_spec: EnvSpec, *, has_callbacks: bool) -> int:
    """Iterations from an evaluation to the effect of its result: a target return that it reaches, and callbacks.

    It follows from settings only, so that training never depends on how long evaluations take or where they run. 0:
    results have no effect, or come at once because evaluations always run in the trainer.
    """
    run = config.run
    if (run.target_return is None and not has_callbacks) or not can_be_async(maker, env_spec):
        return 0
    between = run.eval_every or max(1, run.timesteps // 10)
    return max(1, between // config.recipe.total_batch // 4)
