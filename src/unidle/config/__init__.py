"""Settings: one dataclass per algorithm, presets, config files of other libraries, and the machine's resources."""

from unidle.config.config import Config, recipe_for
from unidle.config.settings import DQNRecipe, Engine, OffPolicyRecipe, PPORecipe, Recipe, Run, SACRecipe, TD3Recipe

__all__ = [
    "Config",
    "DQNRecipe",
    "Engine",
    "OffPolicyRecipe",
    "PPORecipe",
    "Recipe",
    "Run",
    "SACRecipe",
    "TD3Recipe",
    "recipe_for",
]
