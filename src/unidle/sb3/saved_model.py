"""What a saved model holds, and what a model needs of it to continue."""

from __future__ import annotations

import dataclasses
import warnings
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from unidle.algos.schedules import Schedule
from unidle.config import Config
from unidle.config.convert import in_brief
from unidle.config.settings import OffPolicyRecipe
from unidle.engine.checkpoint.run_folder import without_replay_buffer
from unidle.engine.checkpoint.snapshot import snapshot
from unidle.engine.progress import Progress
from unidle.errors import UsageError
from unidle.sb3.arguments import SCHEDULED, changed_arguments, first_value, is_above_zero
from unidle.sb3.envs import Envs, resolve_envs
from unidle.sb3.features import Extractor
from unidle.sb3.zip_file import File, Saved, read_zip, write_zip

_KEPT = ("algo", "spaces", "env_statistics", *dataclasses.asdict(Progress()))


@dataclass(frozen=True)
class Restored:
    """What a model is made of."""

    config: Config
    envs: Envs | None
    schedules: dict[str, Schedule]
    extractor: Extractor
    state: dict[str, Any]
    needs: list[str]  # arguments that were Python objects
    others: dict[str, Any]  # arguments that are no settings


def write_model(
    file: File, config: Config, seed: int, needs: Sequence[str], state: dict[str, Any], others: dict[str, Any]
) -> None:
    """Write a model without its replay buffer.

    `needs` are the arguments that `load` needs again, `others` those that are no settings.
    """
    state = without_replay_buffer(state)
    settings = dataclasses.asdict(config.recipe) | {"seed": seed}
    kept = {name: state[name] for name in _KEPT if name in state}
    write_zip(file, Saved(config.recipe.algo, settings, list(needs), others), snapshot(kept))


def read_model(archive: zipfile.ZipFile, shown: object, algo: str, env: Any, given: Mapping[str, Any]) -> Restored:
    """A model that `write_model` wrote, with the arguments `given`."""
    saved, state = read_zip(archive, shown)
    if saved.algo != algo:
        raise UsageError(f"{shown} is a model of {saved.algo.upper()}; load it with {saved.algo.upper()}.load.")
    settings = {**saved.settings, "preset": algo if algo != "ppo" else "classic", "eval_every": 0}
    config = Config().with_values({**settings, "save_replay_buffer": False}, "model")
    read = changed_arguments(algo, given, config)
    extractor = read.extractor
    if extractor.kind is None and saved.others.get("features_extractor"):
        extractor = Extractor.from_plain(saved.others["features_extractor"])
    if "policy_kwargs" in saved.needs and extractor.kind is None:
        raise UsageError(
            "The model has a custom network; pass policy_kwargs with its features_extractor_class to load."
        )
    envs, config = None, read.config
    if env is not None:
        envs = resolve_envs(env)
        config, state = _with_n_envs(config, state, envs.n_envs)
        config = config.with_values(envs.settings, "env")
    return Restored(config, envs, read.schedules, extractor, state, saved.needs, saved.others)


def usable_objects(custom_objects: Mapping[str, Any] | None, arguments: Iterable[str]) -> dict[str, Any]:
    """The `custom_objects` of `load` that are arguments of the model.

    Scripts pass a learning rate and a clip range of 0 to load a model that only plays: these are left out.
    """
    usable = {}
    for name in (custom_objects or {}).keys() & set(arguments):
        value = first_value((custom_objects or {})[name])
        if name in SCHEDULED and not is_above_zero(value):
            warnings.warn(
                f"`{name}` in custom_objects is {in_brief(value)}, but must be above 0; the model keeps its own value, "
                "or the default.",
                stacklevel=4,  # the caller of `load`, whose decorator is a frame
            )
        else:
            usable[name] = (custom_objects or {})[name]
    return usable


def warn_of_missing(names: Iterable[str], replaced: Iterable[str], instead: str) -> None:
    """Warn of arguments that are Python objects in the file, and that `load` was not given."""
    for name in names:
        if name not in replaced:
            warnings.warn(
                f"`{name}` of the saved model is a Python object, which is not read; it {instead} unless you pass it "
                "to load.",
                stacklevel=4,  # the caller of `load`, whose decorator is a frame
            )


def _with_n_envs(config: Config, state: dict[str, Any], n_envs: int) -> tuple[Config, dict[str, Any]]:
    """The settings and the state for another number of environments; as many updates per iteration as before."""
    recipe = config.recipe
    if n_envs == recipe.n_envs:
        return config, state
    algo = dict(state["algo"])
    if isinstance(recipe, OffPolicyRecipe):
        ratio = recipe.utd_ratio * recipe.n_envs / n_envs
        return config.with_values({"n_envs": n_envs, "utd_ratio": ratio}, "env"), state
    algo["return_carry"] = torch.zeros(n_envs)
    return config.with_values({"n_envs": n_envs}, "env"), {**state, "algo": algo}
