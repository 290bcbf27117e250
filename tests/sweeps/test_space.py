"""Search spaces: what they suggest, and mistakes in them, found before anything trains."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import optuna
import pytest
from hypothesis import given
from hypothesis import strategies as st

from unidle.config import Config, recipe_for
from unidle.config.settings import RECIPES
from unidle.errors import UsageError
from unidle.sweeps.space import read_space, trial_config


def job(algo: str = "ppo", **recipe: Any) -> Config:
    config = Config(recipe_for(algo, **recipe))
    return config.with_run(env="CartPole-v1")


def suggestions(space: dict[str, Any] | Path, base: Config, n: int = 40) -> list[dict[str, Any]]:
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0))
    read = read_space(space, base)
    return [read.suggest(study.ask()) for _ in range(n)]


@pytest.mark.parametrize("algo", RECIPES)
@pytest.mark.parametrize("n_envs", [1, 8, 32])
def test_default_spaces_give_valid_trials(algo: str, n_envs: int) -> None:
    base = job(algo, n_envs=n_envs)
    space = read_space(None, base)
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0))
    for _ in range(100):
        values = space.suggest(study.ask())
        assert trial_config(base, values).recipe.gamma == values["gamma"]


def test_default_space_leaves_out_settings_that_were_given() -> None:
    assert "gamma" in read_space(None, job()).plain
    assert "gamma" not in read_space(None, job(), fixed=["gamma", "seed"]).plain


def test_rollouts_of_many_environments_are_not_searched() -> None:
    assert "n_steps" in read_space(None, job(n_envs=8)).plain
    assert "n_steps" not in read_space(None, job(n_envs=16)).plain


def test_default_rollouts_leave_ten_iterations() -> None:
    base = job(n_envs=8)
    assert read_space(None, base).plain["n_steps"]["high"] == 4096
    assert read_space(None, base.with_run(timesteps=50_000)).plain["n_steps"]["high"] == 512  # 12 iterations
    assert "n_steps" not in read_space(None, base.with_run(timesteps=2000)).plain


def test_space_of_large_batches_searches_their_total_size() -> None:
    base = job(n_envs=64)
    found = [trial_config(base, values).recipe for values in suggestions(Path("ppo-large-batch"), base)]
    assert {recipe.n_envs for recipe in found} == {20, 24, 28, 32, 36, 40}
    sizes = {round(recipe.total_batch / 16384) for recipe in found}
    assert sizes == {2, 3, 4, 5, 6}
    assert all(abs(recipe.total_batch / 16384 % 1 - 0.5) > 0.49 for recipe in found)  # but for whole rollouts
    assert all(8 <= recipe.n_epochs <= 32 for recipe in found)
    kept = read_space(Path("ppo-large-batch"), base, fixed=["n_steps", "n_envs"]).plain
    assert not {"total_batch", "n_envs"} & kept.keys()


@given(st.integers(1, 40), st.integers(2, 300), st.integers(2, 3000))
def test_batch_size_of_a_trial_divides_its_rollout(n_envs: int, n_steps: int, batch_size: int) -> None:
    base = job(n_envs=n_envs, n_steps=n_steps, batch_size=n_envs * n_steps)
    recipe = trial_config(base, {"batch_size": batch_size}).recipe
    assert isinstance(recipe.batch_size, int)
    assert recipe.total_batch % recipe.batch_size == 0
    assert recipe.batch_size > 1


def test_ranges_have_the_types_and_ends_of_their_settings() -> None:
    space = {
        "learning_rate": {"low": "1e-4", "high": 0.01, "log": True},
        "gamma": {"low": 0.9, "high": 0.999, "log": True, "one_minus": True},
        "n_steps": {"low": 16, "high": 64, "power_of_2": True},
        "n_epochs": {"low": 2, "high": 9, "step": 3},
        "net_arch": [[32], [64, 64]],
        "target_kl": [None, 0.1],
    }
    found = suggestions(space, job())
    assert all(1e-4 <= each["learning_rate"] <= 0.01 for each in found)
    assert all(0.9 <= each["gamma"] <= 0.999 + 1e-12 for each in found)
    assert sum(each["gamma"] > 0.99 for each in found) > 10  # evenly in log(1 − γ)
    assert {each["n_steps"] for each in found} == {16, 32, 64}
    assert {each["n_epochs"] for each in found} == {2, 5, 8}
    assert {each["net_arch"] for each in found} == {(32,), (64, 64)}
    assert {each["target_kl"] for each in found} == {None, 0.1}


@pytest.mark.parametrize(
    ("space", "message"),
    [
        ({"learning_rte": [0.1]}, "`space`: there is no setting `learning_rte`; did you mean `learning_rate`?"),
        ({"tau": [0.1]}, "`tau` is a setting of SAC, TD3 and DQN, not of PPO; remove it, or use --algo sac."),
        ({"seed": [1, 2]}, "`seed` cannot be searched; a sweep searches settings that affect learning."),
        ({"gamma": 0.9}, "`gamma` is 0.9; give a range, {low: 0.1, high: 0.4}, or a list of choices."),
        ({"gamma": []}, "`gamma` needs one or more different choices."),
        ({"gamma": [0.9, "0.9"]}, "`gamma` needs one or more different choices."),
        ({"gamma": ["high"]}, "`gamma` must be a number, not 'high'."),
        ({"gamma": {"low": 0.9}}, "`gamma` needs both `low` and `high`."),
        ({"gamma": {"low": 0.9, "hihg": 1}}, "a range has no `hihg` (`gamma`); use low, high, step"),
        ({"gamma": {"low": 0.9, "high": 0.8}}, "`gamma` goes from 0.9 to 0.8; `low` must be below `high`."),
        ({"gamma": {"low": 0.9, "high": 1.5}}, "`gamma` is 1.5; it must be between 0 and 1."),
        ({"gamma": {"low": 0.9, "high": 1, "log": "yes"}}, "`log` of `gamma` must be true or false."),
        ({"gamma": {"low": 0.9, "high": 1, "log": True, "one_minus": True}}, "and below 1 if `log` is true"),
        ({"ent_coef": {"low": 0, "high": 1, "log": True}}, "with `log`, `low` must be above 0"),
        ({"n_steps": {"low": 16, "high": 48, "power_of_2": True}}, "both ends must be powers of 2"),
        ({"n_epochs": {"low": 1, "high": 9, "step": 0}}, "`step` of `n_epochs` is 0; it must be an integer"),
        ({"net_arch": {"low": 16, "high": 48}}, "`net_arch` must be a list of integers"),
        ({"activation": ["tanh", "sigmoid"]}, "`activation` must be 'tanh' or 'relu'"),
        ({"sde_sample_freq": [4]}, "add --use-sde, or remove it"),
        ({}, "leaves nothing to search"),
        ({"total_batch": [64, 128], "n_steps": [8, 16]}, "search it or `n_steps`, not both"),
    ],
)
def test_mistakes_in_a_space_get_one_sentence(space: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=re.escape(message)):
        read_space(space, job())


def test_combination_that_is_never_valid_is_refused() -> None:
    space = {"use_sde": [True], "action_distribution": ["gaussian", "beta"]}
    with pytest.raises(UsageError, match="`use_sde` needs Gaussian actions"):
        read_space(space, job())


def test_setting_cannot_be_both_given_and_searched(tmp_path: Path) -> None:
    file = tmp_path / "space.yaml"
    file.write_text("gamma: [0.9, 0.99]\n")
    assert read_space(file, job()).plain == {"gamma": [0.9, 0.99]}
    with pytest.raises(UsageError, match="`gamma` is searched, but also given as a setting; remove one of the two"):
        read_space(file, job(), fixed=["gamma"])
