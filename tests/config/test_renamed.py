"""Former names of settings, and config files from before each algorithm had its own settings."""

from __future__ import annotations

from pathlib import Path

import pytest

import unidle
from unidle.cli.flags import normalise_flags, replace_renamed_flags
from unidle.config import Config, DQNRecipe, PPORecipe, SACRecipe, recipe_for
from unidle.config.fields import owners_of, section_of
from unidle.config.files import load_yaml
from unidle.config.renamed import ALIASES, RENAMED, with_current_names, without_aliases
from unidle.config.resolve import resolve_layers
from unidle.config.settings import RECIPES
from unidle.errors import UsageError

SHORT = {"timesteps": 32, "n_envs": 2, "n_steps": 8, "eval_every": 0, "subproc": False, "tensorboard": False}


def old_file(recipe: str) -> str:
    """A config file of an earlier version, with the settings of every algorithm."""
    shared = "n_epochs: 10, ent_coef: 0.0, log_std_init: 0.0, recurrent: none, buffer_size: 500, adam_eps: 1.0e-08"
    renamed = "temperature: auto, prioritised: true, priority_alpha: 0.5, double: true"
    return f"recipe: {{{recipe}, {shared}, {renamed}}}\nrun: {{env: A-v0}}\n"


def test_renamed_maps_former_names_to_existing_settings() -> None:
    assert [name for name in RENAMED if section_of(name)] == []
    assert [name for name in RENAMED.values() if not section_of(name)] == []


@pytest.mark.parametrize("alias", ALIASES)
def test_alias_is_a_flag_and_a_keyword(alias: str) -> None:
    name = ALIASES[alias]
    assert section_of(name)
    assert without_aliases({alias: 3, "seed": 2}) == {name: 3, "seed": 2}
    alias_flag, flag = (f"--{each.replace('_', '-')}" for each in (alias, name))
    assert normalise_flags([alias_flag, "3"]) == normalise_flags([flag, "3"])
    assert normalise_flags([alias_flag, "3"])[0] == flag
    with pytest.raises(UsageError, match=f"`{alias}` is another name of `{name}`, and both are given"):
        without_aliases({name: 1, alias: 2})


def test_total_timesteps_is_understood_in_python(tmp_path: Path) -> None:
    settings = {name: value for name, value in SHORT.items() if name != "timesteps"} | {"batch_size": 16}
    run = unidle.train(
        "CartPole-v1",
        preset="classic",
        total_timesteps=16,
        runs_dir=str(tmp_path),
        quiet=True,
        **settings,
    )
    assert run.summary()["timesteps"] == 16


@pytest.mark.parametrize("name", RENAMED)
def test_former_name_is_accepted_with_note(name: str) -> None:
    assert with_current_names({name: 1, "seed": 2}) == (
        {RENAMED[name]: 1, "seed": 2},
        [f"`{name}` is now `{RENAMED[name]}`; using it."],
    )
    flag, current = name.replace("_", "-"), RENAMED[name].replace("_", "-")
    _, notes = with_current_names({name: 1})
    assert replace_renamed_flags([f"--{flag}", "1"]) == ([f"--{current}", "1"], notes)
    assert replace_renamed_flags([f"--no-{flag}"]) == ([f"--no-{current}"], notes)
    assert replace_renamed_flags([f"--{name}=1"]) == ([f"--{current}=1"], notes)


def test_current_name_overrides_former_name() -> None:
    assert with_current_names({"net_arch": (8,), "network_arch": (4,)})[0] == {"net_arch": (8,)}


def test_config_file_accepts_former_names(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(
        "recipe: {algo: sac, network_arch: [8], temperature: 0.2, updates_per_step: 2}\n"
    )
    layers = resolve_layers(None, tmp_path / "mine.yaml", has_gpu=False)
    assert layers.config.recipe == SACRecipe(net_arch=(8,), ent_coef=0.2, utd_ratio=2.0)
    assert layers.notes[:3] == [
        "`network_arch` is now `net_arch`; using it.",
        "`temperature` is now `ent_coef`; using it.",
        "`updates_per_step` is now `utd_ratio`; using it.",
    ]


def test_train_accepts_former_names(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = unidle.train("CartPole-v1", algo="dqn", network_arch=(4,), runs_dir=str(tmp_path), quiet=True, **SHORT)
    assert run.config.recipe.net_arch == (4,)
    assert "`network_arch` is now `net_arch`; using it." in capsys.readouterr().err


@pytest.mark.parametrize(
    ("recipe", "expected"),
    [
        ("algo: sac, n_envs: 3", SACRecipe(n_envs=3, buffer_size=500, per=True, per_alpha=0.5)),
        ("algo: dqn, n_envs: 3", DQNRecipe(n_envs=3, buffer_size=500, per=True, per_alpha=0.5, double_dqn=True)),
        ("algo: ppo, n_envs: 3", PPORecipe(n_envs=3)),  # PPO always used an Adam epsilon of 1e-5
    ],
)
def test_old_file_keeps_only_settings_of_its_algorithm(recipe: str, expected: PPORecipe, tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(old_file(recipe))
    assert load_yaml(tmp_path / "config.yaml").recipe == expected
    assert resolve_layers(None, tmp_path / "config.yaml", has_gpu=False).config.recipe.algo == expected.algo


@pytest.mark.parametrize("algo", RECIPES)
def test_current_file_is_read_unchanged(algo: str, tmp_path: Path) -> None:
    config = Config(recipe_for(algo, adam_eps=1e-3))
    (tmp_path / "config.yaml").write_text(config.to_yaml())
    assert load_yaml(tmp_path / "config.yaml") == config
    assert all(algo in owners_of(name) for name in vars(config.recipe))
