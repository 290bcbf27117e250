"""One rank's share of a recipe, which describes the whole job."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from unidle.config import Config, Engine, OffPolicyRecipe, PPORecipe, Recipe
from unidle.config.validate import sequence_length
from unidle.errors import UsageError


def share_of(recipe: Recipe, size: int) -> Recipe:
    """The recipe of one of `size` ranks: its part of the environments, of each minibatch and of the replay buffer."""
    assert isinstance(recipe.batch_size, int)
    for name in ("n_envs", "batch_size"):
        _require_multiple(name, getattr(recipe, name), size)
    shared: dict[str, Any] = {"n_envs": recipe.n_envs // size, "batch_size": recipe.batch_size // size}
    if recipe.n_tasks > 1:
        raise UsageError("Multi-task training (`n_tasks` > 1) does not run on several ranks; train it on one.")
    if isinstance(recipe, OffPolicyRecipe):
        shared["buffer_size"] = recipe.buffer_size // size
    share = replace(recipe, **shared)
    if isinstance(recipe, PPORecipe) and isinstance(share, PPORecipe):
        _require_same_sequences(recipe, share, size)
    return share


def _require_multiple(name: str, value: int, size: int) -> None:
    if value % size:
        below, above = value // size * size, -(-value // size) * size
        near = f"{below} or {above}" if below else str(above)
        raise UsageError(
            f"`{name}` is {value}, which is not divisible by {size} ranks; use {near}, or another number of ranks."
        )


def _require_same_sequences(recipe: PPORecipe, share: PPORecipe, size: int) -> None:
    """A recurrent policy must learn from sequences of the same length on any number of ranks."""
    whole, part = sequence_length(recipe), sequence_length(share)
    if whole != part:
        raise UsageError(
            f"The recurrent policy learns from sequences of {whole} steps, but with a batch of {share.batch_size} on "
            f"each of {size} ranks they would have {part}; use a batch size that is a multiple of {size * whole}."
        )


def not_pinned(engine: Engine) -> Engine:
    """The settings for one of several ranks, which would pin their worker processes to the same cores."""
    if engine.pin_cores:
        raise UsageError(
            "--pin-cores cannot be used with several ranks, which would pin their workers to the same cores; leave it "
            "out."
        )
    return replace(engine, pin_cores=False)


def quiet_share(config: Config) -> Config:
    """The settings of the ranks other than rank 0, which write nothing and evaluate nothing."""
    return config.with_run(
        eval_every=0, target_return=None, tensorboard=False, wandb=False, monitor_csv=False, trace=False
    )
