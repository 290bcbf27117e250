"""Settings per algorithm: each accepts its own settings and rejects those of others with a clear error."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import gymnasium
import pytest
from gymnasium.vector import AutoresetMode, SyncVectorEnv

import unidle
from unidle.cli.main import run as run_cli
from unidle.config import Config, DQNRecipe, PPORecipe, SACRecipe
from unidle.config.fields import owners_of
from unidle.config.files import load_yaml
from unidle.config.presets import default_preset, load_preset
from unidle.config.resolve import resolve_layers
from unidle.config.settings import RECIPES
from unidle.config.validate import validated
from unidle.errors import UsageError

NON_DEFAULT: dict[str, Any] = {
    "n_epochs": 3,
    "share_trunk": True,
    "recurrent": "gru",
    "recurrent_size": 64,
    "gae_lambda": 0.9,
    "clip_range": 0.1,
    "clip_schedule": "linear",
    "clip_range_vf": 0.2,
    "ent_coef": 0.01,
    "vf_coef": 0.4,
    "target_kl": 0.02,
    "normalize_advantage": False,
    "normalize_obs": True,
    "normalize_reward": True,
    "ortho_init": False,
    "ent_coef_init": 0.5,
    "log_std_init": -1.0,
    "use_sde": True,
    "sde_sample_freq": 4,
    "use_expln": True,
    "use_sde_at_warmup": True,
    "action_distribution": "beta",
    "actor_obs": ("policy",),
    "critic_obs": ("policy", "privileged"),
    "buffer_size": 5000,
    "learning_starts": 7,
    "utd_ratio": 0.5,
    "n_step": 3,
    "random_shift": 4,
    "per": True,
    "per_alpha": 0.5,
    "per_beta": 0.5,
    "tau": 0.01,
    "weight_init": "he",
    "n_tasks": 2,
    "n_critics": 3,
    "action_limit": 2.0,
    "critic_arch": (8,),
    "target_entropy": -1.0,
    "value_limit": 10.0,
    "policy_delay": 3,
    "target_policy_noise": 0.1,
    "target_noise_clip": 0.3,
    "exploration_noise": 0.2,
    "double_dqn": False,
    "dueling": True,
    "target_update_interval": 10,
    "exploration_final_eps": 0.01,
    "exploration_fraction": 0.2,
}
PPO_ONLY = [
    *("n_epochs", "share_trunk", "recurrent", "recurrent_size", "gae_lambda", "clip_range", "clip_schedule"),
    *("clip_range_vf", "vf_coef", "target_kl", "normalize_advantage", "normalize_obs", "normalize_reward"),
    "ortho_init",
    "action_distribution",
    "actor_obs",
    "critic_obs",
]
PPO_AND_SAC = ["ent_coef", "use_sde", "sde_sample_freq", "use_expln", "log_std_init"]
SAC_AND_TD3 = ["n_critics", "action_limit"]
TD3_ONLY = ["policy_delay", "target_policy_noise", "target_noise_clip", "exploration_noise"]
SAC_ONLY = ["weight_init", "ent_coef_init", "target_entropy", "value_limit", "n_tasks", "use_sde_at_warmup"]
DQN_ONLY = ["double_dqn", "dueling", "target_update_interval", "exploration_final_eps", "exploration_fraction"]
OFF_POLICY = [
    *("buffer_size", "learning_starts", "utd_ratio", "n_step", "random_shift", "per", "per_alpha", "per_beta", "tau"),
]
OWNERS = {
    **{name: ["ppo"] for name in PPO_ONLY},
    **{name: ["ppo", "sac"] for name in PPO_AND_SAC},
    "critic_arch": ["ppo", "sac", "td3"],
    **{name: ["sac", "td3", "dqn"] for name in OFF_POLICY},
    **{name: ["sac", "td3"] for name in SAC_AND_TD3},
    **{name: ["td3"] for name in TD3_ONLY},
    **{name: ["sac"] for name in SAC_ONLY},
    **{name: ["dqn"] for name in DQN_ONLY},
}
ONLY_WITH_SDE = {"sde_sample_freq", "use_expln", "log_std_init", "use_sde_at_warmup"}
SHARED = {
    *("algo", "n_envs", "n_steps", "batch_size", "net_arch", "activation", "network", "adam_eps"),
    *("learning_rate", "lr_schedule", "gamma", "max_grad_norm", "discretize", "overlap", "precision"),
    *("optimizer", "adam_betas", "rmsprop_alpha", "momentum", "weight_decay", "action_masks", "encoder"),
}


def make_config(algo: str, **values: Any) -> Config:
    preset = {"ppo": "classic"}.get(algo, algo)
    return load_preset(preset).apply(Config()).with_values({"env": "CartPole-v1", "algo": algo, **values}, "test")


def test_every_recipe_setting_is_shared_or_owned() -> None:
    assert OWNERS.keys() == NON_DEFAULT.keys()
    for algo, recipe in RECIPES.items():
        own = {name for name, owners in OWNERS.items() if algo in owners}
        assert {field.name for field in dataclasses.fields(recipe)} == own | SHARED
    assert {name: owners_of(name) for name in OWNERS} == OWNERS


@pytest.mark.parametrize("algo", ["ppo", "sac", "td3", "dqn"])
@pytest.mark.parametrize("name", NON_DEFAULT)
def test_setting_is_accepted_only_by_its_algorithms(name: str, algo: str) -> None:
    if algo in OWNERS[name]:
        needed = {"use_sde": True} if name in ONLY_WITH_SDE else {}
        config = make_config(algo, **{name: NON_DEFAULT[name]}, **needed)
        assert getattr(validated(config).recipe, name) == NON_DEFAULT[name]
        return
    with pytest.raises(UsageError) as error:
        make_config(algo, **{name: NON_DEFAULT[name]})
    owners = OWNERS[name]
    names = {1: "{}", 2: "{} and {}", 3: "{}, {} and {}"}[len(owners)].format(*map(str.upper, owners))
    assert str(error.value) == (
        f"`{name}` is a setting of {names}, not of {algo.upper()}; remove it, or use --algo {owners[0]}."
    )


def test_changing_algorithm_keeps_changed_values_and_uses_new_defaults() -> None:
    config = Config().with_values({"n_envs": 3, "gamma": 0.9}, "test").with_values({"algo": "sac"}, "test")
    assert config.recipe == SACRecipe(n_envs=3, gamma=0.9)
    with pytest.raises(UsageError, match=r"`n_epochs` is a setting of PPO, not of SAC; remove it"):
        Config(PPORecipe(n_epochs=3)).with_values({"algo": "sac"}, "test")
    with pytest.raises(UsageError, match=r"test: `algo` must be 'ppo' or 'sac' or 'td3' or 'dqn', not 'trpo'"):
        Config().with_values({"algo": "trpo"}, "test")


@pytest.mark.parametrize("algo", ["sac", "dqn"])
@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"buffer_size": 127, "n_envs": 8, "n_steps": 8},
            "`buffer_size` is 127, but one iteration collects 64 transitions; set it to at least twice that.",
        ),
        ({"precision": "bf16"}, "test: `precision` must be 'tf32' or 'fp32', not 'bf16'."),
        ({"batch_size": "auto"}, "test: `batch_size` must be an integer, not 'auto'."),
        ({"batch_size": 0}, "`batch_size` is 0; it must be at least 1."),
        ({"tau": 0}, "`tau` is 0.0; it must be above 0."),
        ({"tau": 1.1}, "`tau` is 1.1; it must be between 0 and 1."),
        ({"per_alpha": 1.1}, "`per_alpha` is 1.1; it must be between 0 and 1."),
        ({"per_beta": -0.1}, "`per_beta` is -0.1; it must be between 0 and 1."),
        ({"utd_ratio": -1}, "`utd_ratio` is -1.0; it must not be negative."),
        ({"utd_ratio": "inf"}, "`utd_ratio` is inf; it must be a finite number."),
        ({"learning_starts": -1}, "`learning_starts` is -1; it must not be negative."),
        ({"n_step": 0}, "`n_step` is 0; it must be at least 1."),
    ],
)
def test_invalid_off_policy_setting_is_rejected(algo: str, values: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError) as error:
        validated(make_config(algo, **values))
    assert str(error.value) == message.format(algo=algo)


@pytest.mark.parametrize(
    ("algo", "values", "message"),
    [
        ("sac", {"ent_coef": 0}, "`ent_coef` is 0.0; it must be above 0, or auto."),
        ("sac", {"ent_coef": -0.5}, "`ent_coef` is -0.5; it must not be negative."),
        ("sac", {"n_critics": 0}, "`n_critics` is 0; it must be at least 1."),
        ("sac", {"target_entropy": "inf"}, "`target_entropy` is inf; it must be a finite number."),
        ("dqn", {"target_update_interval": 0}, "`target_update_interval` is 0; it must be at least 1."),
        ("dqn", {"exploration_final_eps": 1.5}, "`exploration_final_eps` is 1.5; it must be between 0 and 1."),
        ("dqn", {"exploration_fraction": -0.1}, "`exploration_fraction` is -0.1; it must be between 0 and 1."),
    ],
)
def test_invalid_algorithm_specific_setting_is_rejected(algo: str, values: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError) as error:
        validated(make_config(algo, **values))
    assert str(error.value) == message


def test_critic_layers_need_at_least_one_unit() -> None:
    with pytest.raises(UsageError, match=r"`critic_arch` is \(8, 0\); every layer needs at least 1 unit"):
        validated(make_config("sac", critic_arch=(8, 0)))


@pytest.mark.parametrize(
    ("algo", "values"),
    [
        ("sac", {"buffer_size": 128, "n_envs": 8, "n_steps": 8}),
        ("sac", {"ent_coef": "auto"}),
        ("sac", {"learning_starts": 0}),
        ("sac", {"batch_size": 3}),  # need not divide anything
        ("dqn", {"exploration_fraction": 0, "exploration_final_eps": 0}),
        ("dqn", {"tau": 1.0}),
        ("dqn", {"max_grad_norm": math.inf}),
        ("dqn", {"utd_ratio": 0}),
    ],
)
def test_boundary_values_are_accepted(algo: str, values: dict[str, Any]) -> None:
    config = make_config(algo, **values)
    assert validated(config) == config


@pytest.mark.parametrize("algo", ["sac", "dqn"])
def test_presets_are_valid_and_survive_yaml(algo: str, tmp_path: Path) -> None:
    config = validated(make_config(algo))
    (tmp_path / "config.yaml").write_text(config.to_yaml())
    assert load_yaml(tmp_path / "config.yaml") == config


# -- default preset ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("has_gpu", [False, True])
@pytest.mark.parametrize("algo", ["sac", "dqn"])
def test_preset_of_algorithm_is_used_by_default_with_note(algo: str, has_gpu: bool) -> None:
    assert default_preset("unidle/CartPole-v1", algo) == algo
    layers = resolve_layers(None, None, has_gpu, algo=algo)
    assert layers.config.recipe.algo == algo
    assert layers.config.run.preset == algo
    assert layers.notes == [
        f"No --preset given; using `{algo}` because the algorithm is {algo}. `unidle presets` lists them all."
    ]


def test_explicit_ppo_has_same_default_preset() -> None:
    assert default_preset("CartPole-v1", "ppo") == default_preset("CartPole-v1")


def test_algorithm_in_config_file_selects_its_preset(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("recipe: {algo: sac, n_envs: 2}\n")
    layers = resolve_layers(None, tmp_path / "mine.yaml", False)
    assert layers.config.recipe.algo == "sac"
    assert layers.config.run.preset == "sac"
    assert layers.config.recipe.n_envs == 2


TINY = ["--timesteps", "64", "--n-envs", "2", "--n-steps", "8", "--batch-size", "8", "--net-arch", "8"]


def test_command_line_trains_with_preset_of_algorithm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    flags = ["--learning-starts", "16", "--no-subproc", "--eval-every", "0", "--no-tensorboard", "--run-name", "r"]
    assert run_cli(["train", "--env", "Pendulum-v1", "--algo", "sac", *TINY, *flags]) == 0
    output = " ".join(capsys.readouterr().err.split())
    assert "using `sac` because the algorithm is sac" in output
    recipe = unidle.load(tmp_path / "runs/r").config.recipe
    assert (recipe.algo, recipe.activation, recipe.learning_starts) == ("sac", "relu", 16)
    assert math.isinf(recipe.max_grad_norm)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--algo", "sac", "--n-epochs", "3"], "`n_epochs` is a setting of PPO, not of SAC; remove it"),
        (["--algo", "dqn", "--normalize-obs"], "`normalize_obs` is a setting of PPO, not of DQN"),
        (["--preset", "classic", "--tau", "0.1"], "`tau` is a setting of SAC, TD3 and DQN, not of PPO"),
        (["--algo", "dqn", "--n-critics", "3"], "`n_critics` is a setting of SAC and TD3, not of DQN"),
        (["--algo", "sac", "--buffer-size", "20"], "`buffer_size` is 20, but one iteration collects 64 transitions"),
        (
            ["--algo", "sac", "--preset", "max-gpu"],
            "Preset max-gpu is for PPO, but the algorithm is SAC; remove",
        ),
    ],
)
def test_command_line_rejects_setting_of_other_algorithm(
    flags: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run_cli(["train", "--env", "CartPole-v1", *flags]) == 2
    assert message in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--n-parallel-envs", "0"], "`n_envs` is 0; it must be at least 1."),
        (
            ["--n-parallel-envs", "16", "--overlap", "off", "--gamma", "0.9"],
            "results with `gamma` 0.99, not 0.9",
        ),
        (["--n_parallel_envs=many"], "`n_envs` must be an integer, not 'many'"),
    ],
)
def test_command_line_rejects_recipe_change_of_fixed_preset(
    flags: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run_cli(["train", "--preset", "mt10-2m", "--env", "Pendulum-v1", *flags]) == 2
    assert message in " ".join(capsys.readouterr().err.split())


def test_resume_rejects_recipe_changes(tmp_path: Path) -> None:
    run = unidle.train(
        "CartPole-v1",
        algo="dqn",
        runs_dir=str(tmp_path),
        timesteps=32,
        n_envs=2,
        n_steps=8,
        net_arch=(4,),
        eval_every=0,
        subproc=False,
        tensorboard=False,
        quiet=True,
    )
    for setting in ({"buffer_size": 5000}, {"tau": 0.5}, {"algo": "sac"}):
        with pytest.raises(UsageError, match=f"keeps its recipe, but {next(iter(setting))} would change it"):
            unidle.resume(run.path, quiet=True, **setting)


def five_cartpoles() -> SyncVectorEnv:
    """A vector environment factory whose number of environments is not the preset's."""
    return SyncVectorEnv([lambda: gymnasium.make("CartPole-v1")] * 5, autoreset_mode=AutoresetMode.SAME_STEP)


def test_vector_env_factory_keeps_default_batch_size(tmp_path: Path) -> None:
    run = unidle.train(
        five_cartpoles,
        algo="dqn",
        runs_dir=str(tmp_path),
        timesteps=80,
        n_steps=8,
        net_arch=(4,),
        learning_starts=40,
        eval_every=0,
        tensorboard=False,
        quiet=True,
    )
    assert run.config.recipe.n_envs == 5
    assert run.config.recipe.batch_size == DQNRecipe.batch_size


@pytest.mark.parametrize(("ratio", "text"), [(1.0, "1 update per step"), (0.25, "0.25 updates per step")])
def test_update_schedule_counts_updates(ratio: float, text: str) -> None:
    assert SACRecipe(utd_ratio=ratio).update_schedule == f"{text}, replay buffer of 1,000,000 transitions"
