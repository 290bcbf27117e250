"""Prepares a job's settings for measurement, and checks changed settings."""

from __future__ import annotations

import dataclasses

from unidle.config import Config, OffPolicyRecipe
from unidle.config.validate import validated
from unidle.errors import UsageError

ENDLESS = 10**12  # steps; a measurement must not reach the end of the run
MOST_WORKERS_PER_CORE = 4  # more workers than cores help if environments wait for I/O


def endless(config: Config) -> Config:
    """Return the job with so many steps that a measurement never reaches its end, and learning from the start."""
    recipe = config.recipe
    if isinstance(recipe, OffPolicyRecipe):
        recipe = dataclasses.replace(recipe, learning_starts=min(recipe.learning_starts, recipe.total_batch))
    return dataclasses.replace(config, recipe=recipe, run=dataclasses.replace(config.run, timesteps=ENDLESS))


def is_valid(config: Config) -> bool:
    """Whether `unidle train` accepts these settings."""
    try:
        validated(config)
    except UsageError:
        return False
    return True
