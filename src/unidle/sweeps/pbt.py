"""`unidle.train_population` and `unidle.resume_population`: start and resume population-based training."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import gymnasium
import yaml

from unidle.api import Build, TrainedGroup, maker_for, maker_of, resolve_job
from unidle.api.training import member_config, resumed_configs
from unidle.config import Config
from unidle.config.files import PBT_FILE, display_path, read_yaml
from unidle.config.renamed import with_current_names, without_aliases
from unidle.config.resolve import resumed
from unidle.engine.build import resolve_network
from unidle.engine.callbacks import Callbacks
from unidle.engine.checkpoint.run_name import new_path
from unidle.engine.checkpoint.trust import require_trust
from unidle.envs.make import EnvFactory, EnvMaker, env_maker
from unidle.errors import UsageError
from unidle.groups.folder import GroupFolder, nothing_to_resume, seeds_from
from unidle.nn.actor_critic import NetworkFactory
from unidle.sweeps.exploit import PERTURBED, initial_settings
from unidle.sweeps.population import Population, complete_exploit
from unidle.sweeps.space import Space, own_space, read_space, trial_config
from unidle.writing import write_atomically

_MIN_MEMBERS = 2


def train_population(
    env: str | EnvFactory | gymnasium.Env,
    *,
    seeds: int | Sequence[int] = 8,
    space: str | Path | Mapping[str, Any] | None = None,
    preset: str | None = None,
    config: str | Path | None = None,
    engine: str | Path | None = None,
    network: str | NetworkFactory | None = None,
    quiet: bool = False,
    **settings: Any,
) -> TrainedGroup:
    """Population-based training: one member per seed, compared at each evaluation (`eval_every`).

    The worst members go on with the weights of better ones, and with their settings, perturbed within `space`: a YAML
    file or a mapping as for `sweep`; by default the usual ranges for the algorithm, without the `settings` given here.
    The other arguments are those of `train`.
    """
    job = resolve_job(env, preset, config, engine, network, settings)
    fixed = [name for name, value in settings.items() if not (isinstance(value, str) and value == "auto")]
    given = Path(space) if isinstance(space, str) else space
    return start_population(
        job.config, seeds, given, fixed, job.notes, job.maker, job.network, quiet=quiet, cwd=job.cwd
    )


def start_population(
    config: Config,
    seeds: int | str | Sequence[int],
    space: Path | Mapping[str, Any] | None = None,
    fixed: Collection[str] = (),
    notes: Sequence[str] = (),
    maker: EnvMaker | None = None,
    network: NetworkFactory | None = None,
    *,
    quiet: bool = False,
    cwd: Path | None = None,
) -> TrainedGroup:
    """Train a population with a validated config in a new group folder."""
    cwd, chosen, run = cwd or Path.cwd(), seeds_from(seeds, config), config.run
    if len(chosen) < _MIN_MEMBERS:
        raise UsageError(f"A population of {len(chosen)} has nobody to copy; use --seeds {_MIN_MEMBERS} or more.")
    if run.evaluation_interval == 0:
        raise UsageError("A population is compared at its evaluations, but `eval_every` is 0; remove it.")
    if run.target_return is not None:
        raise UsageError("A population trains to the end of its steps; remove --target-return.")
    if run.wandb:
        raise UsageError("W&B has one run per process; leave out `wandb`.")
    if run.init_from is not None:
        config = config.with_run(init_from=str(cwd / run.init_from))
    searched = _space_of(space, config, fixed)
    # The interval must not change with the number of steps, nor results come later than their steps.
    config = config.with_run(eval_every=run.evaluation_interval)
    config = dataclasses.replace(config, engine=dataclasses.replace(config.engine, eval_workers=0))
    maker = maker_for(maker or maker_of(config), config)
    path = new_path(config, cwd, "population")
    path.mkdir(parents=True, exist_ok=True)
    group = GroupFolder.create(path, chosen)
    initial = {folder.name: initial_settings(searched, chosen[0], folder.name) for folder in group.runs}
    write_atomically(path / PBT_FILE, yaml.safe_dump({"space": searched.plain, "initial": initial}, sort_keys=False))
    members = _members(group, config, initial)
    build = Build(maker, network or resolve_network(config.recipe.network)[0], Callbacks(), (), quiet, cwd)
    try:
        return build.train_group(group, members, notes, supervisor=Population(group, searched, initial, config))
    except BaseException:
        group.discard()
        raise


def resume_population(
    path: str | Path, *, env: EnvFactory | None = None, trust: bool = False, quiet: bool = False, **settings: Any
) -> TrainedGroup:
    """Resume every member of a population from its latest checkpoint; arguments as for `resume`."""
    cwd = Path.cwd()
    group = GroupFolder.open(cwd / path)
    shown = display_path(group.path)
    tree = read_yaml(group.path / PBT_FILE)
    space, initial = tree.get("space"), tree.get("initial")
    if not isinstance(space, dict) or not isinstance(initial, dict) or initial.keys() != {r.name for r in group.runs}:
        raise UsageError(f"{display_path(group.path / PBT_FILE)} is not what a population wrote; restore it.")
    settings, renamings = with_current_names(without_aliases(settings))
    if {"eval_every", "eval_workers", "target_return"} & settings.keys():
        raise UsageError("A population keeps its evaluations; remove eval_every, eval_workers and target_return.")
    for folder in group.runs:
        if (folder / "config.yaml").is_file():
            complete_exploit(folder)
    configs, broken = resumed_configs(group, lambda before: resumed(before, settings, shown))
    if not configs:
        raise UsageError(nothing_to_resume(group.path))
    recipe = next(iter(configs.values()))
    for folder, config in configs.items():
        require_trust(folder, config, ["wrappers", "network", *(["env"] if env is None else [])], trust)
    missing = [folder for folder in group.runs if folder not in configs and folder.name not in broken]
    configs |= {folder: config for folder, config in _members(group, recipe, initial).items() if folder in missing}
    maker = maker_of(recipe) if env is None else env_maker(env, recipe.run.env_kwargs, recipe.run.env_wrappers)
    build = Build(maker_for(maker, recipe), resolve_network(recipe.recipe.network)[0], Callbacks(), (), quiet, cwd)
    supervisor = Population(group, read_space(space, recipe), initial, recipe)
    return build.train_group(group, configs, renamings, broken, supervisor)


def _members(group: GroupFolder, config: Config, initial: Mapping[str, dict[str, Any]]) -> dict[Path, Config]:
    """The configs with which the members start."""
    folders = zip(group.seeds, group.runs, strict=True)
    return {folder: trial_config(member_config(config, seed, folder), initial[folder.name]) for seed, folder in folders}


def _space_of(given: Path | Mapping[str, Any] | None, config: Config, fixed: Collection[str]) -> Space:
    """The space in which a population's settings are drawn and perturbed."""
    if given is None:
        usual = own_space(config, fixed)
        return read_space({name: value for name, value in usual.items() if name in PERTURBED}, config)
    space = read_space(given, config, fixed)
    wrong = [name for name in space.plain if name not in PERTURBED]
    if wrong:
        raise UsageError(
            f"`{wrong[0]}` cannot change while a member trains; a population searches: {', '.join(PERTURBED)}."
        )
    return space
