"""Trains new runs and groups, and resumes earlier ones."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, overload

import gymnasium

from unidle.algos.schedules import Schedule
from unidle.api.build import Build
from unidle.api.job import maker_for, maker_of, resolve_job
from unidle.api.trained import TrainedGroup, TrainedRun
from unidle.config import Config
from unidle.config.convert import in_brief
from unidle.config.files import GROUP_FILE, PBT_FILE, display_path
from unidle.config.python_words import python_words
from unidle.config.renamed import with_current_names, without_aliases
from unidle.config.resolve import Remark, resumed, resumed_job
from unidle.distributed.place import require_one_rank
from unidle.distributed.ranks import joined, on_first, stage
from unidle.engine.build import resolve_network
from unidle.engine.callbacks import Callback, Callbacks
from unidle.engine.checkpoint.run_folder import RunFolder
from unidle.engine.checkpoint.run_name import existing_path, new_path
from unidle.engine.checkpoint.trust import require_trust
from unidle.envs.make import EnvFactory, EnvMaker, env_maker
from unidle.envs.vector.host_envs import vector_size
from unidle.errors import UsageError
from unidle.groups.folder import GroupFolder, nothing_to_resume, seeds_from
from unidle.metrics.writer import MetricWriter
from unidle.nn.actor_critic import NetworkFactory


@overload
def train(env: str | EnvFactory | gymnasium.Env, *, seeds: None = None, **arguments: Any) -> TrainedRun: ...
@overload
def train(env: str | EnvFactory | gymnasium.Env, *, seeds: int | Sequence[int], **arguments: Any) -> TrainedGroup: ...
@python_words()
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

    `env` is a Gymnasium id, "envpool:id", "ale:game", "module:callable", a factory of single or vector environments, or
    an environment from `gymnasium.make`, which is created again. `wrappers` are names ("module:callable") or callables.
    `settings` are the command line's flags with underscores (timesteps=200_000, seed=1, n_envs=8, …); they override
    `engine` (a YAML file that `unidle tune` wrote), which overrides `config` (a YAML file), which overrides `preset`.
    `resume="auto"` resumes the run or group of this name if there is one, so that the same call may start again and
    again.
    """
    if resume not in (None, "auto"):
        raise UsageError(f'`resume` is {in_brief(resume)}; use "auto", or unidle.resume(folder).')
    job = resolve_job(env, preset, config, engine, network, settings)
    callbacks = Callbacks(on_start, after_iteration, after_evaluation, on_end)
    rest = (job.notes, job.maker, job.network, callbacks, writers, quiet, job.cwd)
    if seeds is None:
        return start(job.config, *rest, resume, job.keep)
    return start_group(job.config, seeds, *rest, resume, job.keep)


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
    if state is not None:
        require_one_rank("`unidle.sb3`")
    with joined(config.engine.rank_timeout) as ranks:
        before = on_first(ranks, lambda: existing_path(config, cwd)) if resume else None
        if before is not None:
            with stage(ranks):
                resumed_config = resumed_job(RunFolder.open(before).config(), config, keep, display_path(before))
            resuming = [] if state else [Remark(f"Resuming {display_path(before)}.")]
            return build.train(resumed_config, before, [*notes, *resuming], is_new=False, ranks=ranks)
        path = on_first(ranks, lambda: new_path(config, cwd))
        try:
            return build.train(config.with_run(run_name=path.name), path, notes, is_new=True, ranks=ranks)
        except BaseException:
            for folder in (path, path.parent):
                with suppress(OSError):  # not empty: training has started
                    folder.rmdir()
            raise


def start_without_folder(
    config: Config,
    maker: EnvMaker,
    network: NetworkFactory | None = None,
    callbacks: Callbacks | None = None,
    quiet: bool = False,
    state: dict[str, Any] | None = None,
    schedules: Mapping[str, Schedule] | None = None,
) -> int | None:
    """Train a validated config without a run folder; returns the signal that stopped the run early, if one did.

    What was learned reaches the `callbacks` only. `state` and `schedules` as in `start`.
    """
    cwd = Path.cwd()
    if config.run.init_from is not None:
        config = config.with_run(init_from=str(cwd / config.run.init_from))
    network = network or resolve_network(config.recipe.network)[0]
    build = Build(maker_for(maker, config), network, callbacks or Callbacks(), (), quiet, cwd, state, schedules or {})
    return build.train_without_folder(config)


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
    resume: Literal["auto"] | None = None,
    keep: Sequence[str] = (),
) -> TrainedGroup:
    """Train a validated config with several seeds, in run folders of a new group folder.

    With `resume`, in the folder of the group that this config started before, if there is one, whose runs keep their
    settings `keep`.
    """
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
    build = Build(maker, network, callbacks or Callbacks(), (), quiet, cwd)
    before = existing_path(config, cwd, "seeds", GROUP_FILE) if resume else None
    if before is not None:
        return _resume_same_group(GroupFolder.open(before), chosen, config, keep, build, notes)
    path = new_path(config, cwd, "seeds")
    path.mkdir(parents=True, exist_ok=True)
    group = GroupFolder.create(path, chosen)
    configs = {folder: member_config(config, seed, folder) for seed, folder in zip(chosen, group.runs, strict=True)}
    try:
        return build.train_group(group, configs, notes)
    except BaseException:
        group.discard()
        raise


def member_config(config: Config, seed: int, folder: Path) -> Config:
    """The config of a group's run."""
    parent = Path(config.run.runs_dir) / folder.parent.name
    return config.with_run(seed=seed, run_name=folder.name, runs_dir=str(parent))


def _resume_same_group(
    group: GroupFolder, seeds: Sequence[int], config: Config, keep: Sequence[str], build: Build, notes: Sequence[str]
) -> TrainedGroup:
    """`--resume auto`: continue the group that `config` started before."""
    shown = display_path(group.path)
    if {*seeds} != {*group.seeds}:
        had = ", ".join(map(str, group.seeds))
        raise UsageError(f"The group {shown} has other seeds ({had}); give these, or choose another --run-name.")

    def change(before: Config) -> Config:
        return resumed_job(before, config.with_run(seed=before.run.seed), keep, shown)

    configs, broken = resumed_configs(group, change)
    for seed, folder in zip(group.seeds, group.runs, strict=True):  # stopped before they had a folder
        if folder not in configs and folder.name not in broken:
            configs[folder] = member_config(config, seed, folder)
    return build.train_group(group, configs, [*notes, Remark(f"Resuming {shown}.")], broken)


def resumed_configs(
    group: GroupFolder, change: Callable[[Config], Config]
) -> tuple[dict[Path, Config], dict[str, str]]:
    """The configs with which a group's runs resume, and why others cannot, by name; UsageError if none can.

    Runs without a folder are in neither.
    """
    found: dict[Path, Config] = {}
    configs: dict[Path, Config] = {}
    damaged: dict[str, UsageError] = {}
    refused: dict[str, UsageError] = {}
    for folder in group.runs:
        if (folder / "config.yaml").is_file():
            try:
                found[folder] = RunFolder.open(folder).config()
            except UsageError as error:
                damaged[folder.name] = error
    for folder, config in found.items():
        try:
            configs[folder] = change(config)
        except UsageError as error:
            refused[folder.name] = error
    if not configs and (errors := [*refused.values(), *damaged.values()]):
        raise errors[0]
    return configs, {name: str(error) for name, error in (damaged | refused).items()}


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
    """Resume every run of a group from its latest checkpoint; arguments as for `resume`.

    A run whose config.yaml is damaged does not keep the others from training: TrainingError names it at the end.
    """
    cwd = Path.cwd()
    group = GroupFolder.open(cwd / path)
    if (group.path / PBT_FILE).exists():
        raise UsageError(f"{display_path(group.path)} is a population; resume it with unidle.resume_population.")
    settings, renamings = with_current_names(without_aliases(settings))
    configs, broken = resumed_configs(group, lambda before: resumed(before, settings, display_path(group.path)))
    if not configs:
        raise UsageError(nothing_to_resume(group.path))
    recipe = next(iter(configs.values()))
    named = ["wrappers", *(["env"] if env is None else []), *(["network"] if network is None else [])]
    for folder, config in configs.items():
        require_trust(folder, config, named, trust)
    for seed, folder in zip(group.seeds, group.runs, strict=True):  # stopped before they had a folder
        if folder not in configs and folder.name not in broken:
            configs[folder] = recipe.with_run(seed=seed, run_name=folder.name)
    maker = maker_of(recipe) if env is None else env_maker(env, recipe.run.env_kwargs, recipe.run.env_wrappers)
    factory = network or resolve_network(recipe.recipe.network)[0]
    callbacks = Callbacks(on_start, after_iteration, after_evaluation, on_end)
    build = Build(maker_for(maker, recipe), factory, callbacks, (), quiet, cwd)
    return build.train_group(group, configs, renamings, broken)


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
    with joined(config.engine.rank_timeout) as ranks:
        return build.train(config, folder.path, renamings, is_new=False, ranks=ranks)
