"""What to train: the arguments of `train` as validated settings, and the maker of the environments."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import gymnasium
import torch

from unidle.config import Config
from unidle.config.engine_file import read_engine_file
from unidle.config.machine import gpu_name
from unidle.config.presets import load_preset
from unidle.config.renamed import with_current_names, without_aliases
from unidle.config.resolve import Remark, chosen_by_unidle, resolve_layers
from unidle.config.validate import validated
from unidle.engine.build import resolve_network
from unidle.engine.placement import choose_device
from unidle.envs.env_object import settings_of
from unidle.envs.make import EnvFactory, EnvMaker, env_maker, is_name_or_factory
from unidle.envs.vector.host_envs import fixed_batch
from unidle.envs.wrap import wrapper_entries
from unidle.errors import UsageError
from unidle.nn.actor_critic import NetworkFactory

_OVERLAP_MIN_ENVS = 48  # with fewer environments overlap does not pay, as measured on a GPU: docs/overlap.md


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
    batch = fixed_batch(maker)
    config, notes = (config, []) if batch is None else _with_n_envs(config, maker, batch.n_envs)
    recipe, engine = config.recipe, config.engine
    if recipe.overlap != "auto":
        return config, notes
    has_many_envs = recipe.on_policy and recipe.n_envs >= _OVERLAP_MIN_ENVS
    on_host = maker_for(maker, config).kind in ("gymnasium", "native", "unknown") and not (batch and batch.on_device)
    in_processes = on_host and engine.subproc is not False
    use_overlap = has_many_envs and in_processes and choose_device(engine.device).type == "cuda"
    if use_overlap:
        notes = [
            Remark(
                f"overlap is strict: with {_OVERLAP_MIN_ENVS} environments or more, they keep stepping while the GPU "
                "learns. For textbook PPO, use --overlap off."
            )
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
        Remark(f"n_envs is {size}, the number of environments that {maker.name} creates.")
    ]
