"""A model's settings for the environments that it has."""

from __future__ import annotations

import dataclasses

from unidle.api import fit_to_env
from unidle.config import Config
from unidle.config.presets import load_preset
from unidle.config.validate import validated
from unidle.errors import UsageError
from unidle.sb3.envs import Envs


def validated_for(config: Config, envs: Envs) -> Config:
    """The settings, complete and checked; UsageError if they do not fit the environments."""
    if envs.are_shared and config.run.eval_every != 0:
        raise UsageError(
            "`eval_every` needs environments of its own, but the model has your environment objects; pass an id or "
            "make_vec_env(…), or evaluate with an EvalCallback."
        )
    named = dataclasses.replace(config, run=dataclasses.replace(config.run, env=envs.maker.name))
    fitted, _ = fit_to_env(named, envs.maker)
    size = load_preset(config.run.preset or "classic").recipe.batch_size
    assert isinstance(size, int)
    return validated(fitted, size)
