"""Resolves the settings of a run: defaults, overridden by preset, config file, engine file and flags, in this order.

For a preset that reproduces published results, the environment variable NUM_PARALLEL_ENVS sets n_envs unless the
config file or the flags do.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from unidle.config.config import Config, recipe_type
from unidle.config.engine_file import EngineFile
from unidle.config.foreign.files import read_config
from unidle.config.presets import EXPLORER, default_preset, load_preset
from unidle.config.settings import Engine
from unidle.config.validate import validated
from unidle.errors import UsageError

_N_ENVS_OF_FIXED = "NUM_PARALLEL_ENVS"  # environment variable: n_envs of a preset that reproduces published results
# What may change on resume: duration, speed and monitoring, but not learning.
_MAY_CHANGE_ON_RESUME = {
    *(f.name for f in fields(Engine)),
    *("timesteps", "eval_every", "eval_episodes", "target_return", "checkpoint_every", "keep_checkpoints"),
    *("tensorboard", "wandb", "trace"),
}


@dataclass(frozen=True)
class Layers:
    """Settings before the user's flags, and messages about them."""

    config: Config
    notes: list[str]

    def settled_with(self, flags: dict[str, Any]) -> Config:
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


def lay(
    preset: str | None,
    file: Path | None,
    has_gpu: bool,
    env: str | None = None,
    n_envs: int | None = None,
    algo: str | None = None,
) -> Layers:
    """The defaults overridden by preset and config file; the choice may depend on the flags `env`, `n_envs`, `algo`."""
    translated = read_config(file, env, n_envs) if file else None
    notes = list(translated.notes) if translated else []
    named = preset or (translated and (translated.values.get("preset") or translated.base_preset))
    if translated:
        env, algo = env or translated.values.get("env"), algo or translated.values.get("algo")
        is_off_policy = algo is not None and not recipe_type(algo, "--algo").on_policy
        if not preset and is_off_policy and translated.is_of_sb3s_ppo:
            raise UsageError(
                f"{file} is a Stable-Baselines3 config, whose missing settings default to those of its PPO, not of "
                f"{str(algo).upper()}; add --preset {algo}."
            )
    if not named:
        named = default_preset(has_gpu, env, algo)
        reason = "a GPU is available" if has_gpu else "no GPU is available"
        if named == algo:
            reason = f"the algorithm is {algo}"
        elif env == EXPLORER:
            reason = f"it is the preset for {env}"
        notes.append(f"No --preset given; using `{named}` because {reason}. `unidle presets` lists them all.")
    base = load_preset(named)
    config = base.apply(Config())
    if algo not in (None, config.recipe.algo):
        raise UsageError(
            f"Preset {named} is for {config.recipe.algo.upper()}, but the algorithm is {str(algo).upper()}; remove "
            f"--preset, or use --preset {default_preset(has_gpu, env, algo)}."
        )
    asked = os.environ.get(_N_ENVS_OF_FIXED)
    if asked and base.fixed and n_envs is None and not (translated and "n_envs" in translated.values):
        config = config.with_values({"n_envs": asked}, _N_ENVS_OF_FIXED)
        notes.append(f"n_envs is {config.recipe.n_envs}, from the environment variable {_N_ENVS_OF_FIXED}.")
    if translated:
        config = config.with_values({**translated.values, "preset": named}, str(file))
    return Layers(config, notes)


def resumed(before: Config, settings: dict[str, Any], folder: str) -> Config:
    """The validated config for resuming the run in `folder` with changed `settings`; its recipe cannot change."""
    if settings.get("algo", before.recipe.algo) != before.recipe.algo:
        changed = ["algo"]
    else:
        after = before.with_values(settings, "resume")
        old, new = before.flat(), after.flat()
        changed = [name for name in new if new[name] != old[name] and name not in _MAY_CHANGE_ON_RESUME]
    if "run_name" in changed or "runs_dir" in changed:
        raise UsageError(f"A resumed run stays in {folder}; remove run_name and runs_dir, or start a new run.")
    if changed:
        names = ", ".join(changed)
        raise UsageError(f"A resumed run keeps its recipe, but {names} would change it; remove it, or start a new run.")
    return validated(after, resumed=True)
