"""Resolves the settings of a run: defaults, overridden by preset, config file, engine file and flags, in this order.

For a preset that reproduces published results, the environment variable NUM_PARALLEL_ENVS sets n_envs unless the
config file or the flags do.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import yaml

from unidle.config.config import Config
from unidle.config.convert import in_brief
from unidle.config.engine_file import EngineFile
from unidle.config.fields import section_of
from unidle.config.files import parse_yaml
from unidle.config.foreign.files import read_config
from unidle.config.presets import SITE_EXPLORE, default_preset, load_preset, preset_for_gpu
from unidle.config.settings import Engine
from unidle.config.validate import validated
from unidle.errors import UsageError

# Environment variable that sets n_envs of a preset that reproduces published results.
_N_ENVS_VARIABLE = "NUM_PARALLEL_ENVS"
# Settings that may change on resume: duration, speed and monitoring, but nothing that affects learning.
_MAY_CHANGE_ON_RESUME = {
    *(f.name for f in fields(Engine)),
    *(
        "timesteps",
        "eval_every",
        "eval_episodes",
        "eval_max_steps",
        "target_return",
        "checkpoint_every",
        "keep_checkpoints",
    ),
    *("tensorboard", "wandb", "cleanrl_tags", "log_info", "monitor_csv", "trace"),
}
# Settings of the recipe that may change on resume too; such a change is recorded (engine/checkpoint/changes.py).
RECORDED_ON_RESUME = ("learning_rate", "lr_schedule")
_WITHOUT_EFFECT_ON_RESUME = {"run_name", "runs_dir", "preset", "allow_recipe_change", "save_replay_buffer"}


class Remark(str):
    """A message about settings that warns of nothing, which `--quiet` leaves out."""


def shown_notes(notes: Sequence[str], quiet: bool) -> list[str]:
    """The messages to show: with `quiet`, no remarks."""
    return [note for note in notes if not (quiet and isinstance(note, Remark))]


@dataclass(frozen=True)
class Layers:
    """Settings before the user's flags, and messages about them."""

    config: Config
    notes: list[str]

    def with_flags(self, flags: dict[str, Any]) -> Config:
        """The config with the user's flags applied."""
        return self.config.with_values(flags, "settings")

    def with_engine(self, file: EngineFile, gpu_name: Callable[[], str | None]) -> Layers:
        """A copy with the values of an engine file."""
        note = file.note(gpu_name)
        return replace(
            self,
            config=self.config.with_values(file.values, file.source),
            notes=[*self.notes, note] if note else self.notes,
        )

    @property
    def preset_batch_size(self) -> int:
        """The upper limit for `--batch-size auto`."""
        size = load_preset(self.config.run.preset or "classic").recipe.batch_size
        assert isinstance(size, int)
        return size


def resolve_layers(
    preset: str | None,
    file: Path | None,
    has_gpu: bool,
    env: str | None = None,
    n_envs: int | None = None,
    algo: str | None = None,
) -> Layers:
    """The defaults overridden by preset and config file; the choice may depend on the flags `env`, `n_envs`, `algo`.

    `has_gpu` decides only whether a larger preset is suggested, so that results have the same recipe everywhere.
    """
    converted = read_config(file, env, n_envs, algo) if file else None
    notes = list(converted.notes) if converted else []
    named = preset or (converted and (converted.values.get("preset") or converted.base_preset))
    if converted:
        env, algo = env or converted.values.get("env"), algo or converted.values.get("algo")
    if not named:
        named = default_preset(env, algo)
        notes.append(Remark(_default_note(named, has_gpu, env, algo)))
    base = load_preset(named)
    config = base.apply(Config())
    if algo not in (None, config.recipe.algo):
        raise UsageError(
            f"Preset {named} is for {config.recipe.algo.upper()}, but the algorithm is {str(algo).upper()}; remove "
            f"--preset, or use --preset {default_preset(env, algo)}."
        )
    n_envs_given = os.environ.get(_N_ENVS_VARIABLE)
    if n_envs_given and base.fixed and n_envs is None and not (converted and "n_envs" in converted.values):
        config = config.with_values({"n_envs": n_envs_given}, _N_ENVS_VARIABLE)
        notes.append(Remark(f"n_envs is {config.recipe.n_envs}, from the environment variable {_N_ENVS_VARIABLE}."))
    if converted:
        config = config.with_values({**converted.values, "preset": named}, str(file))
    return Layers(config, notes)


def _default_note(preset: str, has_gpu: bool, env: str | None, algo: str | None) -> str:
    if preset == algo:
        reason = f" because the algorithm is {algo}"
    elif env == SITE_EXPLORE:
        reason = f" because it is the preset for {env}"
    elif has_gpu:
        larger = preset_for_gpu(env)
        return f"No --preset given; using `{preset}`. For this GPU, try --preset {larger}: a larger recipe."
    else:
        reason = ""
    return f"No --preset given; using `{preset}`{reason}. `unidle presets` lists them all."


def resumed(before: Config, settings: dict[str, Any], folder: str) -> Config:
    """The validated config for resuming the run in `folder` with changed `settings`.

    Its recipe cannot change, except for `RECORDED_ON_RESUME`.
    """
    if settings.get("algo", before.recipe.algo) != before.recipe.algo:
        changed = ["algo"]
    else:
        after = before.with_values(settings, "resume")
        old, new = before.flat(), after.flat()
        allowed = {*_MAY_CHANGE_ON_RESUME, *RECORDED_ON_RESUME}
        changed = [name for name in new if new[name] != old[name] and name not in allowed]
    if "run_name" in changed or "runs_dir" in changed:
        raise UsageError(f"A resumed run stays in {folder}; remove run_name and runs_dir, or start a new run.")
    if changed:
        names = ", ".join(changed)
        raise UsageError(f"A resumed run keeps its recipe, but {names} would change it; remove it, or start a new run.")
    return validated(after, resumed=True)


def chosen_by_unidle(given: Config) -> tuple[str, ...]:
    """The recipe settings that `given`, as the user wrote it, leaves to unidle, which may choose by machine."""
    return ("overlap",) if given.recipe.overlap == "auto" else ()


def resumed_job(before: Config, job: Config, keep: Sequence[str], folder: str) -> Config:
    """The validated config for resuming the run in `folder` with the settings of `job`, except for those in `keep`.

    UsageError if the recipe differs.
    """
    old, ignored = before.flat(), {*_WITHOUT_EFFECT_ON_RESUME, *keep}
    values = {name: value for name, value in job.flat().items() if name not in ignored and value != old.get(name)}
    return resumed(before, values, folder)


def learning_settings(config: Config) -> str:
    """The settings that affect learning, as text, for `edited_settings`."""
    others = _MAY_CHANGE_ON_RESUME | _WITHOUT_EFFECT_ON_RESUME
    return yaml.safe_dump({name: value for name, value in config.flat().items() if name not in others}, sort_keys=False)


def learned_with(text: str) -> dict[str, Any]:
    """The settings in `learning_settings`, by name."""
    values = parse_yaml(text, "checkpoint")
    flat = Config().with_values(values, "checkpoint").flat()
    return {name: flat[name] for name in values}


def edited_settings(
    text: str, config: Config, changes: Sequence[Mapping[str, Any]] = (), *, of_policy: bool = False
) -> str:
    """What differs in `config` from `learning_settings`, in words: `gamma` is 0.5, not 0.99. Empty if nothing does.

    `changes` are settings that `config` may have instead. `of_policy`: only what a trained policy may depend on.
    """
    old, new = learned_with(text), config.flat()
    if of_policy:
        old = {name: old[name] for name in old if section_of(name) == "recipe" and name not in RECORDED_ON_RESUME}
    changed = [
        name
        for name, value in old.items()
        if new.get(name) != value and not any(name in each and each[name] == new.get(name) for each in changes)
    ]
    return ", ".join(f"`{name}` is {in_brief(new.get(name))}, not {in_brief(old[name])}" for name in changed)
