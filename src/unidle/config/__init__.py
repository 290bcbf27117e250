"""Settings: the dataclass tree, presets, foreign config files, and what the machine has."""

from unidle.config.settings import Config, Engine, Recipe, Run

__all__ = ["Config", "Engine", "Recipe", "Run"]
