"""Presets: the YAML files in this folder, each a named set of recipe values."""

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
_ATARI = ("atari", "atari-fast")
SITE_EXPLORE = "unidle/SiteExplore-v0"
_ON_DEVICE = ("unidle/", "gymnax:", "brax:")  # prefixes of environments that run on the GPU


@dataclass(frozen=True)
class Preset:
    """A named set of recipe values."""

    name: str
    description: str
    cores: int  # recommended; with fewer, collecting is the bottleneck
    values: dict[str, Any]  # flat setting → value
    measured: str | None  # steps/s and GPU utilisation, with machine and date
    fixed: bool = False  # reproduces published results: its recipe may change only with --allow-recipe-change

    @property
    def recipe(self) -> Recipe:
        """The recipe with this preset's values."""
        return self.apply(Config()).recipe

    def apply(self, config: Config) -> Config:
        """`config` with this preset's values."""
        return config.with_values({**self.values, "preset": self.name}, f"preset {self.name}")

    def memory(self) -> int:
        """Estimated bytes of memory it needs: torch, and a worker process per core."""
        return (1_000 + 200 * self.cores) * 2**20

    def fits(self, cores: int, memory: int) -> bool:
        """Whether `cores` and `memory` bytes are enough for it."""
        return self.cores <= cores and self.memory() <= memory

    def smaller(self, cores: int, memory: int) -> str | None:
        """The largest preset that fits if this one does not; None if it fits, is fixed, or no preset fits."""
        if self.fixed or self.fits(cores, memory):
            return None
        family = _ATARI if self.name in _ATARI else _BY_SIZE
        fitting = [name for name in family if load_preset(name).fits(cores, memory)]
        return fitting[-1] if fitting else None


def preset_names() -> list[str]:
    """The names of all presets, smallest first."""
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


def default_preset(env: str | None = None, algo: str | None = None) -> str:
    """The preset for a run without --preset; it never depends on the machine."""
    if algo is not None and not recipe_type(algo, "--algo").on_policy:
        return algo
    return "site-explore" if env == SITE_EXPLORE else "classic"


def preset_for_gpu(env: str | None = None) -> str:
    """The preset to suggest in place of `classic` on a machine with a GPU."""
    if env is not None and env.startswith("ale:"):
        return "atari-fast"
    return "device" if env is not None and env.startswith(_ON_DEVICE) else "heavy"
