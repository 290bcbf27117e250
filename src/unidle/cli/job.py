"""Reads a training job from the command line, for all commands that train."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Generic, TypeVar

import tyro

from unidle.cli.flags import normalise_flags, parse, peek, replace_renamed_flags, wants_help
from unidle.cli.job_help import short_help
from unidle.config import Config, Engine, PPORecipe, Recipe, Run
from unidle.config.engine_file import read_engine_file
from unidle.config.machine import gpu_name
from unidle.config.resolve import Layers, chosen_by_unidle, resolve_layers
from unidle.config.validate import validated
from unidle.errors import UsageError

if TYPE_CHECKING:
    from unidle.envs.make import EnvMaker


@dataclass(frozen=True)
class JobFlags:
    """Flags override --engine, which overrides --config, which overrides --preset."""

    run: Run = field(default_factory=Run)
    recipe: Recipe = field(default_factory=PPORecipe)
    engine: Engine = field(default_factory=Engine)
    config: Path | None = None
    """YAML config file of unidle, Stable-Baselines3, rl-zoo, Isaac Lab or ElegantRL."""
    engine_file: Annotated[Path | None, tyro.conf.arg(name="engine")] = None
    """YAML file of engine settings, as written by `unidle tune` for this machine."""
    site: str | None = None
    """Website to explore with unidle/SiteExplore-v0; short for --env-kwargs '{site: …}'."""


_Flags = TypeVar("_Flags", bound=JobFlags)


@dataclass(frozen=True)
class Job(Generic[_Flags]):
    """A training job from the command line."""

    flags: _Flags
    config: Config  # validated
    maker: EnvMaker
    notes: list[str]  # messages about the settings
    keep: tuple[str, ...]  # settings that unidle chose, which a resumed run keeps
    cwd: Path  # before an environment, or its module, could change it


def job_of(kind: type[_Flags], argv: list[str], command: str) -> Job[_Flags]:
    """The job given by the flags, preset and files of `command`; UsageError if it is invalid."""
    cwd = Path.cwd()
    argv, notes = replace_renamed_flags(argv)
    argv = normalise_flags(with_env_flag(argv))
    file = peek(argv, "--config")
    layers = _layers(argv, Path(file) if file else None)
    given = layers.config
    argv = normalise_flags(argv, given.recipe.algo)
    flags = kind(given.run, given.recipe, given.engine)
    if wants_help(argv) and "--help-all" not in argv:
        short = short_help(flags, with_recipe=peek(argv, "--algo") is not None)
        parse(type(short), ["--help"], command, short)
    flags = parse(kind, argv, command, flags)
    config = Config(flags.recipe, flags.engine, flags.run)
    if flags.site:
        config = config.with_values({"env_kwargs": {**config.run.env_kwargs, "site": flags.site}}, "--site")
    if not config.run.env:
        validated(config, layers.preset_batch_size)  # raises the error for a missing environment

    from unidle.api import fit_to_env
    from unidle.envs.make import env_maker

    maker = env_maker(config.run.env, config.run.env_kwargs, config.run.env_wrappers)
    keep = chosen_by_unidle(config)
    config, fitting_notes = fit_to_env(config, maker)  # before validation: a vector environment decides n_envs
    notes = [*notes, *layers.notes, *fitting_notes]
    return Job(flags, validated(config, layers.preset_batch_size), maker, notes, keep, cwd)


def with_env_flag(argv: list[str]) -> list[str]:
    """`argv` with an environment that comes first, as in `unidle train CartPole-v1`, as `--env`."""
    if not argv or argv[0].startswith("-"):
        return argv
    env, *rest = argv
    if peek(rest, "--env") is not None:
        raise UsageError(f"The environment is given twice, as `{env}` and with --env; remove one of them.")
    return ["--env", env, *rest]


def _layers(argv: list[str], file: Path | None) -> Layers:
    """Resolve preset and files, which give the flags their defaults."""
    n_envs = peek(argv, "--n-envs")
    known = int(n_envs) if n_envs and n_envs.isdecimal() else None
    has_gpu = not wants_help(argv) and gpu_name() is not None
    layers = resolve_layers(peek(argv, "--preset"), file, has_gpu, peek(argv, "--env"), known, peek(argv, "--algo"))
    engine = peek(argv, "--engine")
    return layers if engine is None else layers.with_engine(read_engine_file(Path(engine)), gpu_name)
