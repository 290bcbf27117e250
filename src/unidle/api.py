"""The Python API: `train`, `resume`, `load`, and the run that they return."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any, Literal, overload

import gymnasium
import numpy as np
import torch

from unidle.algos.schedules import Schedule
from unidle.config import Config
from unidle.config.convert import in_brief
from unidle.config.engine_file import read_engine_file
from unidle.config.files import display_path
from unidle.config.machine import gpu_name, limit_threads
from unidle.config.presets import load_preset
from unidle.config.renamed import with_current_names, without_aliases
from unidle.config.resolve import chosen_by_unidle, resolve_layers, resumed, resumed_job
from unidle.config.validate import check_seed, validated
from unidle.engine.agent import Agent, load_agent
from unidle.engine.build import make_envs, resolve_network
from unidle.engine.callbacks import Callback, Callbacks, ProgressDisplay, SilentDisplay
from unidle.engine.checkpoint.provenance import provenance
from unidle.engine.checkpoint.run_folder import RunFolder
from unidle.engine.checkpoint.run_name import existing_path, new_path
from unidle.engine.checkpoint.trust import require_trust
from unidle.engine.checkpoint.warm_start import warm_start
from unidle.engine.evaluate.play import FIRST_EVALUATION_ENV, Evaluation, longest_episode, play, use_statistics
from unidle.engine.interrupts import Interrupts
from unidle.engine.other_trainers import OtherTrainers
from unidle.engine.placement import choose_device, choose_workers
from unidle.engine.sharing import Sharing
from unidle.engine.trainer import Trainer
from unidle.envs.env_object import settings_of
from unidle.envs.make import EnvFactory, EnvMaker, env_maker, is_name_or_factory
from unidle.envs.probe import probe
from unidle.envs.vector.host_envs import vector_size
from unidle.envs.wrap import wrapper_entries
from unidle.errors import TrainingError, UsageError
from unidle.groups.display import GroupDisplay
from unidle.groups.folder import GroupFolder, seeds_from
from unidle.groups.page import write_group_page
from unidle.groups.statistics import summarise
from unidle.groups.training import in_words, train_group
from unidle.meter.attribution.run_meter import RunMeter
from unidle.metrics.jsonl import read_records
from unidle.metrics.writer import MetricWriter
from unidle.nn.actor_critic import NetworkFactory
from unidle.output import guarded_output
from unidle.report.history import read_history
from unidle.report.page.report import write_report
from unidle.report.terminal.messages import Messages
from unidle.report.terminal.progress import Display

_OVERLAP_MIN_ENVS = 48  # with fewer environments overlap does not pay, as measured on a GPU: docs/overlap.md


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
            self._agent = load_agent(self.folder, self.config, self._network, _print_message)
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
            "run": display_path(self.path),
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
        maker = self.maker()
        env_spec = probe(maker, recipe.discretize)
        if (
            env_spec.obs_layout.space != self.agent.obs_layout.space
            or env_spec.action_layout.space != self.agent.action_layout.space
        ):
            raise UsageError(f"{maker.name} does not have the spaces that {display_path(self.path)} was trained on.")
        n_envs = min(episodes, 10)
        workers = choose_workers(engine, n_envs, env_spec.step_seconds, is_busy=self.agent.device.type == "cuda")
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


@overload
def train(env: str | EnvFactory | gymnasium.Env, *, seeds: None = None, **arguments: Any) -> TrainedRun: ...
@overload
def train(env: str | EnvFactory | gymnasium.Env, *, seeds: int | Sequence[int], **arguments: Any) -> TrainedGroup: ...
def train(
    env: str | EnvFactory | gymnasium.Env,
    *,
    preset: str | None = None,
    config: str | Path | None = None,
    engine: str | Path | None = None,
    network: str | NetworkFactory | None = None,
    on_start: Sequence[Callback] = (),
    after_iteration: Sequence[Callback] = (),
    after_evaluation: Sequence[Callback] = (),
    on_end: Sequence[Callback] = (),
    writers: Sequence[MetricWriter] = (),
    resume: Literal["auto"] | None = None,
    seeds: int | Sequence[int] | None = None,
    quiet: bool = False,
    **settings: Any,
) -> TrainedRun | TrainedGroup:
    """Train a policy and return the run; with `seeds` (how many, or which), one run per seed, all at the same time.

    `env` is a Gymnasium id, "envpool:id", "module:callable", a factory of single or vector environments, or an
    environment from `gymnasium.make`, which is created again. `wrappers` are names ("module:callable") or callables.
    `settings` are the command line's flags with underscores (timesteps=200_000, seed=1, n_envs=8, …); they override
    `engine` (a YAML file that `unidle tune` wrote), which overrides `config` (a YAML file), which overrides `preset`.
    `resume="auto"` resumes the run of this name if there is one, so that the same call may start again and again.
    """
    if resume not in (None, "auto"):
        raise UsageError(f'`resume` is {in_brief(resume)}; use "auto", or unidle.resume(folder).')
    job = resolve_job(env, preset, config, engine, network, settings)
    callbacks = Callbacks(on_start, after_iteration, after_evaluation, on_end)
    rest = (job.notes, job.maker, job.network, callbacks, writers, quiet, job.cwd)
    if seeds is None:
        return start(job.config, *rest, resume, job.keep)
    if resume is not None:
        raise UsageError("`seeds` starts a new group; resume one with unidle.resume_group(folder).")
    return start_group(job.config, seeds, *rest)


@dataclasses.dataclass(frozen=True)
class Job:
    """What to train, as the arguments of `train` say it."""

    config: Config  # validated
    notes: list[str]  # messages about the settings
    maker: EnvMaker
    network: NetworkFactory | None
    keep: tuple[str, ...]  # settings that unidle chose, which a resumed run keeps
    cwd: Path  # before an environment, or its module, could change it


def resolve_job(
    env: str | EnvFactory | gymnasium.Env,
    preset: str | None,
    config: str | Path | None,
    engine: str | Path | None,
    network: str | NetworkFactory | None,
    settings: dict[str, Any],
) -> Job:
    """The job that these arguments of `train` describe; UsageError if it is invalid."""
    cwd = Path.cwd()
    settings, renamings = with_current_names(without_aliases(settings))
    if "wrappers" in settings:
        settings["wrappers"] = wrapper_entries(settings["wrappers"])
    if not is_name_or_factory(env):
        env, settings = _as_name(env, settings)
    name = env if isinstance(env, str) else None
    file, n_envs, algo = Path(config) if config else None, settings.get("n_envs"), settings.get("algo")
    layers = resolve_layers(preset, file, torch.cuda.is_available(), name, n_envs, algo)
    if engine is not None:
        layers = layers.with_engine(read_engine_file(Path(engine)), gpu_name)
    run = layers.with_flags(settings).run
    maker = env_maker(env, run.env_kwargs, run.env_wrappers)
    factory, network_name = resolve_network(network if network is not None else layers.config.recipe.network)
    flags = {**settings, "env": maker.name, "network": network_name}
    given = layers.with_flags(flags)
    settled, notes = fit_to_env(given, maker)
    settled = validated(settled, layers.preset_batch_size)
    notes = [*renamings, *layers.notes, *notes]
    return Job(settled, notes, maker, factory, chosen_by_unidle(given), cwd)


def _as_name(env: Any, settings: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """The name of an environment object, and `settings` with the arguments and wrappers that create it again."""
    given = settings_of(env)
    for setting in ("env_kwargs", "wrappers"):
        if settings.get(setting):
            raise UsageError(f"`{setting}` needs an environment's id, not an object; pass the id as env.")
    return given.pop("env"), {**settings, **given}


def start(
    config: Config,
    notes: Sequence[str] = (),
    maker: EnvMaker | None = None,
    network: NetworkFactory | None = None,
    callbacks: Callbacks | None = None,
    writers: Sequence[MetricWriter] = (),
    quiet: bool = False,
    cwd: Path | None = None,
    resume: Literal["auto"] | None = None,
    keep: Sequence[str] = (),
    state: dict[str, Any] | None = None,
    schedules: Mapping[str, Schedule] | None = None,
) -> TrainedRun:
    """Train a validated config in a new run folder; `runs_dir` is relative to `cwd`.

    With `resume`, in the folder of the run that this config started before, if there is one, which keeps its settings
    `keep`. `state` is what to continue from, and `schedules` replace the recipe's: see `Trainer`.
    """
    cwd = cwd or Path.cwd()
    if config.run.init_from is not None:
        other = str(cwd / config.run.init_from)
        config = config.with_run(init_from=other)
    maker = maker_for(maker or maker_of(config), config)
    network = network or resolve_network(config.recipe.network)[0]
    build = Build(maker, network, callbacks or Callbacks(), writers, quiet, cwd, state, schedules or {})
    before = existing_path(config, cwd) if resume else None
    if before is not None:
        config = resumed_job(RunFolder.open(before).config(), config, keep, display_path(before))
        resuming = [] if state else [f"Resuming {display_path(before)}."]
        return build.train(config, before, [*notes, *resuming], is_new=False)
    path = new_path(config, cwd)
    config = config.with_run(run_name=path.name)
    try:
        return build.train(config, path, notes, is_new=True)
    except BaseException:
        for folder in (path, path.parent):
            with suppress(OSError):  # not empty: training has started
                folder.rmdir()
        raise


def start_group(
    config: Config,
    seeds: int | str | Sequence[int],
    notes: Sequence[str] = (),
    maker: EnvMaker | None = None,
    network: NetworkFactory | None = None,
    callbacks: Callbacks | None = None,
    writers: Sequence[MetricWriter] = (),
    quiet: bool = False,
    cwd: Path | None = None,
) -> TrainedGroup:
    """Train a validated config with several seeds, in run folders of a new group folder."""
    cwd = cwd or Path.cwd()
    chosen = seeds_from(seeds, config)
    if writers:
        raise UsageError("`writers` cannot tell the runs of a group apart; leave out `seeds`, or the writers.")
    if config.run.wandb:
        raise UsageError("W&B has one run per process; leave out `seeds`, or `wandb`.")
    if config.run.init_from is not None:
        config = config.with_run(init_from=str(cwd / config.run.init_from))
    maker = maker_for(maker or maker_of(config), config)
    network = network or resolve_network(config.recipe.network)[0]
    path = new_path(config, cwd, "seeds")
    path.mkdir(parents=True, exist_ok=True)
    group = GroupFolder.create(path, chosen)
    configs = [
        config.with_run(seed=seed, run_name=folder.name, runs_dir=str(Path(config.run.runs_dir) / path.name))
        for seed, folder in zip(chosen, group.runs, strict=True)
    ]
    build = Build(maker, network, callbacks or Callbacks(), (), quiet, cwd)
    try:
        return build.train_group(group, configs, notes)
    except BaseException:
        group.discard()
        raise


def resume_group(
    path: str | Path,
    *,
    env: EnvFactory | None = None,
    network: NetworkFactory | None = None,
    on_start: Sequence[Callback] = (),
    after_iteration: Sequence[Callback] = (),
    after_evaluation: Sequence[Callback] = (),
    on_end: Sequence[Callback] = (),
    trust: bool = False,
    quiet: bool = False,
    **settings: Any,
) -> TrainedGroup:
    """Resume every run of a group from its latest checkpoint; arguments as for `resume`."""
    cwd = Path.cwd()
    group = GroupFolder.open(cwd / path)
    settings, renamings = with_current_names(without_aliases(settings))
    existing = [folder for folder in group.runs if (folder / "config.yaml").is_file()]
    if not existing:
        raise UsageError(f"{display_path(group.path)} has no run to resume; start a new group.")
    recipe = RunFolder.open(existing[0]).config()  # of those that were stopped before they had a folder
    configs = []
    for seed, folder in zip(group.seeds, group.runs, strict=True):
        config = RunFolder.open(folder).config() if folder in existing else recipe
        configs.append(resumed(config.with_run(seed=seed, run_name=folder.name), settings, str(folder)))
    named = ["wrappers", *(["env"] if env is None else []), *(["network"] if network is None else [])]
    for folder, config in zip(group.runs, configs, strict=True):
        if folder in existing:
            require_trust(folder, config, named, trust)
    maker = maker_of(recipe) if env is None else env_maker(env, recipe.run.env_kwargs, recipe.run.env_wrappers)
    factory = network or resolve_network(recipe.recipe.network)[0]
    callbacks = Callbacks(on_start, after_iteration, after_evaluation, on_end)
    build = Build(maker_for(maker, recipe), factory, callbacks, (), quiet, cwd)
    return build.train_group(group, configs, renamings)


def resume(
    path: str | Path,
    *,
    env: EnvFactory | None = None,
    network: NetworkFactory | None = None,
    on_start: Sequence[Callback] = (),
    after_iteration: Sequence[Callback] = (),
    after_evaluation: Sequence[Callback] = (),
    on_end: Sequence[Callback] = (),
    writers: Sequence[MetricWriter] = (),
    trust: bool = False,
    quiet: bool = False,
    **settings: Any,
) -> TrainedRun:
    """Resume a run from its latest checkpoint, exactly as if it had never stopped.

    `settings` may extend it (timesteps), change engine settings, or the learning rate (learning_rate, lr_schedule),
    which is recorded, but not the rest of its recipe. `trust`: import the code named in the
    config of a run that you did not create.
    """
    cwd = Path.cwd()  # an environment may change it
    folder = RunFolder.open(cwd / path)
    settings, renamings = with_current_names(without_aliases(settings))
    config = resumed(folder.config(), settings, str(path))
    named = ["wrappers", *(["env"] if env is None else []), *(["network"] if network is None else [])]
    require_trust(folder.path, config, named, trust)
    maker = maker_of(config) if env is None else env_maker(env, config.run.env_kwargs, config.run.env_wrappers)
    maker = maker_for(maker, config)
    size = vector_size(maker)
    if size not in (None, config.recipe.n_envs):
        raise UsageError(f"{maker.name} creates {size} environments, but the run has {config.recipe.n_envs}.")
    factory = network or resolve_network(config.recipe.network)[0]
    callbacks = Callbacks(on_start, after_iteration, after_evaluation, on_end)
    build = Build(maker, factory, callbacks, writers, quiet, cwd)
    return build.train(config, folder.path, renamings, is_new=False)


def maker_of(config: Config) -> EnvMaker:
    """Return the maker of the environments that `config` names."""
    return env_maker(config.run.env, config.run.env_kwargs, config.run.env_wrappers)


def maker_for(maker: EnvMaker, config: Config) -> EnvMaker:
    """Return the maker for the device if the environment supports it, unless worker processes are requested."""
    recipe = config.recipe
    maker = dataclasses.replace(maker, obs_groups=recipe.obs_groups, action_masks=recipe.action_masks)
    return maker.on_host() if config.engine.subproc or config.engine.workers else maker


def fit_to_env(config: Config, maker: EnvMaker) -> tuple[Config, list[str]]:
    """Return the unvalidated `config` with settings that depend on the environment, and notes for the user."""
    size = vector_size(maker)
    config, notes = (config, []) if size is None else _with_n_envs(config, maker, size)
    recipe, engine = config.recipe, config.engine
    if recipe.overlap != "auto":
        return config, notes
    has_many_envs = recipe.on_policy and recipe.n_envs >= _OVERLAP_MIN_ENVS
    has_single_envs = (
        size is None and engine.subproc is not False and maker_for(maker, config).kind in ("gymnasium", "unknown")
    )
    use_overlap = has_many_envs and has_single_envs and choose_device(engine.device).type == "cuda"
    if use_overlap:
        notes = [
            f"overlap is strict: with {_OVERLAP_MIN_ENVS} environments or more, they keep stepping while the GPU "
            "learns. For textbook PPO, use --overlap off."
        ]
    recipe = dataclasses.replace(recipe, overlap="strict" if use_overlap else "off")
    return dataclasses.replace(config, recipe=recipe), notes


def _with_n_envs(config: Config, maker: EnvMaker, size: int) -> tuple[Config, list[str]]:
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
    batch_size: dict[str, Any] = {"batch_size": "auto"} if is_preset else {}
    recipe = dataclasses.replace(recipe, n_envs=size, **batch_size)
    return dataclasses.replace(config, recipe=recipe), [
        f"n_envs is {size}, the number of environments that {maker.name} creates."
    ]


@dataclasses.dataclass(frozen=True)
class Build:
    """The arguments that new and resumed runs have in common."""

    maker: EnvMaker
    network: NetworkFactory | None
    callbacks: Callbacks
    writers: Sequence[MetricWriter]
    quiet: bool
    cwd: Path  # before an environment could change it
    state: dict[str, Any] | None = None
    schedules: Mapping[str, Schedule] = dataclasses.field(default_factory=dict)

    @guarded_output()
    def train(self, config: Config, path: Path, notes: Sequence[str], is_new: bool) -> TrainedRun:
        """Train one run in the folder `path`."""
        limit_threads()
        with nullcontext(_Quiet()) if self.quiet else Display() as display, OtherTrainers() as others:
            for note in notes:
                display.on_message(note)
            meter = RunMeter(display.on_message, display.on_meter, trace=config.run.trace)
            trainer = self._trainer(config, display, meter=meter, others=others)
            try:
                folder = self._folder(trainer, path, display, is_new=is_new)
                try:
                    trainer.train(folder, self.state)
                except KeyboardInterrupt:
                    kept = "the last checkpoint is kept" if folder.latest() else "there is no checkpoint yet"
                    raise KeyboardInterrupt(kept) from None
                except Exception:
                    with suppress(Exception):  # raise the original error
                        write_report(path)
                    raise
            finally:
                trainer.close()
        self.report(write_report, path, display)
        trained = TrainedRun(path, self.maker, self.network)
        trained.stopped_by = trainer.stopped_by
        return trained

    @guarded_output()
    def train_group(self, group: GroupFolder, configs: Sequence[Config], notes: Sequence[str]) -> TrainedGroup:
        """Train the runs of a group, each in its own folder; TrainingError at the end if some of them failed."""
        limit_threads()
        names = [path.name for path in group.runs]
        with GroupDisplay(names, quiet=self.quiet) as display:
            for note in notes:
                display.on_message(note)
            result = train_group(group, configs, self.new_run, display)
        group.save({name: in_words(error) for name, error in result.errors.items()})
        for path in group.runs:
            self.report(write_report, path, display)
        self.report(partial(write_group_page, runs=group.runs, failures=group.failures), group.path, display)
        if result.errors:
            reasons = "\n".join(f"{name}: {reason}" for name, reason in group.failures.items())
            raise TrainingError(
                f"{len(result.errors)} of {len(group.runs)} runs in {display_path(group.path)} failed.\n{reasons}"
            )
        trained = TrainedGroup(group.path, self.maker, self.network)
        trained.stopped_by = result.stopped_by
        return trained

    def new_run(
        self, config: Config, path: Path, display: ProgressDisplay, sharing: Sharing, interrupts: Interrupts
    ) -> tuple[Trainer, RunFolder]:
        """A run of a group, new or resumed: its trainer, and its folder."""
        trainer = self._trainer(config, display, others=sharing.others, sharing=sharing, interrupts=interrupts)
        try:
            is_new = not (path / "config.yaml").is_file()
            return trainer, self._folder(trainer, path, display, is_new=is_new)
        except BaseException:
            trainer.close()
            raise

    def _trainer(self, config: Config, display: ProgressDisplay, **parts: Any) -> Trainer:
        own: dict[str, Any] = {"network": self.network, "callbacks": self.callbacks, "writers": self.writers}
        return Trainer(config, self.maker, display, schedules=self.schedules, **own, **parts)

    def _folder(self, trainer: Trainer, path: Path, display: ProgressDisplay, *, is_new: bool) -> RunFolder:
        """The folder of the run, locked; for a new run, only once its networks are known to fit."""
        config = trainer.config
        if config.run.init_from is not None and RunFolder(path).latest() is None:
            parts = trainer.algo, trainer.collector, trainer.env_spec
            warm_start(config, *parts, display.on_message)
        made_with = provenance(choose_device(config.engine.device), self.cwd)
        if is_new:
            return RunFolder.create(path, config, made_with)
        folder = RunFolder.open(path)
        folder.lock()
        folder.provenance = made_with
        return folder

    def report(self, write: Callable[[Path], Path], path: Path, display: Display | GroupDisplay | _Quiet) -> None:
        """Write the report of the run or group in the folder `path`."""
        try:
            write(path)
        except OSError as error:  # the run itself is complete and saved
            display.on_message(f"The report could not be written to {display_path(path)} ({error.strerror}).")


def _print_message(text: str) -> None:
    print(text, file=sys.stderr)


class _Quiet(SilentDisplay):
    """Prints messages only."""

    def __init__(self) -> None:
        self._messages = Messages(lambda text, style: _print_message(text))

    def on_message(self, text: str) -> None:
        self._messages.show(text)

    def on_end(self) -> None:
        self._messages.close()
