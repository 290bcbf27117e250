"""A run that has been trained, and a group of runs: what `train`, `resume` and `load` return."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from unidle.api.job import maker_for, maker_of
from unidle.config.files import display_path
from unidle.config.validate import check_seed
from unidle.engine.agent import Agent, load_agent
from unidle.engine.build import make_envs, resolve_network
from unidle.engine.checkpoint.run_folder import RunFolder
from unidle.engine.checkpoint.trust import require_trust
from unidle.engine.evaluate.play import FIRST_EVALUATION_ENV, Evaluation, longest_episode, play, use_statistics
from unidle.engine.placement import choose_workers
from unidle.envs.make import EnvFactory, EnvMaker, env_maker
from unidle.envs.probe import probe
from unidle.errors import UsageError
from unidle.groups.folder import GroupFolder
from unidle.groups.statistics import summarise
from unidle.metrics.jsonl import read_records
from unidle.nn.actor_critic import NetworkFactory
from unidle.report.gpu_use import read_gpu_shares
from unidle.report.history import read_history


class TrainedRun:
    """A run folder of a run that has been trained."""

    stopped_by: int | None = None  # the signal (SIGINT, SIGTERM, …) that stopped `train` or `resume` early

    def __init__(
        self, path: Path, env: EnvMaker | None = None, network: NetworkFactory | None = None, *, trust: bool = False
    ) -> None:
        self.folder = RunFolder.open(path.absolute())
        self.path = self.folder.path
        self.config = self.folder.config()
        self._trust = trust
        if network is None:
            require_trust(self.path, self.config, ["network"], trust)
        self._maker = env
        self._network = network or resolve_network(self.config.recipe.network)[0]
        self._agent: Agent | None = None

    @property
    def agent(self) -> Agent:
        """The best policy so far, or the latest if none was evaluated."""
        if self._agent is None:
            self._agent = load_agent(self.folder, self.config, self._network, print_message)
        return self._agent

    @property
    def records(self) -> list[dict[str, Any]]:
        """All metrics, oldest first."""
        return read_records(self.path / "metrics.jsonl")

    @property
    def report(self) -> Path:
        """Path of the HTML report."""
        return self.path / "report.html"

    def summary(self) -> dict[str, Any]:
        """Return the key figures of the run so far as plain values.

        `seconds` are those of each phase of the training process, `gpu` the shares of time in which the GPU was busy,
        or idle and why (None without a GPU).
        """
        history = read_history(self.path)
        final, best = history.final_evaluation, history.best_evaluation
        return {
            "run": display_path(self.path),
            "step": history.steps,
            "timesteps": self.config.run.timesteps,
            "wall_seconds": history.wall,
            "steps_per_second": history.steps_per_second,
            "training_return": history.training_return,
            "final_evaluation": final and final["eval/return_mean"],
            "best_evaluation": best and best["eval/return_mean"],
            "seconds": history.seconds,
            "gpu": read_gpu_shares(self.path),
            "overlap": history.overlap,
            "faults": history.fault_counts,
            "requeues": history.requeues,
            "checkpoint": display_path(self.folder.best_or_latest()),
            "report": display_path(self.report),
        }

    def predict(
        self,
        observation: Any,
        state: np.ndarray | None = None,
        episode_start: Sequence[bool] | np.ndarray | None = None,
        deterministic: bool = True,  # positional, as in Stable-Baselines3
        *,
        action_mask: Any = None,
    ) -> tuple[Any, np.ndarray | None]:
        """Return the actions for an observation or a batch of them, and the next recurrent state or None.

        As Stable-Baselines3's `predict`: pass the state back with the next observations, and `episode_start` where an
        episode begins. Nothing is kept between calls.
        """
        return self.agent.predict_from(
            observation, state, episode_start, deterministic=deterministic, action_mask=action_mask
        )

    def maker(self) -> EnvMaker:
        """Return the maker of the environments that this run was trained on."""
        if self._maker is None:
            require_trust(self.path, self.config, ["env", "wrappers"], self._trust)
        return maker_for(self._maker or maker_of(self.config), self.config)

    def evaluate(self, episodes: int = 20, *, seed: int | None = None, deterministic: bool = True) -> Evaluation:
        """Play `episodes` episodes with the best policy, in new environments with seeds that training never used."""
        if episodes < 1:
            raise UsageError(f"{episodes} episodes are too few; play at least 1.")
        if seed is None:
            seed = self.config.run.seed + 1
        else:
            check_seed(seed)
        recipe, engine = self.config.recipe, self.config.engine
        maker = self.maker().for_evaluation()
        env_spec = probe(maker, recipe.discretize)
        if (
            env_spec.obs_layout.space != self.agent.obs_layout.space
            or env_spec.action_layout.space != self.agent.action_layout.space
        ):
            raise UsageError(f"{maker.name} does not have the spaces that {display_path(self.path)} was trained on.")
        n_envs = min(episodes, 10)
        workers, is_busy = 0, self.agent.device.type == "cuda"
        if not env_spec.vectorised:
            workers = choose_workers(engine, n_envs, env_spec.step_seconds, is_busy=is_busy)
        envs = make_envs(maker, env_spec, n_envs, seed, workers, engine, FIRST_EVALUATION_ENV)
        try:
            use_statistics(envs, self.agent.env_statistics)
            limit = longest_episode(self.config.run, env_spec)
            return play(self.agent.policy, envs, episodes, deterministic=deterministic, seed=seed, max_steps=limit)
        finally:
            envs.close()


class TrainedGroup:
    """A group folder: runs of one recipe with different seeds."""

    stopped_by: int | None = None  # the signal that stopped training early

    def __init__(
        self, path: Path, env: EnvMaker | None = None, network: NetworkFactory | None = None, *, trust: bool = False
    ) -> None:
        self._folder = GroupFolder.open(path.absolute())
        self.path = self._folder.path
        self._maker, self._network, self._trust = env, network, trust

    @property
    def runs(self) -> list[TrainedRun]:
        """The runs, in the order of the seeds."""
        return [TrainedRun(path, self._maker, self._network, trust=self._trust) for path in self._folder.runs]

    @property
    def report(self) -> Path:
        """Path of the HTML page about all runs."""
        return self.path / "report.html"

    def summary(self) -> dict[str, Any]:
        """Statistics over the runs as plain values: interquartile mean with its interval, best and worst."""
        return {"group": display_path(self.path), **summarise(self._folder.runs)}


def load(
    path: str | Path, *, env: EnvFactory | None = None, network: NetworkFactory | None = None, trust: bool = False
) -> TrainedRun:
    """Load an earlier run; pass `env` and `network` again if they were objects that cannot be imported by name.

    `trust`: import the code named in the config of a run that you did not create.
    """
    folder = RunFolder.open(Path(path))
    maker = None
    if env is not None:
        config = folder.config()
        require_trust(folder.path, config, ["wrappers"], trust)
        maker = env_maker(env, config.run.env_kwargs, config.run.env_wrappers)
    run = TrainedRun(Path(path), maker, network, trust=trust)
    run.folder.best_or_latest()  # fail early if there is no checkpoint
    return run


def print_message(text: str) -> None:
    """Print a message to stderr."""
    print(text, file=sys.stderr)
