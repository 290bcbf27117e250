"""What a Python user calls: `train`, `load`, and the run that both return."""

from __future__ import annotations

import dataclasses
import re
import sys
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import torch

from unidle.config import Config
from unidle.config.engine_file import read_engine_file
from unidle.config.files import refuse_second_run
from unidle.config.machine import gpu_name, limit_threads
from unidle.config.presets import load_preset
from unidle.config.renamed import with_current_names
from unidle.config.resolve import lay, resumed
from unidle.config.validate import check_seed, validated
from unidle.engine.agent import Agent
from unidle.engine.build import make_envs, resolve_network
from unidle.engine.callbacks import Callback, SilentDisplay
from unidle.engine.checkpoint.run_folder import RunFolder
from unidle.engine.evaluate.play import FIRST_EVALUATION_ENV, Evaluation, play
from unidle.engine.placement import choose_device, choose_workers
from unidle.engine.trainer import Trainer
from unidle.envs.make import EnvFactory, EnvMaker, env_maker
from unidle.envs.spec import probe
from unidle.envs.vector.host_envs import vector_size
from unidle.errors import UsageError
from unidle.meter.attribution.run_meter import RunMeter
from unidle.metrics.jsonl import read_records
from unidle.metrics.writer import MetricWriter
from unidle.nn.actor_critic import NetworkFactory
from unidle.report.history import read_history
from unidle.report.page.report import write_report
from unidle.report.terminal.messages import Messages
from unidle.report.terminal.progress import Display

_OVERLAP_PAYS_FROM = 48  # environments on a GPU, as measured: docs/overlap.md


class TrainedRun:
    """A run folder of a run that has been trained."""

    def __init__(self, path: Path, env: EnvMaker | None = None, network: NetworkFactory | None = None) -> None:
        self.folder = RunFolder.open(path)
        self.path = path
        self.config = self.folder.config()
        self._maker = env
        self._network = network or resolve_network(self.config.recipe.network)[0]
        self._agent: Agent | None = None

    @property
    def agent(self) -> Agent:
        """The best policy so far, or the latest if none was evaluated."""
        if self._agent is None:
            self._agent = Agent(self.folder.for_use(), self.config, self._network)
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
        """Return the key figures of the run so far as plain values."""
        history = read_history(self.path)
        final, best = history.final_evaluation, history.best_evaluation
        return {
            "run": str(self.path),
            "step": history.steps,
            "timesteps": self.config.run.timesteps,
            "wall_seconds": history.wall,
            "steps_per_second": history.steps_per_second,
            "training_return": history.training_return,
            "final_evaluation": final and final["eval/return_mean"],
            "best_evaluation": best and best["eval/return_mean"],
            "seconds": history.seconds,
            "overlap": history.overlap,
            "faults": history.fault_counts,
            "checkpoint": str(self.folder.for_use()),
            "report": str(self.report),
        }

    def predict(self, observation: Any, *, deterministic: bool = True, action_mask: Any = None) -> Any:
        """Return the action for one observation."""
        return self.agent.predict(observation, deterministic=deterministic, action_mask=action_mask)

    def maker(self) -> EnvMaker:
        """Return the maker of the environments this run was trained on."""
        return _placed(self._maker or env_maker(self.config.run.env, self.config.run.env_kwargs), self.config)

    def evaluate(self, episodes: int = 20, *, seed: int | None = None, deterministic: bool = True) -> Evaluation:
        """Play `episodes` episodes with the best policy, in new environments with seeds that training never used."""
        if episodes < 1:
            raise UsageError(f"{episodes} episodes are too few; play at least 1.")
        if seed is None:
            seed = self.config.run.seed + 1
        else:
            check_seed(seed)
        recipe, engine = self.config.recipe, self.config.engine
        maker = self.maker()
        env_spec = probe(maker, recipe.discretize)
        if (
            env_spec.obs_layout.space != self.agent.obs_layout.space
            or env_spec.action_layout.space != self.agent.action_layout.space
        ):
            raise UsageError(f"{maker.name} does not have the spaces that {self.path} was trained on.")
        n_envs = min(episodes, 10)
        workers = choose_workers(engine, n_envs, env_spec.step_seconds, is_busy=self.agent.device.type == "cuda")
        envs = make_envs(maker, env_spec, n_envs, seed, workers, engine, FIRST_EVALUATION_ENV)
        try:
            return play(self.agent.policy, envs, episodes, deterministic=deterministic, seed=seed)
        finally:
            envs.close()


def load(path: str | Path, *, env: EnvFactory | None = None, network: NetworkFactory | None = None) -> TrainedRun:
    """Load an earlier run; pass `env` and `network` again if they were objects that cannot be imported by name."""
    kwargs = RunFolder.open(Path(path)).config().run.env_kwargs
    run = TrainedRun(Path(path), env_maker(env, kwargs) if env else None, network)
    run.folder.for_use()  # fail early if there is no checkpoint
    return run


def train(
    env: str | EnvFactory,
    *,
    preset: str | None = None,
    config: str | Path | None = None,
    engine: str | Path | None = None,
    network: str | NetworkFactory | None = None,
    after_iteration: Sequence[Callback] = (),
    after_evaluation: Sequence[Callback] = (),
    writers: Sequence[MetricWriter] = (),
    quiet: bool = False,
    **settings: Any,
) -> TrainedRun:
    """Train a policy and return the run.

    `env` is a Gymnasium id, "envpool:id", "module:callable", or a factory of single or vector environments.
    `settings` are the command line's flags with underscores (timesteps=200_000, seed=1, n_envs=8, …); they override
    `engine` (a YAML file that `unidle tune` wrote), which overrides `config` (a YAML file), which overrides `preset`.
    """
    settings, renamings = with_current_names(settings)
    name = env if isinstance(env, str) else None
    file, n_envs, algo = Path(config) if config else None, settings.get("n_envs"), settings.get("algo")
    layers = lay(preset, file, torch.cuda.is_available(), name, n_envs, algo)
    if engine is not None:
        layers = layers.with_engine(read_engine_file(Path(engine)), gpu_name)
    maker = env_maker(env, settings.get("env_kwargs", layers.config.run.env_kwargs))
    factory, network_name = resolve_network(network if network is not None else layers.config.recipe.network)
    flags = {**settings, "env": maker.name, "network": network_name}
    settled, notes = fitted(layers.settled_with(flags), maker)
    settled = validated(settled, layers.preset_batch_size)
    notes = [*renamings, *layers.notes, *notes]
    return start(settled, notes, maker, factory, after_iteration, after_evaluation, writers, quiet)


def start(
    config: Config,
    notes: Sequence[str] = (),
    maker: EnvMaker | None = None,
    network: NetworkFactory | None = None,
    after_iteration: Sequence[Callback] = (),
    after_evaluation: Sequence[Callback] = (),
    writers: Sequence[MetricWriter] = (),
    quiet: bool = False,
) -> TrainedRun:
    """Train a validated config in a new run folder."""
    maker = _placed(maker or env_maker(config.run.env, config.run.env_kwargs), config)
    network = network or resolve_network(config.recipe.network)[0]
    path = _new_path(config)
    config = dataclasses.replace(config, run=dataclasses.replace(config.run, run_name=path.name))
    build = _Build(maker, network, after_iteration, after_evaluation, writers, quiet)
    return build.train(config, path, notes, is_new=True)


def resume(
    path: str | Path,
    *,
    env: EnvFactory | None = None,
    network: NetworkFactory | None = None,
    after_iteration: Sequence[Callback] = (),
    after_evaluation: Sequence[Callback] = (),
    writers: Sequence[MetricWriter] = (),
    quiet: bool = False,
    **settings: Any,
) -> TrainedRun:
    """Resume a run from its latest checkpoint, exactly as if it had never stopped.

    `settings` may extend it (timesteps) or change engine settings, but not its recipe.
    """
    folder = RunFolder.open(Path(path))
    settings, renamings = with_current_names(settings)
    config = resumed(folder.config(), settings, str(path))
    maker = _placed(env_maker(env or config.run.env, config.run.env_kwargs), config)
    size = vector_size(maker)
    if size not in (None, config.recipe.n_envs):
        raise UsageError(f"{maker.name} creates {size} environments, but the run has {config.recipe.n_envs}.")
    factory = network or resolve_network(config.recipe.network)[0]
    build = _Build(maker, factory, after_iteration, after_evaluation, writers, quiet)
    return build.train(config, Path(path), renamings, is_new=False)


def _placed(maker: EnvMaker, config: Config) -> EnvMaker:
    """Return the maker for the device if the environment supports it, unless worker processes are requested."""
    maker = dataclasses.replace(maker, obs_groups=config.recipe.obs_groups)
    return maker.on_host() if config.engine.subproc or config.engine.workers else maker


def fitted(config: Config, maker: EnvMaker) -> tuple[Config, list[str]]:
    """Return the unvalidated `config` with settings that depend on the environment, and notes for the user."""
    size = vector_size(maker)
    config, notes = (config, []) if size is None else _sized(config, maker, size)
    recipe, engine = config.recipe, config.engine
    if recipe.overlap != "auto":
        return config, notes
    are_many = recipe.on_policy and recipe.n_envs >= _OVERLAP_PAYS_FROM
    are_single = (
        size is None and engine.subproc is not False and _placed(maker, config).kind in ("gymnasium", "unknown")
    )
    pays = are_many and are_single and choose_device(engine.device).type == "cuda"
    if pays:
        notes = [
            f"overlap is strict: with {_OVERLAP_PAYS_FROM} environments or more, they keep stepping while the GPU "
            "learns. For textbook PPO, use --overlap off."
        ]
    return dataclasses.replace(config, recipe=dataclasses.replace(recipe, overlap="strict" if pays else "off")), notes


def _sized(config: Config, maker: EnvMaker, size: int) -> tuple[Config, list[str]]:
    """Return `config` with the number of environments that the factory creates."""
    recipe = config.recipe
    if size == recipe.n_envs:
        return config, []
    preset = load_preset(config.run.preset or "classic").recipe
    if recipe.n_envs != preset.n_envs:  # set by the user
        raise UsageError(
            f"{maker.name} creates {size} environments, not {recipe.n_envs}; leave out --n-envs, or set it to {size}."
        )
    # The preset's batch size is for the preset's number of environments; keep one set by the user.
    is_preset = recipe.on_policy and recipe.batch_size == preset.batch_size
    with_it: dict[str, Any] = {"batch_size": "auto"} if is_preset else {}
    recipe = dataclasses.replace(recipe, n_envs=size, **with_it)
    return dataclasses.replace(config, recipe=recipe), [
        f"n_envs is {size}, the number of environments that {maker.name} creates."
    ]


@dataclasses.dataclass(frozen=True)
class _Build:
    """Everything that a new and a resumed run share, except the folder."""

    maker: EnvMaker
    network: NetworkFactory | None
    after_iteration: Sequence[Callback]
    after_evaluation: Sequence[Callback]
    writers: Sequence[MetricWriter]
    quiet: bool

    def train(self, config: Config, path: Path, notes: Sequence[str], is_new: bool) -> TrainedRun:
        limit_threads()
        with nullcontext(_Quiet()) if self.quiet else Display() as display:
            for note in notes:
                display.on_message(note)
            trainer = Trainer(
                config,
                self.maker,
                display,
                network=self.network,
                after_iteration=self.after_iteration,
                after_evaluation=self.after_evaluation,
                writers=self.writers,
                meter=RunMeter(display.on_message, trace=config.run.trace),
            )
            try:
                if is_new:
                    folder = RunFolder.create(path, config)
                else:
                    folder = RunFolder.open(path)
                    folder.lock()
                try:
                    trainer.train(folder)
                except Exception:
                    with suppress(Exception):  # raise the original error
                        write_report(path)
                    raise
            finally:
                trainer.close()
        try:
            write_report(path)
        except OSError as error:  # the run itself is complete and saved
            display.on_message(f"The report could not be written to {path} ({error.strerror}).")
        return TrainedRun(path, self.maker, self.network)


class _Quiet(SilentDisplay):
    """Prints messages only."""

    def __init__(self) -> None:
        self._messages = Messages(lambda text, style: print(text, file=sys.stderr))

    def on_message(self, text: str) -> None:
        self._messages.show(text)

    def on_end(self) -> None:
        self._messages.close()


def _new_path(config: Config) -> Path:
    """Return the folder for a new run: with the user's name, or with the next free one."""
    run = config.run
    if run.run_name is not None:
        if not run.run_name or "/" in run.run_name or run.run_name in (".", ".."):
            raise UsageError(
                f"`run_name` is {run.run_name!r}; use a plain folder name, and --runs-dir for its parent folder."
            )
        path = Path(run.runs_dir) / run.run_name
        refuse_second_run(path)
        return path
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", f"{run.env}-{config.recipe.algo}-{run.preset}-seed{run.seed}").strip("-")
    path, number = Path(run.runs_dir) / name, 1
    while path.exists():
        number += 1
        path = Path(run.runs_dir) / f"{name}-{number}"
    return path
