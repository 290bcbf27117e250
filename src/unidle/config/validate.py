"""Impossible combinations, refused before anything starts by a sentence that says what to do."""

from __future__ import annotations

import dataclasses
import math
from importlib.util import find_spec

from unidle.config.schema import Config, Recipe
from unidle.errors import UsageError

_AT_LEAST_ONE = (
    "n_envs",
    "n_steps",
    "n_epochs",
    "recurrent_size",
    "timesteps",
    "eval_episodes",
    "keep_checkpoints",
    "threads",
)
_POSITIVE = ("learning_rate", "clip_range", "max_grad_norm")
_NOT_NEGATIVE = ("ent_coef", "vf_coef")
_POSITIVE_OR_NONE = ("clip_range_vf", "target_kl", "workers", "slices", "checkpoint_every", "env_timeout")
_MAY_BE_INFINITE = ("max_grad_norm",)  # then gradients are never scaled down


def validated(config: Config, preset_batch_size: int | None = None) -> Config:
    """`config` with `auto` settled to at most `preset_batch_size`, or a UsageError."""
    flat = config.flat()
    for name, value in flat.items():
        if isinstance(value, float) and not math.isfinite(value) and name not in _MAY_BE_INFINITE:
            raise UsageError(f"`{name}` is {value}; it must be a finite number.")
    for name in _AT_LEAST_ONE:
        if flat[name] < 1:
            raise UsageError(f"`{name}` is {flat[name]}; it must be at least 1.")
    for name in _POSITIVE:
        if not flat[name] > 0:
            raise UsageError(f"`{name}` is {flat[name]}; it must be above 0.")
    for name in _NOT_NEGATIVE:
        if not flat[name] >= 0:
            raise UsageError(f"`{name}` is {flat[name]}; it must not be negative.")
    for name in _POSITIVE_OR_NONE:
        if flat[name] is not None and not flat[name] > 0:
            raise UsageError(f"`{name}` is {flat[name]}; it must be above 0, or none.")
    for name in ("gamma", "gae_lambda"):
        if not 0 <= flat[name] <= 1:
            raise UsageError(f"`{name}` is {flat[name]}; it must lie between 0 and 1.")
    check_seed(config.run.seed)
    recipe, engine = config.recipe, config.engine
    if recipe.discretize is not None and recipe.discretize < 2:
        raise UsageError(f"`discretize` is {recipe.discretize}; each action needs at least 2 bins.")
    if any(width < 1 for width in recipe.network_arch):
        raise UsageError(f"`network_arch` is {recipe.network_arch}; every layer needs at least 1 unit.")
    if engine.subproc is False and engine.workers is not None:
        raise UsageError(
            f"--no-subproc steps environments in this process, and --workers {engine.workers} in others; "
            "leave out one, or say --workers none."
        )
    if config.run.eval_every is not None and config.run.eval_every < 0:
        raise UsageError("`eval_every` must not be negative; 0 turns evaluation off.")
    if config.run.target_return is not None and config.run.eval_every == 0:
        raise UsageError("`target_return` is judged by evaluations, and `eval_every` is 0; give it a number of steps.")
    if config.run.wandb and find_spec("wandb") is None:
        raise UsageError("--wandb needs the package wandb; run: pip install 'unidle[wandb]'.")
    if not config.run.env:
        raise UsageError("No environment was given; add --env, for example --env CartPole-v1.")
    return dataclasses.replace(config, recipe=_with_batch_size(recipe, preset_batch_size))


def check_seed(seed: int) -> None:
    """Refuse a seed that torch and NumPy do not take."""
    if not 0 <= seed < 2**63:
        raise UsageError(f"`seed` is {seed}; it must lie between 0 and 2**63 - 1.")


def _with_batch_size(recipe: Recipe, preset_batch_size: int | None) -> Recipe:
    total = recipe.total_batch
    if recipe.batch_size == "auto":
        size = largest_divisor(total, preset_batch_size or Recipe.batch_size)  # type: ignore[arg-type]
    else:
        size = recipe.batch_size
        if size < 1 or total % size:
            below, above = nearest_divisors(total, size)
            near = f"{below} or {above}" if below != above else str(below)
            raise UsageError(
                f"Batch size {size} does not divide n_envs × n_steps = "
                f"{recipe.n_envs} × {recipe.n_steps} = {total}; take {near}, or --batch-size auto."
            )
    if size == 1 and recipe.normalize_advantage:
        raise UsageError(
            "A batch of 1 has no deviation to normalise by; use a larger batch or --no-normalize-advantage."
        )
    if recipe.recurrent != "none" and math.gcd(recipe.n_steps, size) == 1 and recipe.n_steps > 1:
        raise UsageError(
            f"A recurrent policy learns from whole sequences, and no length divides both "
            f"n_steps {recipe.n_steps} and batch size {size}; take a batch size that has a "
            "divisor in common with n_steps."
        )
    return dataclasses.replace(recipe, batch_size=size)


def divisors(n: int) -> list[int]:
    """All divisors of n, ascending."""
    small = [d for d in range(1, math.isqrt(n) + 1) if n % d == 0]
    return sorted({*small, *(n // d for d in small)})


def largest_divisor(n: int, limit: int) -> int:
    """The largest divisor of n that is not above `limit`."""
    return max(d for d in divisors(n) if d <= max(1, limit))


def nearest_divisors(n: int, size: int) -> tuple[int, int]:
    """The divisors of n next below and next above `size` (the same one twice at the ends)."""
    below = largest_divisor(n, size)
    above = next((d for d in divisors(n) if d >= size), below)
    return below, above


def sequence_length(recipe: Recipe, longest: int = 64) -> int:
    """Steps per training sequence, the longest n_steps and batch size allow; 1 if not recurrent."""
    if recipe.recurrent == "none":
        return 1
    assert isinstance(recipe.batch_size, int)
    return largest_divisor(math.gcd(recipe.n_steps, recipe.batch_size), longest)
