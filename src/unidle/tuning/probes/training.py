"""Real training of a job for measurements: no progress display, messages go to one function."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from unidle.algos.registry import Algorithm
from unidle.buffers.prefetch import Prefetch
from unidle.config import Config
from unidle.engine.build import resolve_network
from unidle.engine.callbacks import Callback, Callbacks, SilentDisplay, TimeMeter
from unidle.engine.checkpoint.run_folder import RunFolder
from unidle.engine.trainer import Trainer
from unidle.envs.make import EnvMaker, env_maker


def job_maker(config: Config) -> EnvMaker:
    """Return the maker of the job's environments, on the host or the device as in training."""
    maker = env_maker(config.run.env, config.run.env_kwargs, config.run.env_wrappers)
    maker = replace(maker, obs_groups=config.recipe.obs_groups, action_masks=config.recipe.action_masks)
    return maker.on_host() if config.engine.subproc or config.engine.workers else maker


def new_trainer(
    config: Config, callback: Callback, say: Callable[[str], None], meter: TimeMeter | None = None
) -> Trainer:
    """Return the job's trainer; `callback` is called after every iteration."""
    network = resolve_network(config.recipe.network)[0]
    display, callbacks = _MessageDisplay(say), Callbacks(after_iteration=[callback])
    return Trainer(config, job_maker(config), display, network=network, callbacks=callbacks, meter=meter)


def train(trainer: Trainer) -> Path:
    """Train in a new run folder and close the trainer; returns the folder."""
    folder = Path(trainer.config.run.runs_dir) / "run"
    try:
        trainer.train(RunFolder.create(folder, trainer.config))
    finally:
        trainer.close()
    return folder


def replay_is_off_device(algo: Algorithm) -> bool:
    """Whether the replay buffer is on the host although the networks are on a GPU."""
    return algo.experience is not None and isinstance(algo.experience.sampler, Prefetch)


class _MessageDisplay(SilentDisplay):
    """Forwards messages and shows no progress."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self.on_message = say
