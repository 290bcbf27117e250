"""Impossible combinations, refused before anything starts by a sentence that says what to do."""

from __future__ import annotations

import dataclasses
import math
from importlib.util import find_spec

import yaml

from unidle.config.presets import default_preset, load_preset
from unidle.config.settings import Config, Recipe, word_for_none
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
    "buffer_size",
    "n_step",
    "n_critics",
    "n_tasks",
    "target_update_interval",
    "policy_delay",
)
_POSITIVE = ("learning_rate", "clip_range", "max_grad_norm", "tau", "adam_eps")
_NOT_NEGATIVE = (
    "ent_coef",
    "vf_coef",
    "learning_starts",
    "utd_ratio",
    "max_env_restarts",
    "target_policy_noise",
    "target_noise_clip",
    "exploration_noise",
)
_POSITIVE_OR_NONE = (
    "clip_range_vf",
    "target_kl",
    "value_limit",
    "workers",
    "slices",
    "checkpoint_every",
    "env_timeout",
)
_SHARES = ("gamma", "gae_lambda", "tau", "per_alpha", "per_beta", "exploration_final_eps", "exploration_fraction")
# Settings that not every algorithm has, and whose they are.
_OWNERS = {
    ("ppo",): (
        "n_epochs",
        "share_trunk",
        "recurrent",
        "gae_lambda",
        "clip_range",
        "clip_schedule",
        "clip_range_vf",
        "ent_coef",
        "vf_coef",
        "target_kl",
        "normalize_advantage",
        "normalize_obs",
        "normalize_reward",
        "log_std_init",
        "action_distribution",
        "actor_obs",
        "critic_obs",
    ),
    ("sac", "td3", "dqn"): (
        "buffer_size",
        "learning_starts",
        "utd_ratio",
        "n_step",
        "per",
        "per_alpha",
        "per_beta",
        "tau",
        "adam_eps",
    ),
    ("sac", "td3"): ("n_critics", "critic_arch"),
    ("td3",): ("policy_delay", "target_policy_noise", "target_noise_clip", "exploration_noise"),
    ("sac",): ("weight_init", "temperature", "target_entropy", "value_limit", "n_tasks"),
    ("dqn",): ("double_dqn", "dueling", "target_update_interval", "exploration_final_eps", "exploration_fraction"),
}
# What a preset of fixed numbers leaves open: how many environments give the steps, and how old the weights are that act
# in them. The updates for each step stay the same.
_OPEN_IN_FIXED = ("n_envs", "overlap")
_MAY_BE_INFINITE = ("max_grad_norm",)  # then gradients are never scaled down


def validated(config: Config, preset_batch_size: int | None = None, *, resumed: bool = False) -> Config:
    """`config` with `auto` settled to at most `preset_batch_size`, or a UsageError.

    A run that is `resumed` keeps its recipe, also if its preset has another one by now.
    """
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
            raise UsageError(f"`{name}` is {flat[name]}; it must be above 0, or {word_for_none(name)}.")
    for name in _SHARES:
        if not 0 <= flat[name] <= 1:
            raise UsageError(f"`{name}` is {flat[name]}; it must lie between 0 and 1.")
    check_seed(config.run.seed)
    try:
        yaml.safe_dump(config.run.env_kwargs)
    except yaml.YAMLError:
        raise UsageError(
            "`env_kwargs` are kept in config.yaml, so they must be plain numbers, texts, lists and dicts; for anything "
            "else give a factory of the environment."
        ) from None
    recipe, engine = config.recipe, config.engine
    if recipe.discretize is not None and recipe.discretize < 2:
        raise UsageError(f"`discretize` is {recipe.discretize}; each action needs at least 2 bins.")
    for name in ("net_arch", "critic_arch"):
        if any(width < 1 for width in flat[name] or ()):
            raise UsageError(f"`{name}` is {flat[name]}; every layer needs at least 1 unit.")
    if engine.subproc is False and engine.workers is not None:
        raise UsageError(
            f"--no-subproc steps environments in this process, and --workers {engine.workers} in others; "
            "leave out one, or say --workers auto."
        )
    if config.run.eval_every is not None and config.run.eval_every < 0:
        raise UsageError("`eval_every` must not be negative; 0 turns evaluation off.")
    if engine.eval_workers is not None and engine.eval_workers < 0:
        raise UsageError("`eval_workers` must not be negative; with 0 the trainer evaluates by itself.")
    if config.run.target_return is not None and config.run.eval_every == 0:
        raise UsageError("`target_return` is judged by evaluations, and `eval_every` is 0; give it a number of steps.")
    if config.run.wandb and find_spec("wandb") is None:
        raise UsageError("--wandb needs the package wandb; run: pip install 'unidle[wandb]'.")
    if not config.run.env:
        raise UsageError("No environment was given; add --env, for example --env CartPole-v1.")
    if not resumed:
        _keep_fixed(config)
    _refuse_others_settings(recipe)
    if not recipe.on_policy:
        return dataclasses.replace(config, recipe=_off_policy(recipe))
    return dataclasses.replace(config, recipe=_with_batch_size(recipe, preset_batch_size))


def _keep_fixed(config: Config) -> None:
    """A preset that reproduces fixed numbers keeps them, however its steps are collected."""
    run, recipe = config.run, config.recipe
    preset = load_preset(run.preset) if run.preset else None
    if preset is None or not preset.fixed or run.allow_recipe_change:
        return
    fixed = preset.apply(Config()).recipe
    for name, value in vars(fixed).items():
        if name not in _OPEN_IN_FIXED and getattr(recipe, name) != value:
            raise UsageError(
                f"Preset {preset.name} reproduces fixed numbers, and `{name}` is {value} in them, not "
                f"{getattr(recipe, name)}; leave it out, or say --allow-recipe-change."
            )


def _refuse_others_settings(recipe: Recipe) -> None:
    for owners, names in _OWNERS.items():
        for name in names if recipe.algo not in owners else ():
            if getattr(recipe, name) != getattr(Recipe(), name):
                raise UsageError(
                    f"`{name}` is a setting of {' and '.join(owners)} and means nothing to {recipe.algo}; leave it "
                    f"out, or start from --preset {default_preset(has_gpu=False, algo=recipe.algo)}."
                )


def _off_policy(recipe: Recipe) -> Recipe:
    """`recipe` of SAC or DQN, or a UsageError."""
    if recipe.batch_size == "auto":
        raise UsageError(f"`batch_size` auto is PPO's; give {recipe.algo} a number, such as 256.")
    if recipe.batch_size < 1:
        raise UsageError(f"`batch_size` is {recipe.batch_size}; it must be at least 1.")
    if recipe.precision == "bf16":
        raise UsageError(f"`precision` bf16 is PPO's so far; {recipe.algo} takes tf32 or fp32.")
    if isinstance(recipe.temperature, float) and not recipe.temperature > 0:
        raise UsageError(f"`temperature` is {recipe.temperature}; it must be above 0, or auto.")
    if recipe.buffer_size < 2 * recipe.total_batch:
        raise UsageError(
            f"`buffer_size` is {recipe.buffer_size:,}, and one iteration is {recipe.total_batch:,} steps; "
            "remember at least twice as many."
        )
    if recipe.n_tasks > 1 and (recipe.per or recipe.n_step > 1):
        raise UsageError(
            "The memory of several tasks draws as much of each and looks one step ahead; leave out `per` and "
            "`n_step`, or give `n_tasks` 1."
        )
    return recipe


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
