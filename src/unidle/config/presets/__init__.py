"""Presets: YAML files beside this one, each a few recipe values under a name."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unidle.config.config import Config, recipe_type
from unidle.config.files import flatten_sections, read_yaml
from unidle.config.settings import Recipe
from unidle.errors import UsageError

_FOLDER = Path(__file__).parent
_BY_SIZE = ("classic", "fast", "heavy", "beast")
EXPLORER = "unidle/SiteExplore-v0"
_ON_DEVICE = ("unidle/", "gymnax:", "brax:")  # how environments that live on the GPU are named


@dataclass(frozen=True)
class Preset:
    """A named starting point for the recipe."""

    name: str
    description: str
    cores: int  # below this many, collecting is what the run waits for
    values: dict[str, Any]  # flat setting → value
    measured: str | None  # steps/s and GPU share, with machine and date, where they were measured
    fixed: bool = False  # it reproduces numbers of others: its recipe is not to be changed by the way

    @property
    def recipe(self) -> Recipe:
        """The recipe it stands for."""
        return self.apply(Config()).recipe

    def apply(self, config: Config) -> Config:
        """`config` with this preset's values laid over it."""
        return config.with_values({**self.values, "preset": self.name}, f"preset {self.name}")

    def memory(self) -> int:
        """Bytes of main memory it needs, roughly: torch, and a process with libraries per core."""
        return (1_000 + 200 * self.cores) * 2**20

    def fits(self, cores: int, memory: int) -> bool:
        """Whether so many cores and bytes of memory are enough for it."""
        return self.cores <= cores and self.memory() <= memory

    def smaller(self, cores: int, memory: int) -> str | None:
        """The largest preset that fits, if this one does not; None if it does, if none fits, or none can stand in."""
        if self.fixed or self.fits(cores, memory):
            return None
        fitting = [name for name in _BY_SIZE if load_preset(name).fits(cores, memory)]
        return fitting[-1] if fitting else None


def preset_names() -> list[str]:
    """All presets, the smallest first."""
    rest = sorted(path.stem for path in _FOLDER.glob("*.yaml") if path.stem not in _BY_SIZE)
    return [*_BY_SIZE, *rest]


def load_preset(name: str) -> Preset:
    """The preset of that name, or a UsageError that lists the names."""
    if name not in preset_names():
        raise UsageError(f"There is no preset `{name}`; choose one of {', '.join(preset_names())}.")
    tree = read_yaml(_FOLDER / f"{name}.yaml")
    description, cores, measured = tree.pop("description"), tree.pop("cores"), tree.pop("measured", None)
    fixed = tree.pop("fixed", False)
    return Preset(name, description, cores, flatten_sections(tree, f"preset {name}"), measured, fixed)


def default_preset(has_gpu: bool, env: str | None = None, algo: str | None = None) -> str:
    """What a user who names no preset gets."""
    if algo is not None and not recipe_type(algo, "--algo").on_policy:
        return algo
    if env == EXPLORER:
        return "site-explore"
    if not has_gpu:
        return "classic"
    return "device" if env is not None and env.startswith(_ON_DEVICE) else "heavy"
