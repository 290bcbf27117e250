"""Validates a config before the run starts; errors say what to do."""

from __future__ import annotations

import dataclasses
import math
import re
from importlib.util import find_spec
from typing import Any

import yaml

from unidle.config.config import Config
from unidle.config.convert import in_brief
from unidle.config.fields import word_for_none
from unidle.config.presets import load_preset
from unidle.config.settings import OffPolicyRecipe, PPORecipe, Recipe
from unidle.errors import UsageError

_AT_LEAST_ONE = {
    *("n_envs", "n_steps", "n_epochs", "recurrent_size", "timesteps", "eval_episodes", "keep_checkpoints", "threads"),
    *("buffer_size", "n_step", "n_critics", "n_tasks", "target_update_interval", "policy_delay"),
    "frame_stack",
}
_AT_MOST = {"threads": 1024, "frame_stack": 1024}  # torch starts all threads, and ends the process if it cannot
_BELOW_ONE = {"adam_betas", "rmsprop_alpha", "momentum"}
_POSITIVE = {
    "rank_timeout",
    "learning_rate",
    "ent_coef_init",
    "clip_range",
    "max_grad_norm",
    "tau",
    "adam_eps",
    "action_limit",
}
_NOT_NEGATIVE = {
    *("ent_coef", "vf_coef", "learning_starts", "utd_ratio", "max_env_restarts", "weight_decay"),
    *("target_policy_noise", "target_noise_clip", "exploration_noise", "random_shift"),
}
_POSITIVE_OR_NONE = {
    *("clip_range_vf", "target_kl", "value_limit", "workers", "slices", "checkpoint_every", "env_timeout"),
    *("eval_max_steps", "sde_sample_freq"),
}
_FRACTIONS = {
    *("gamma", "gae_lambda", "tau", "per_alpha", "per_beta", "exploration_final_eps", "exploration_fraction"),
}
_MAY_BE_INFINITE = {"max_grad_norm"}  # no gradient clipping
# Settings that only some optimisers have.
_OPTIMIZER_SETTINGS = {
    "adam_betas": ("adam", "adamw"),
    "rmsprop_alpha": ("rmsprop",),
    "momentum": ("rmsprop", "sgd"),
}
_SDE_SETTINGS = {"sde_sample_freq", "use_expln", "use_sde_at_warmup", "log_std_init"}
# May be changed in a preset that reproduces published results, because the updates per step stay the same.
_MAY_CHANGE_IN_FIXED = {"n_envs", "overlap"}


def validated(config: Config, preset_batch_size: int | None = None, *, resumed: bool = False) -> Config:
    """`config` with `batch_size` auto resolved to at most `preset_batch_size`, or a UsageError.

    A `resumed` run keeps its recipe, even if its preset has changed since.
    """
    for name, value in config.flat().items():
        _check_range(name, value)
    check_seed(config.run.seed)
    try:
        yaml.safe_dump([config.run.env_kwargs, *config.run.wrappers])
    except (yaml.YAMLError, RecursionError):
        raise UsageError(
            "`env_kwargs` and arguments of `wrappers` are saved to config.yaml, so they must be plain numbers, "
            "strings, lists and dicts; for anything else, pass a factory function as the environment."
        ) from None
    recipe, engine = config.recipe, config.engine
    _check_optimizer(recipe)
    _check_sde(recipe)
    if recipe.network is not None and recipe.encoder != Recipe.encoder:
        raise UsageError(
            f"`network` replaces the built-in encoder, but `encoder` is {recipe.encoder}; remove one of the two."
        )
    if not re.fullmatch(r"auto|cpu|cuda(:\d{1,3})?", engine.device):
        raise UsageError(f"`device` is {engine.device!r}; use auto, cpu, cuda, or cuda:1 for the second GPU.")
    if engine.subproc is False and engine.workers is not None:
        raise UsageError(
            f"--no-subproc steps environments in this process, but --workers {engine.workers} asks for worker "
            "processes; remove one, or use --workers auto."
        )
    if config.run.eval_every is not None and config.run.eval_every < 0:
        raise UsageError("`eval_every` must not be negative; 0 disables evaluation.")
    if engine.eval_workers is not None and engine.eval_workers < 0:
        raise UsageError("`eval_workers` must not be negative; 0 evaluates in the training process.")
    if config.run.target_return is not None and config.run.eval_every == 0:
        raise UsageError("`target_return` needs evaluations, but `eval_every` is 0; set it to a number of steps.")
    if config.run.wandb and find_spec("wandb") is None:
        raise UsageError("--wandb needs the package wandb; run: pip install 'unidle[wandb]'.")
    names = config.run.log_info
    if len(set(names)) < len(names) or any(name in ("", "r", "l", "t") or set(name) & set(',"\n') for name in names):
        raise UsageError(
            f"`log_info` is {in_brief(list(names))}; give different names of numbers in info, without commas, and "
            "other than r, l and t, which are columns of monitor.csv."
        )
    if not config.run.env:
        raise UsageError("No environment given; add --env, for example --env CartPole-v1.")
    if not resumed:
        _check_fixed_preset(config)
    match recipe:
        case OffPolicyRecipe():
            _check_off_policy(recipe)
        case PPORecipe():
            if recipe.share_trunk and recipe.critic_widths != recipe.net_arch:
                raise UsageError(
                    f"`share_trunk` gives actor and critic the same hidden layers, but `net_arch` is {recipe.net_arch} "
                    f"and `critic_arch` is {recipe.critic_widths}; remove one of the two."
                )
            config = dataclasses.replace(config, recipe=_with_batch_size(recipe, preset_batch_size))
    return config


def _check_range(name: str, value: Any) -> None:
    wrong = None
    numbers = value if isinstance(value, tuple) else (value,)
    if any(isinstance(number, int) and abs(number) >= 2**63 for number in numbers) and name != "seed":
        wrong = "it must be below 2**63"
    elif isinstance(value, str) and not _is_utf8(value):
        wrong = "it must be valid UTF-8"
    elif isinstance(value, float) and not math.isfinite(value) and name not in _MAY_BE_INFINITE:
        wrong = "it must be a finite number"
    elif name in _AT_LEAST_ONE and value < 1:
        wrong = "it must be at least 1"
    elif name in _AT_MOST and value > _AT_MOST[name]:
        wrong = f"it must be at most {_AT_MOST[name]:,}"
    elif name in _BELOW_ONE and not all(0 <= number < 1 for number in numbers):
        wrong = "it must be at least 0 and below 1"
    elif name == "adam_betas" and len(value) != 2:
        wrong = "it must be two numbers, such as 0.9,0.999"
    elif name in _POSITIVE and not value > 0:
        wrong = "it must be above 0"
    elif name in _NOT_NEGATIVE and value not in ("auto", None) and value < 0:
        wrong = "it must not be negative"
    elif name in _POSITIVE_OR_NONE and value is not None and not value > 0:
        wrong = f"it must be above 0, or {word_for_none(name)}"
    elif name in _FRACTIONS and not 0 <= value <= 1:
        wrong = "it must be between 0 and 1"
    elif name in ("net_arch", "critic_arch") and any(width < 1 for width in value or ()):
        wrong = "every layer needs at least 1 unit"
    elif name == "discretize" and value is not None and value < 2:
        wrong = "each action needs at least 2 bins"
    if wrong:
        raise UsageError(f"`{name}` is {in_brief(value)}; {wrong}.")


def _check_optimizer(recipe: Recipe) -> None:
    """UsageError for a setting that the optimiser does not have."""
    for name, optimizers in _OPTIMIZER_SETTINGS.items():
        if recipe.optimizer not in optimizers and getattr(recipe, name) != getattr(Recipe, name):
            owners = " and ".join(optimizers)
            raise UsageError(f"`{name}` is a setting of --optimizer {owners}, not of {recipe.optimizer}; remove it.")


def _check_sde(recipe: Recipe) -> None:
    """UsageError for settings of state-dependent exploration without it, or for what it does not go with."""
    given = vars(recipe)
    if not given.get("use_sde", False):
        for name in sorted(_SDE_SETTINGS & given.keys()):
            if given[name] != getattr(type(recipe), name) and (name != "log_std_init" or not recipe.on_policy):
                raise UsageError(
                    f"`{name}` is a setting of state-dependent exploration, which is off; add --use-sde, or remove it."
                )
    elif given.get("action_distribution", "gaussian") != "gaussian":
        raise UsageError(
            f"`use_sde` needs Gaussian actions, but `action_distribution` is {given['action_distribution']}; remove "
            "one of the two."
        )
    elif recipe.n_tasks > 1:
        raise UsageError("`use_sde` supports one task, but `n_tasks` is above 1; remove one of the two.")


def _is_utf8(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:  # a flag of other bytes
        return False
    return True


def _check_fixed_preset(config: Config) -> None:
    """UsageError if the recipe changes a preset that reproduces published results."""
    run, recipe = config.run, config.recipe
    preset = load_preset(run.preset) if run.preset else None
    if preset is None or not preset.fixed or run.allow_recipe_change:
        return
    given = vars(recipe)
    for name, value in vars(preset.recipe).items():
        if name not in _MAY_CHANGE_IN_FIXED and given.get(name) != value:
            raise UsageError(
                f"Preset {preset.name} reproduces published results with `{name}` {value}, not {given.get(name)}; "
                "remove it, or add --allow-recipe-change."
            )


def _check_off_policy(recipe: OffPolicyRecipe) -> None:
    if recipe.batch_size < 1:
        raise UsageError(f"`batch_size` is {recipe.batch_size}; it must be at least 1.")
    ent_coef: Any = vars(recipe).get("ent_coef", "auto")
    if ent_coef != "auto" and not ent_coef > 0:  # SAC stores its logarithm
        raise UsageError(f"`ent_coef` is {ent_coef}; it must be above 0, or auto.")
    if recipe.n_tasks > 1 and (recipe.per or recipe.n_step > 1):
        raise UsageError(
            "Multi-task replay (`n_tasks` > 1) supports neither prioritised replay nor n-step returns; remove `per` "
            "and `n_step`, or set `n_tasks` to 1."
        )
    if recipe.buffer_size < 2 * recipe.total_batch:
        raise UsageError(
            f"`buffer_size` is {recipe.buffer_size:,}, but one iteration collects {recipe.total_batch:,} transitions; "
            "set it to at least twice that."
        )


def check_seed(seed: int) -> None:
    """UsageError if torch or NumPy does not accept `seed`."""
    if not 0 <= seed < 2**63:
        raise UsageError(f"`seed` is {in_brief(seed)}; it must be between 0 and 2**63 - 1.")


def _with_batch_size(recipe: PPORecipe, preset_batch_size: int | None) -> PPORecipe:
    total = recipe.total_batch
    if recipe.batch_size == "auto":
        size = largest_divisor(total, preset_batch_size or PPORecipe.batch_size)  # type: ignore[arg-type]
    else:
        size = recipe.batch_size
        if size < 1 or total % size:
            below, above = nearest_divisors(total, size)
            near = f"{below} or {above}" if below != above else str(below)
            product = f"n_envs × n_steps = {recipe.n_envs} × {recipe.n_steps} = {total}"
            multiple = f"a multiple of {max(1, size) // math.gcd(max(1, size), recipe.n_steps)} as --n-envs"
            if size > total:  # most likely n_envs is missing, as in Isaac Lab's files
                raise UsageError(
                    f"Batch size {size} is larger than a rollout, {product}; use {multiple}, --batch-size {near}, or "
                    "--batch-size auto."
                )
            raise UsageError(
                f"Batch size {size} does not divide {product}; use {near}, --batch-size auto, or {multiple}."
            )
    if size == 1 and recipe.normalize_advantage:
        raise UsageError(
            "Advantages cannot be normalised over a batch of 1; use a larger --batch-size or --no-normalize-advantage."
        )
    if recipe.recurrent != "none" and math.gcd(recipe.n_steps, size) == 1 and recipe.n_steps > 1:
        raise UsageError(
            f"A recurrent policy trains on sequences whose length divides both n_steps and the batch size, but "
            f"{recipe.n_steps} and {size} have no common divisor above 1; choose a batch size that shares one with "
            "n_steps."
        )
    return dataclasses.replace(recipe, batch_size=size)


def divisors(n: int) -> list[int]:
    """All divisors of n, ascending."""
    small = [d for d in range(1, math.isqrt(n) + 1) if n % d == 0]
    return sorted({*small, *(n // d for d in small)})


def largest_divisor(n: int, limit: int) -> int:
    """The largest divisor of n up to `limit`."""
    return max(d for d in divisors(n) if d <= max(1, limit))


def nearest_divisors(n: int, size: int) -> tuple[int, int]:
    """The nearest divisors of n below and above `size` (the same one twice at the ends)."""
    below = largest_divisor(n, size)
    above = next((d for d in divisors(n) if d >= size), below)
    return below, above


def sequence_length(recipe: PPORecipe, longest: int = 64) -> int:
    """Steps per training sequence: the longest that n_steps and batch size allow; 1 if not recurrent."""
    if recipe.recurrent == "none":
        return 1
    assert isinstance(recipe.batch_size, int)
    return largest_divisor(math.gcd(recipe.n_steps, recipe.batch_size), longest)
