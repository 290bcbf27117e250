"""What a user should know about how an environment's spaces are used; shown once, when a run starts."""

from __future__ import annotations

from unidle.config import Recipe, Run
from unidle.config.settings import OffPolicyActorCriticRecipe, OffPolicyRecipe
from unidle.envs.spec import EnvSpec
from unidle.errors import UsageError
from unidle.spaces.observations import MASK, ObservationLayout, image_axes


def env_notes(recipe: Recipe, env_spec: EnvSpec) -> list[str]:
    """Messages about action masks that were found, and about actions without bounds."""
    notes, obs_layout, bounded = [], env_spec.obs_layout, env_spec.action_layout.bounded
    if obs_layout.mask_width:
        where = "the observation" if obs_layout.mask_key else "the environment" if env_spec.on_device else "info"
        notes.append(
            f"Action masks found in {where} ({MASK}): masked actions are never taken; --no-action-masks ignores them."
        )
    if isinstance(recipe, OffPolicyActorCriticRecipe) and not bounded.all():
        unbounded = f"{(~bounded).sum()} of {len(bounded)} action numbers have no bounds"
        notes.append(
            f"{unbounded}: {recipe.algo.upper()} keeps them within ±{recipe.action_limit:g}; --action-limit changes it."
        )
    return notes


def require_images(recipe: Recipe, obs_layout: ObservationLayout) -> None:
    """UsageError for settings about images if the observation has none, or too small ones."""
    images = [leaf for leaf in obs_layout.leaves if leaf.is_image]
    shift = recipe.random_shift if isinstance(recipe, OffPolicyRecipe) else 0
    setting = "`random_shift`" if shift else None
    if recipe.encoder != Recipe.encoder:
        setting = f"`encoder` {recipe.encoder}"
    if setting and not images:
        raise UsageError(
            f"{setting} is for images, Box spaces of uint8 with at least 8 pixels per side, but the observation has "
            "none; remove it."
        )
    for leaf in images:
        _, height, width = image_axes(leaf.shape) or (0, 0, 0)
        if shift >= min(height, width):
            raise UsageError(
                f"`random_shift` is {shift} pixels, but an image is only {height} × {width}; use a smaller shift."
            )


def require_episode_records(run: Run, env_spec: EnvSpec) -> None:
    """UsageError if the settings ask for records of single episodes that these environments do not give."""
    if env_spec.on_device:
        flag = "--log-info" if run.log_info else "--monitor-csv"
        raise UsageError(
            f"{run.env} runs on the device, where episodes are only counted; leave out {flag}, or use --subproc if the "
            "environment has a version on the host."
        )
    if env_spec.vectorised and run.log_info:
        raise UsageError(
            f"{run.env} is a vector environment, whose infos are not read; leave out --log-info, or pass a factory of "
            "one environment."
        )
