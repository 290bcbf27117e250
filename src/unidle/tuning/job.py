"""A job whose speed is in question: how its settings are made ready for a measurement, and which it may have."""

from __future__ import annotations

import dataclasses

from unidle.config import Config
from unidle.config.validate import validated
from unidle.errors import UsageError

ENDLESS = 10**12  # steps: a measurement must not come to the end of the run
MOST_WORKERS_PER_CORE = 4  # those that wait for something else than a core may be more than there are cores


def endless(config: Config) -> Config:
    """The job in the middle of its run: it never ends, and what is learned only later is learned at once."""
    recipe = config.recipe
    recipe = dataclasses.replace(recipe, learning_starts=min(recipe.learning_starts, recipe.total_batch))
    return dataclasses.replace(config, recipe=recipe, run=dataclasses.replace(config.run, timesteps=ENDLESS))


def is_sound(config: Config) -> bool:
    """Whether `unidle train` would take these settings."""
    try:
        validated(config)
    except UsageError:
        return False
    return True
