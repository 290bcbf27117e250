"""Validation of settings."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unidle.config import PPORecipe
from unidle.config.config import Config
from unidle.config.validate import (
    divisors,
    largest_divisor,
    nearest_divisors,
    sequence_length,
    validated,
)
from unidle.errors import UsageError

sizes = st.integers(1, 5_000)
no_deadline = settings(deadline=None)  # the machine is shared


NO_WORKERS = (
    "--no-subproc steps environments in this process, but --workers 8 asks for worker "
    "processes; remove one, or use --workers auto."
)


def config_with(**values: Any) -> Config:
    return Config().with_values({"env": "CartPole-v1", **values}, "test")


def test_default_config_is_valid_and_unchanged() -> None:
    assert validated(config_with()) == config_with()


@pytest.mark.parametrize(
    ("values", "message"),
    [
        *(
            ({name: 0}, f"`{name}` is 0; it must be at least 1.")
            for name in (
                *("n_envs", "n_steps", "n_epochs", "recurrent_size"),
                *("timesteps", "eval_episodes", "keep_checkpoints", "threads"),
            )
        ),
        *(
            ({name: 0}, f"`{name}` is 0.0; it must be above 0.")
            for name in ("learning_rate", "clip_range", "max_grad_norm")
        ),
        ({"ent_coef": -0.1}, "`ent_coef` is -0.1; it must not be negative."),
        ({"vf_coef": -1}, "`vf_coef` is -1.0; it must not be negative."),
        ({"max_env_restarts": -1}, "`max_env_restarts` is -1; it must not be negative."),
        ({"threads": 1025}, "`threads` is 1025; it must be at most 1,024."),
        ({"timesteps": 2**63}, "`timesteps` is 9223372036854775808; it must be below 2**63."),
        ({"timesteps": 16**5000}, "`timesteps` is a number with thousands of digits; it must be below 2**63."),
        ({"net_arch": (64, 2**63)}, "`net_arch` is (64, 9223372036854775808); it must be below 2**63."),
        ({"run_name": "\udcff"}, "`run_name` is '\\udcff'; it must be valid UTF-8."),
        ({"seed": -1}, "`seed` is -1; it must be between 0 and 2**63 - 1."),
        ({"seed": 2**63}, "`seed` is 9223372036854775808; it must be between 0 and 2**63 - 1."),
        ({"subproc": False, "workers": 8}, NO_WORKERS),
        *(
            ({name: "inf"}, f"`{name}` is inf; it must be a finite number.")
            for name in (
                *("learning_rate", "clip_range", "clip_range_vf", "ent_coef", "vf_coef", "target_kl", "log_std_init"),
                *("gamma", "gae_lambda", "target_return"),
            )
        ),
        ({"log_std_init": "-inf"}, "`log_std_init` is -inf; it must be a finite number."),
        ({"clip_range_vf": 0}, "`clip_range_vf` is 0.0; it must be above 0, or none."),
        ({"sde_sample_freq": -1, "use_sde": True}, "`sde_sample_freq` is -1; it must be above 0, or none."),
        (
            {"sde_sample_freq": 4},
            "`sde_sample_freq` is a setting of state-dependent exploration, which is off; add --use-sde, or remove it.",
        ),
        (
            {"algo": "sac", "log_std_init": -2},
            "`log_std_init` is a setting of state-dependent exploration, which is off; add --use-sde, or remove it.",
        ),
        (
            {"use_sde": True, "action_distribution": "beta"},
            "`use_sde` needs Gaussian actions, but `action_distribution` is beta; remove one of the two.",
        ),
        (
            {"algo": "sac", "use_sde": True, "n_tasks": 10},
            "`use_sde` supports one task, but `n_tasks` is above 1; remove one of the two.",
        ),
        ({"target_kl": -1}, "`target_kl` is -1.0; it must be above 0, or none."),
        ({"workers": 0}, "`workers` is 0; it must be above 0, or auto."),
        ({"checkpoint_every": 0}, "`checkpoint_every` is 0; it must be above 0, or auto."),
        ({"gamma": 1.01}, "`gamma` is 1.01; it must be between 0 and 1."),
        ({"gae_lambda": -0.5}, "`gae_lambda` is -0.5; it must be between 0 and 1."),
        ({"discretize": 1}, "`discretize` is 1; each action needs at least 2 bins."),
        ({"adam_betas": [0.9, 1]}, "`adam_betas` is (0.9, 1.0); it must be at least 0 and below 1."),
        ({"adam_betas": [0.9]}, "`adam_betas` is (0.9,); it must be two numbers, such as 0.9,0.999."),
        ({"weight_decay": -1}, "`weight_decay` is -1.0; it must not be negative."),
        (
            {"optimizer": "rmsprop", "momentum": 1},
            "`momentum` is 1.0; it must be at least 0 and below 1.",
        ),
        (
            {"optimizer": "sgd", "adam_betas": [0.5, 0.9]},
            "`adam_betas` is a setting of --optimizer adam and adamw, not of sgd; remove it.",
        ),
        ({"momentum": 0.9}, "`momentum` is a setting of --optimizer rmsprop and sgd, not of adam; remove it."),
        (
            {"optimizer": "sgd", "rmsprop_alpha": 0.9},
            "`rmsprop_alpha` is a setting of --optimizer rmsprop, not of sgd; remove it.",
        ),
        (
            {"critic_arch": [256, 256], "share_trunk": True},
            "`share_trunk` gives actor and critic the same hidden layers, but `net_arch` is (64, 64) and `critic_arch` "
            "is (256, 256); remove one of the two.",
        ),
        (
            {"net_arch": [64, 0]},
            "`net_arch` is (64, 0); every layer needs at least 1 unit.",
        ),
        ({"frame_stack": 10_000_000}, "`frame_stack` is 10000000; it must be at most 1,024."),
        ({"eval_every": -1}, "`eval_every` must not be negative; 0 disables evaluation."),
        (
            {"target_return": 100, "eval_every": 0},
            "`target_return` needs evaluations, but `eval_every` is 0; set it to a number of steps.",
        ),
        (
            {"env": ""},
            "No environment given; add --env, for example --env CartPole-v1.",
        ),
        (
            {"n_envs": 3, "n_steps": 100, "batch_size": 64},
            "Batch size 64 does not divide n_envs × n_steps = 3 × 100 = 300; use 60 or 75, --batch-size auto, or a "
            "multiple of 16 as --n-envs.",
        ),
        (
            {"n_steps": 100, "batch_size": 128},
            "Batch size 128 is larger than a rollout, n_envs × n_steps = 1 × 100 = 100; use a multiple of 32 as "
            "--n-envs, --batch-size 100, or --batch-size auto.",
        ),
        (
            {"n_steps": 100, "batch_size": 0},
            "Batch size 0 does not divide n_envs × n_steps = 1 × 100 = 100; use 1, --batch-size auto, or a "
            "multiple of 1 as --n-envs.",
        ),
        (
            {"batch_size": 1},
            "Advantages cannot be normalised over a batch of 1; use a larger --batch-size or --no-normalize-advantage.",
        ),
        (
            {"recurrent": "gru", "n_envs": 9, "n_steps": 16, "batch_size": 9},
            "A recurrent policy trains on sequences whose length divides both n_steps and the batch size, but 16 and 9 "
            "have no common divisor above 1; choose a batch size that shares one with n_steps.",
        ),
    ],
)
def test_invalid_setting_is_rejected(values: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError) as error:
        validated(config_with(**values))
    assert str(error.value) == message


@pytest.mark.parametrize(
    "values",
    [
        {"ent_coef": 0, "vf_coef": 0, "seed": 0},
        {"seed": 2**63 - 1},
        {"max_grad_norm": "inf"},
        {"subproc": False, "workers": None},
        {"subproc": True, "workers": 8},
        {"gamma": 0, "gae_lambda": 1},
        {"clip_range_vf": None, "target_kl": None, "workers": None, "checkpoint_every": None},
        {"net_arch": []},
        {"critic_arch": []},
        {"optimizer": "sgd", "momentum": 0, "weight_decay": 0},
        {"adam_betas": [0, 0]},
        {"critic_arch": [64, 64], "share_trunk": True},
        {"discretize": 2},
        {"eval_every": 0},
        {"target_return": 100},
        {"batch_size": 1, "normalize_advantage": False},
        {"recurrent": "gru", "n_envs": 9, "n_steps": 1, "batch_size": 9},
        {"log_info": ("rl", "lt")},
    ],
)
def test_boundary_values_are_accepted(values: dict[str, Any]) -> None:
    assert validated(config_with(**values)) == config_with(**values)


@no_deadline
@given(n_envs=st.integers(1, 64), n_steps=st.integers(1, 512), limit=st.integers(2, 4096))
def test_auto_batch_size_is_largest_divisor_within_limit(n_envs: int, n_steps: int, limit: int) -> None:
    config = config_with(n_envs=n_envs, n_steps=n_steps, batch_size="auto", normalize_advantage=False)
    size = validated(config, limit).recipe.batch_size
    assert isinstance(size, int)
    total = n_envs * n_steps
    assert total % size == 0
    assert size <= limit
    assert not any(total % larger == 0 for larger in range(size + 1, min(limit, total) + 1))


def test_auto_batch_size_without_preset_is_limited_by_default() -> None:
    config = config_with(n_envs=3, n_steps=100, batch_size="auto")
    assert validated(config).recipe.batch_size == 60


def test_auto_batch_size_of_one_is_rejected() -> None:
    with pytest.raises(UsageError, match="over a batch of 1"):
        validated(config_with(n_steps=2053, batch_size="auto"))  # a prime


@no_deadline
@given(n=st.integers(1, 3_000))
def test_divisors_are_complete_and_sorted(n: int) -> None:
    assert divisors(n) == [d for d in range(1, n + 1) if n % d == 0]


@no_deadline
@given(n=sizes, limit=st.integers(-5, 6_000))
def test_largest_divisor_is_maximal_within_limit(n: int, limit: int) -> None:
    result = largest_divisor(n, limit)
    assert n % result == 0
    assert result <= max(1, limit)
    assert not any(n % d == 0 for d in range(result + 1, min(limit, n) + 1))


@no_deadline
@given(n=sizes, size=st.integers(1, 6_000))
def test_nearest_divisors_enclose_size(n: int, size: int) -> None:
    below, above = nearest_divisors(n, size)
    assert n % below == 0
    assert n % above == 0
    assert below <= size
    if size > n:
        assert below == above == n
    else:
        assert above >= size
        assert not any(n % d == 0 for d in range(below + 1, above))
        assert (below == above) == (n % size == 0)


@no_deadline
@given(n_envs=st.integers(1, 32), n_steps=st.integers(1, 512), size=st.integers(1, 4096))
def test_suggested_batch_sizes_are_valid(n_envs: int, n_steps: int, size: int) -> None:
    for suggestion in nearest_divisors(n_envs * n_steps, size):
        config = config_with(n_envs=n_envs, n_steps=n_steps, batch_size=suggestion, normalize_advantage=False)
        assert validated(config).recipe.batch_size == suggestion


@pytest.mark.parametrize(
    ("n_steps", "batch_size", "expected"),
    [(128, 256, 64), (128, 32, 32), (48, 96, 48), (100, 75, 25), (1, 8, 1)],
)
def test_sequence_length_divides_n_steps_and_batch_size(n_steps: int, batch_size: int, expected: int) -> None:
    recipe = PPORecipe(n_envs=24, n_steps=n_steps, batch_size=batch_size, recurrent="lstm")
    assert sequence_length(recipe) == expected


def test_sequence_length_without_recurrence_is_one() -> None:
    assert sequence_length(PPORecipe(n_steps=128, batch_size=64)) == 1


def test_env_kwargs_that_cannot_be_saved_are_rejected() -> None:
    config = Config().with_values({"env": "CartPole-v1"}, "flags")
    plain = dataclasses.replace(config, run=dataclasses.replace(config.run, env_kwargs={"size": [1, 2.5], "on": True}))
    assert validated(plain).run.env_kwargs == {"size": [1, 2.5], "on": True}
    for value in (np.float32(2), print):
        run = dataclasses.replace(config.run, env_kwargs={"limit": value})
        with pytest.raises(UsageError, match=r"`env_kwargs` .* are saved to .*, so they must be plain"):
            validated(dataclasses.replace(config, run=run))
