"""Files of Stable-Baselines3 and rl-zoo for SAC, TD3 and DQN, and which algorithm a file is for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from unidle.config.config import Config
from unidle.config.resolve import resolve_layers
from unidle.config.validate import validated
from unidle.errors import UsageError

OTHERS = ["a2c", "ddpg", "trpo", "tqc", "qrdqn", "ars", "her", "crossq", "sb3_a2c_cfg"]


def resolve(folder: Path, name: str, text: str, algo: str | None = None) -> Config:
    """The validated settings of a file."""
    path = folder / name
    path.write_text(text, encoding="utf-8")
    layers = resolve_layers(None, path, has_gpu=False, env="A-v0", algo=algo)
    return validated(layers.with_flags({"env": "A-v0"}), layers.preset_batch_size)


def values(folder: Path, name: str, text: str) -> dict[str, Any]:
    return resolve(folder, name, f"A-v0:\n  policy: MlpPolicy\n  {text}\n").flat()


def test_defaults_of_dqn_are_stable_baselines3s(tmp_path: Path) -> None:
    found = values(tmp_path, "dqn.yml", "n_timesteps: 1e5")
    expected = {
        "algo": "dqn",
        "n_envs": 1,
        "n_steps": 4,
        "utd_ratio": 0.25,
        "learning_rate": 1e-4,
        "batch_size": 32,
        "buffer_size": 1_000_000,
        "learning_starts": 100,
        "tau": 1.0,
        "target_update_interval": 2500,
        "exploration_fraction": 0.1,
        "exploration_final_eps": 0.05,
        "double_dqn": False,
        "dueling": False,
        "net_arch": (64, 64),
        "max_grad_norm": 10.0,
        "n_step": 1,
        "timesteps": 100_000,
    }
    assert {name: found[name] for name in expected} == expected


@pytest.mark.parametrize(
    ("algo", "expected"),
    [
        ("sac", {"learning_rate": 3e-4, "batch_size": 256, "tau": 0.005, "ent_coef": "auto", "net_arch": (256, 256)}),
        ("td3", {"learning_rate": 1e-3, "batch_size": 256, "tau": 0.005, "policy_delay": 2, "exploration_noise": 0.0}),
    ],
)
def test_defaults_of_sac_and_td3_are_stable_baselines3s(tmp_path: Path, algo: str, expected: dict[str, Any]) -> None:
    expected |= {"n_envs": 1, "n_steps": 1, "utd_ratio": 1.0, "learning_starts": 100, "buffer_size": 1_000_000}
    found = values(tmp_path, f"{algo}.yml", "n_timesteps: 1e5")
    assert found["algo"] == algo
    assert {name: found[name] for name in expected} == expected


@pytest.mark.parametrize(
    ("words", "n_steps", "utd_ratio", "target_update_interval"),
    [
        ("{train_freq: 256, gradient_steps: 128, target_update_interval: 10}", 256, 0.5, 128),
        ("{train_freq: 4, gradient_steps: -1, target_update_interval: 250}", 4, 1.0, 250),
        ("{train_freq: 16, gradient_steps: 8, target_update_interval: 600}", 16, 0.5, 300),
        ("{train_freq: 4, gradient_steps: 1, target_update_interval: 1000}", 4, 0.25, 250),
        ("{train_freq: [8, step], gradient_steps: 2, n_envs: 2, target_update_interval: 64}", 8, 0.125, 8),
    ],
)
def test_schedule_of_dqn_is_converted(
    tmp_path: Path, words: str, n_steps: int, utd_ratio: float, target_update_interval: int
) -> None:
    found = resolve(tmp_path, "dqn.yml", f"A-v0: {words}\n").flat()
    assert (found["n_steps"], found["utd_ratio"]) == (n_steps, utd_ratio)
    assert found["target_update_interval"] == target_update_interval


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("sac.yml", "ent_coef: auto_0.1", {"ent_coef": "auto", "ent_coef_init": 0.1}),
        ("sac.yml", "ent_coef: 0.1", {"ent_coef": 0.1}),
        ("sac.yml", "learning_rate: lin_7.3e-4", {"learning_rate": 7.3e-4, "lr_schedule": "linear"}),
        ("sac.yml", 'policy_kwargs: "dict(net_arch=[400, 300])"', {"net_arch": (400, 300), "critic_arch": None}),
        (
            "sac.yml",
            'policy_kwargs: "dict(optimizer_class=th.optim.AdamW, optimizer_kwargs=dict(weight_decay=0.1))"',
            {"optimizer": "adamw", "weight_decay": 0.1, "adam_eps": 1e-8},
        ),
        (
            "sac.yml",
            'policy_kwargs: "dict(net_arch=dict(pi=[64], qf=[32]), n_critics=3, log_std_init=-3)"',
            {"net_arch": (64,), "critic_arch": (32,), "n_critics": 3},
        ),
        ("sac.yml", "optimize_memory_usage: True", {"algo": "sac"}),
        (  # rl-zoo's MountainCarContinuous-v0
            "sac.yml",
            'use_sde: True\n  policy_kwargs: "dict(log_std_init=-3.67, net_arch=[64, 64], use_expln=True)"',
            {"use_sde": True, "log_std_init": -3.67, "use_expln": True, "sde_sample_freq": None},
        ),
        (
            "sac.yml",
            "sde_sample_freq: 64\n  use_sde_at_warmup: True\n  use_sde: True",
            {"use_sde": True, "log_std_init": -3.0, "sde_sample_freq": 64, "use_sde_at_warmup": True},
        ),
        (
            "sac.yml",
            'sde_sample_freq: 64\n  use_sde_at_warmup: True\n  policy_kwargs: "dict(log_std_init=-2)"',
            {"use_sde": False, "log_std_init": -3.0, "sde_sample_freq": None, "use_sde_at_warmup": False},
        ),
        ("td3.yml", "use_sde: False\n  sde_sample_freq: 4", {"algo": "td3"}),
        (  # rl-zoo's Pendulum-v1
            "ppo.yml",
            "use_sde: True\n  sde_sample_freq: 4",
            {"use_sde": True, "sde_sample_freq": 4, "use_expln": False, "log_std_init": 0.0},
        ),
        ("td3.yml", "noise_type: normal\n  noise_std: 0.3", {"exploration_noise": 0.3}),
        ("td3.yml", "policy_delay: 3", {"policy_delay": 3}),
        ("my.yml", "exploration_fraction: 0.3", {"algo": "dqn", "exploration_fraction": 0.3}),
        ("my.yml", "ent_coef: auto", {"algo": "sac"}),
        ("ppo_lstm.yml", "n_epochs: 3", {"algo": "ppo", "recurrent": "lstm", "n_steps": 128, "recurrent_size": 256}),
        ("ppo.yml", "batch_size: 512\n  n_steps: 128", {"algo": "ppo", "batch_size": 128}),
    ],
)
def test_settings_of_off_policy_files_are_converted(
    tmp_path: Path, name: str, text: str, expected: dict[str, Any]
) -> None:
    found = values(tmp_path, name, text)
    assert {setting: found[setting] for setting in expected} == expected


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("td3.yml", "use_sde: True", "`use_sde: True` needs PPO or SAC; TD3 has its own exploration"),
        (
            "sac.yml",
            'use_sde: True\n  policy_kwargs: "dict(clip_mean=0.0)"',
            "clip_mean: 0.0` is not supported: .* keeps the mean of gSDE's actions in ±2",
        ),
        ("sac.yml", "normalize: True", "normalises observations and rewards for PPO only"),
        ("sac.yml", "train_freq: [1, episode]", "learns after whole episodes"),
        ("sac.yml", "target_update_interval: 5", "updates its target networks with every update"),
        ("sac.yml", "noise_type: normal", "adds no noise to actions"),
        ("sac.yml", "replay_buffer_class: HerReplayBuffer", r"no hindsight replay \(HER\)"),
        ("sac.yml", "n_epochs: 3", "`n_epochs` is a setting of PPO, not of SAC"),
        ("td3.yml", "noise_type: ornstein-uhlenbeck", "has `noise_type: normal`"),
        ("dqn.yml", "exploration_initial_eps: 0.5", "`exploration_initial_eps: 0.5` is not supported"),
        ("my.yml", "buffer_size: 5000", "does not say whether it is for SAC, TD3 or DQN; add --algo"),
        ("my.yml", "use_rms_prop: True", "is for A2C, which unidle does not have"),
    ],
)
def test_what_unidle_does_not_have_is_refused_with_reason(tmp_path: Path, name: str, text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        values(tmp_path, name, text)


@pytest.mark.parametrize("name", OTHERS)
def test_file_of_another_algorithm_does_not_train_ppo(tmp_path: Path, name: str) -> None:
    with pytest.raises(UsageError, match=r"is for \w+, which unidle does not have"):
        values(tmp_path, f"{name}.yml", "n_envs: 8")


def test_flag_names_the_algorithm_of_a_file_that_does_not(tmp_path: Path) -> None:
    text = "A-v0: {policy: MlpPolicy, buffer_size: 5000}\n"
    assert resolve(tmp_path, "my.yml", text, "td3").recipe.algo == "td3"
    with pytest.raises(UsageError, match="is for SAC; remove --algo ppo"):
        resolve(tmp_path, "sac.yml", text, "ppo")
