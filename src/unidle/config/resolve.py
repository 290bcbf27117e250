"""How a run's settings come together: defaults, then the preset, a config file, an engine file, and flags.

Of a preset of fixed numbers, the variable NUM_PARALLEL_ENVS gives the number of environments, if file and flags do not.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from unidle.config.engine_file import EngineFile
from unidle.config.foreign.files import read_config
from unidle.config.presets import EXPLORER, default_preset, load_preset
from unidle.config.settings import OFF_POLICY, Config
from unidle.errors import UsageError

_N_ENVS_OF_FIXED = "NUM_PARALLEL_ENVS"  # the environment variable for what one may tune of a preset of fixed numbers


@dataclass(frozen=True)
class Layers:
    """Settings before the user's flags, and what the user should be told about them."""

    config: Config
    notes: list[str]

    def settled_with(self, flags: dict[str, Any]) -> Config:
        """Lay the user's flags on top."""
        return self.config.with_values(flags, "settings")

    def with_engine(self, file: EngineFile, gpu_name: Callable[[], str | None]) -> Layers:
        """These, and an engine file on top."""
        note = file.note(gpu_name)
        return replace(
            self,
            config=self.config.with_values(file.values, file.source),
            notes=[*self.notes, note] if note else self.notes,
        )

    @property
    def preset_batch_size(self) -> int:
        """What `--batch-size auto` must not exceed."""
        size = load_preset(self.config.run.preset or "classic").values["batch_size"]
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
    """Lay preset and config file over the defaults; what they are may depend on the flags `env`, `n_envs`, `algo`."""
    translated = read_config(file, env, n_envs) if file else None
    notes = list(translated.notes) if translated else []
    named = preset or (translated and (translated.values.get("preset") or translated.base_preset))
    if translated:
        env, algo = env or translated.values.get("env"), algo or translated.values.get("algo")
        if not preset and algo in OFF_POLICY and translated.is_of_sb3s_ppo:
            raise UsageError(
                f"{file} is in Stable-Baselines3's words, and what it leaves out would be that of its PPO; name the "
                f"preset too: --preset {algo}."
            )
    if not named:
        named = default_preset(has_gpu, env, algo)
        reason = "a GPU is there" if has_gpu else "there is no GPU here"
        if named == algo:
            reason = f"the algorithm is {algo}"
        elif env == EXPLORER:
            reason = f"it was made for {env}"
        notes.append(f"No preset was named; taking `{named}` because {reason}. `unidle presets` lists them all.")
    base = load_preset(named)
    config = base.apply(Config())
    asked = os.environ.get(_N_ENVS_OF_FIXED)
    if asked and base.fixed and n_envs is None and not (translated and "n_envs" in translated.values):
        config = config.with_values({"n_envs": asked}, _N_ENVS_OF_FIXED)
        notes.append(f"n_envs is {config.recipe.n_envs}: {_N_ENVS_OF_FIXED} says so.")
    if translated:
        config = config.with_values({**translated.values, "preset": named}, str(file))
    return Layers(config, notes)
