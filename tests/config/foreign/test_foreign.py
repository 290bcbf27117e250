"""Config files of other libraries: Stable-Baselines3, rl-zoo3, Isaac Lab and ElegantRL."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from unidle.config.config import Config
from unidle.config.foreign.files import ConvertedConfig, read_config
from unidle.config.presets import load_preset
from unidle.config.validate import validated
from unidle.errors import UsageError

Read = Callable[..., ConvertedConfig]

ISAAC = """
seed: 42
n_timesteps: !!float 1e6
policy: 'MlpPolicy'
n_steps: 16
batch_size: 512
gae_lambda: 0.9
gamma: 0.98
n_epochs: 12
ent_coef: 0.01
vf_coef: 0.7
learning_rate: !!float 4e-4
clip_range: 0.3
max_grad_norm: 1.5
policy_kwargs: "dict(
                  activation_fn=nn.ELU,
                  net_arch=[48, 24],
                  squash_output=False,
                )"
device: "cuda:0"
normalize_input: true
normalize_value: false
"""

ZOO = """
atari:
  policy: 'CnnPolicy'
  n_envs: 8
  n_steps: 128
  learning_rate: lin_2e-4
  clip_range: lin_0.15
Pendulum-v1: &base
  n_envs: 4
  n_timesteps: !!float 1e5
  policy: 'MlpPolicy'
  n_steps: 512
  normalize: true
HalfCheetah-v4:
  <<: *base
  n_envs: 2
  normalize: "dict(norm_obs=True, norm_reward=False)"
  policy_kwargs: "dict(ortho_init=False, activation_fn=nn.ReLU,
                       net_arch=dict(pi=[128, 96], vf=[128, 96]))"
"""


@pytest.fixture
def read(tmp_path: Path) -> Read:
    """Reads a config file of the given text."""

    def read_text(text: str, **options: Any) -> ConvertedConfig:
        path = tmp_path / "my.yaml"
        path.write_text(text, encoding="utf-8")
        return read_config(path, **options)

    return read_text


def sb3(read: Read, text: str, **options: Any) -> ConvertedConfig:
    """Reads `text` in a file that is recognisable as Stable-Baselines3's and sets n_envs."""
    return read(f"policy: MlpPolicy\nn_envs: 4\n{text}\n", **options)


# --- unidle's own files


def test_config_of_run_folder_is_read_completely(read: Read) -> None:
    config = Config().with_values({"env": "A-v0", "n_envs": 8, "device": "cpu"}, "test")
    assert read(config.to_yaml()) == ConvertedConfig(config.flat(), [], None)


def test_settings_are_accepted_outside_sections(read: Read) -> None:
    result = read("n_envs: 8\ntimesteps: 1e5\nengine: {device: cpu}\n")
    assert result == ConvertedConfig({"n_envs": 8, "timesteps": 100_000, "device": "cpu"}, [], None)


def test_preset_in_file_is_base_preset(read: Read) -> None:
    assert read("preset: heavy\nseed: 1\n").base_preset == "heavy"


@pytest.mark.parametrize(
    "text",
    [
        "n_env: 8\n",
        "recipe: {n_env: 8}\n",
        "recipe: {n_envs: 8}\nn_env: 8\n",
    ],
)
def test_unknown_setting_is_rejected_in_unidle_file(read: Read, text: str) -> None:
    with pytest.raises(UsageError, match=r"there is no setting `n_env`; did you mean `n_envs`\?"):
        read(text)


@pytest.mark.parametrize("setting", ["policy_kwargs: {}", "n_minibatches: 4", "n_timesteps: 5"])
def test_sections_reject_foreign_settings(read: Read, setting: str) -> None:
    with pytest.raises(UsageError, match="there is no setting"):
        read(f"recipe: {{{setting}}}\n")


def test_misspelt_section_is_not_read_as_env_name(read: Read) -> None:
    with pytest.raises(UsageError, match=r"`recipes`; did you mean `recipe`\?"):
        read("recipes: {n_envs: 8}\n")


def test_wrong_type_error_names_file(read: Read) -> None:
    with pytest.raises(UsageError, match=r"my\.yaml: `n_envs` must be an integer, not 'many'"):
        read("n_envs: many\n")


# --- Isaac Lab


def test_isaac_lab_file_is_converted_completely(read: Read) -> None:
    result = read(ISAAC, n_envs=64)
    assert result.values == {
        "seed": 42,
        "timesteps": 1_000_000,
        "n_steps": 16,
        "batch_size": 512,
        "gae_lambda": 0.9,
        "gamma": 0.98,
        "n_epochs": 12,
        "ent_coef": 0.01,
        "vf_coef": 0.7,
        "learning_rate": 4e-4,
        "clip_range": 0.3,
        "max_grad_norm": 1.5,
        "activation": "elu",
        "net_arch": (48, 24),
        "device": "cuda",
        "normalize_obs": True,
        "normalize_reward": False,
    }
    assert result.notes == []
    assert result.base_preset == "classic"


def test_converted_file_on_base_preset_is_valid(read: Read) -> None:
    result = read(ISAAC, n_envs=64)
    assert result.base_preset is not None
    config = load_preset(result.base_preset).apply(Config()).with_values(result.values, "file")
    config = config.with_values({"env": "A-v0", "n_envs": 64}, "command line")
    assert validated(config).recipe.net_arch == (48, 24)


def test_batch_size_error_of_file_without_n_envs_names_the_flag(read: Read) -> None:
    values = read(ISAAC).values
    config = Config().with_values({"env": "A-v0", **values}, "file")
    with pytest.raises(UsageError, match=r"larger than a rollout, .* use a multiple of 32 as --n-envs"):
        validated(config)
    assert validated(config.with_values({"n_envs": 32}, "command line")).recipe.batch_size == 512


def test_missing_n_envs_is_reported(read: Read) -> None:
    assert read(ISAAC).notes == ["`n_envs` is not in the file; using 1, or the --preset's, unless you give --n-envs."]


def test_policy_kwargs_can_be_mapping(read: Read) -> None:
    text = "policy_kwargs:\n  activation_fn: nn.ELU\n  net_arch: [32, 16]\n  squash_output: false\n"
    result = sb3(read, text)
    assert result.values["activation"] == "elu"
    assert result.values["net_arch"] == (32, 16)
    assert result.notes == []


def test_n_minibatches_is_converted_to_batch_size(read: Read) -> None:
    assert sb3(read, "n_steps: 24\nn_minibatches: 6").values["batch_size"] == 4 * 24 // 6
    with_default_n_steps = sb3(read, "n_minibatches: 32")
    assert with_default_n_steps.values["batch_size"] == 4 * 2048 // 32


def test_n_minibatches_uses_n_envs_of_command_line_first(read: Read) -> None:
    result = sb3(read, "n_steps: 24\nn_minibatches: 6\nbatch_size: 7", n_envs=100)
    assert result.values["batch_size"] == 100 * 24 // 6


def test_n_minibatches_without_n_envs_is_refused(read: Read) -> None:
    with pytest.raises(UsageError, match=r"my\.yaml gives `n_minibatches` but not `n_envs`, .*; add --n-envs"):
        read("n_steps: 24\nn_minibatches: 6\n")


@pytest.mark.parametrize("value", ["0", "half", "2.5"])
def test_n_minibatches_must_be_positive_integer(read: Read, value: str) -> None:
    with pytest.raises(UsageError, match="`n_minibatches` must be a positive integer"):
        sb3(read, f"n_minibatches: {value}")


@pytest.mark.parametrize(
    ("device", "expected", "note"),
    [
        ("cpu", "cpu", None),
        ("auto", "auto", None),
        ("cuda", "cuda", None),
        ("cuda:1", "cuda:1", None),
        ("mps", None, "`device: mps` is not supported"),
    ],
)
def test_device_is_converted_or_noted(read: Read, device: str, expected: str | None, note: str | None) -> None:
    result = sb3(read, f"device: {device}")
    assert result.values.get("device") == expected
    assert len(result.notes) == (note is not None)
    assert note is None or note in result.notes[0]


# --- rl-zoo


def test_zoo_entry_is_selected_by_env(read: Read) -> None:
    result = read(ZOO, env="Pendulum-v1")
    assert result.values == {
        "env": "Pendulum-v1",
        "n_envs": 4,
        "timesteps": 100_000,
        "n_steps": 512,
        "normalize_obs": True,
        "normalize_reward": True,
    }
    assert result.base_preset == "classic"


def test_zoo_entry_can_extend_another(read: Read) -> None:
    result = read(ZOO, env="HalfCheetah-v4")
    assert result.values == {
        "env": "HalfCheetah-v4",
        "n_envs": 2,
        "timesteps": 100_000,
        "n_steps": 512,
        "normalize_obs": True,
        "normalize_reward": False,
        "activation": "relu",
        "net_arch": (128, 96),
        "ortho_init": False,
    }
    assert result.notes == []


@pytest.mark.parametrize("env", ["ALE/Pong-v5", "PongNoFrameskip-v4"])
def test_atari_games_use_atari_entry_and_keep_env_name(read: Read, env: str) -> None:
    result = read(ZOO, env=env)
    assert result.values == {
        "n_envs": 8,
        "n_steps": 128,
        "learning_rate": 2e-4,
        "lr_schedule": "linear",
        "clip_range": 0.15,
        "clip_schedule": "linear",
        "net_arch": (),
    }
    assert result.notes == []


def test_single_zoo_entry_needs_no_env(read: Read) -> None:
    result = read("Acrobot-v1:\n  n_envs: 3\n  policy: MlpPolicy\n")
    assert result.values == {"env": "Acrobot-v1", "n_envs": 3}


def test_several_zoo_entries_need_env(read: Read) -> None:
    with pytest.raises(UsageError, match=r"has entries for atari, Pendulum-v1, HalfCheetah-v4; choose one"):
        read(ZOO)


def test_unknown_env_error_suggests_closest_entry(read: Read) -> None:
    with pytest.raises(UsageError) as error:
        read(ZOO, env="HalfCheetah-v5")
    assert "has no entry for HalfCheetah-v5, only for HalfCheetah-v4 and 2 more" in str(error.value)


def test_unknown_env_error_lists_entries(read: Read) -> None:
    with pytest.raises(UsageError, match="only for atari, Pendulum-v1, HalfCheetah-v4; add"):
        read(ZOO, env="Xyz")


@pytest.mark.parametrize(
    ("value", "obs", "reward", "ignored"),
    [
        ("true", True, True, []),
        ("false", False, False, []),
        ('"dict(norm_obs=False, norm_reward=True)"', False, True, []),
        ("\"{'norm_obs': True, 'norm_reward': False}\"", True, False, []),
        ("{norm_reward: false}", True, False, []),
        ("{norm_obs: true, clip_obs: 10.0}", True, True, []),
    ],
)
def test_normalize_is_read_in_all_forms(read: Read, value: str, obs: bool, reward: bool, ignored: list[str]) -> None:
    result = sb3(read, f"normalize: {value}")
    assert result.values["normalize_obs"] is obs
    assert result.values["normalize_reward"] is reward
    assert [note.split(" has ")[0] for note in result.notes] == ignored


def test_invalid_normalize_is_rejected(read: Read) -> None:
    with pytest.raises(UsageError, match="`normalize` must be true, false or dict"):
        sb3(read, "normalize: 3")


@pytest.mark.parametrize("name", ["learning_rate", "clip_range"])
def test_linear_schedule_is_converted(read: Read, name: str) -> None:
    schedule = {"learning_rate": "lr_schedule", "clip_range": "clip_schedule"}[name]
    assert read(f"n_envs: 1\n{name}: lin_2.5e-4\n").values == {
        "n_envs": 1,
        name: 2.5e-4,
        schedule: "linear",
    }
    assert schedule not in sb3(read, f"{name}: 2.5e-4").values


def test_invalid_linear_schedule_is_rejected(read: Read) -> None:
    with pytest.raises(UsageError, match="`learning_rate` must be a number"):
        sb3(read, "learning_rate: lin_fast")


@pytest.mark.parametrize(("value", "expected"), [("0.2", 0.2), ("null", None), ("-1", None), ("lin_0.2", 0.2)])
def test_clip_range_vf_is_converted(read: Read, value: str, expected: float | None) -> None:
    result = sb3(read, f"clip_range_vf: {value}")
    assert result.values["clip_range_vf"] == expected
    assert any("no schedule" in note for note in result.notes) == value.startswith("lin_")


@pytest.mark.parametrize(
    ("net_arch", "expected", "note"),
    [
        ("[32, 16]", (32, 16), None),
        ("[]", (), None),
        ("(32, 16)", (32, 16), None),
        ("dict(pi=[32, 16], vf=[32, 16])", (32, 16), None),
        ("[dict(pi=[32, 16], vf=[32, 16])]", (32, 16), None),
    ],
)
def test_net_arch_is_read_in_all_forms(read: Read, net_arch: str, expected: tuple[int, ...], note: str | None) -> None:
    result = sb3(read, f'policy_kwargs: "dict(net_arch={net_arch})"')
    assert result.values["net_arch"] == expected
    assert len(result.notes) == (note is not None)
    assert note is None or note in result.notes[0]


@pytest.mark.parametrize(
    ("net_arch", "message"),
    [
        ("[128, dict(pi=[32], vf=[32])]", r"unidle shares all layers \(`share_trunk`\) or none"),
        ("dict(shared=[8], pi=[32], vf=[32])", r"unidle shares all layers"),
    ],
)
def test_net_arch_that_unidle_does_not_have_is_refused(read: Read, net_arch: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        sb3(read, f'policy_kwargs: "dict(net_arch={net_arch})"')


@pytest.mark.parametrize(
    ("net_arch", "actor", "critic"),
    [
        ("dict(pi=[64], vf=[256, 256])", (64,), (256, 256)),
        ("{'pi': [64], 'vf': [256, 256]}", (64,), (256, 256)),
        ("[dict(pi=[64], vf=[256, 256])]", (64,), (256, 256)),
        ("dict(pi=[32])", (32,), ()),
        ("dict(vf=[32])", (), (32,)),
    ],
)
def test_different_layers_of_actor_and_critic_are_read_in_all_forms(
    read: Read, net_arch: str, actor: tuple[int, ...], critic: tuple[int, ...]
) -> None:
    values = sb3(read, f'policy_kwargs: "dict(net_arch={net_arch})"').values
    assert (values["net_arch"], values["critic_arch"]) == (actor, critic)


def test_different_layers_of_actor_and_critic_are_read_from_yaml(read: Read) -> None:
    values = sb3(read, "policy_kwargs:\n  net_arch:\n    pi: [64]\n    vf: [256, 256]\n").values
    assert (values["net_arch"], values["critic_arch"]) == ((64,), (256, 256))


@pytest.mark.parametrize("text", ["net_arch='wide'", "net_arch=dict(pi=3, vf=3)", "net_arch=[0.5]"])
def test_invalid_net_arch_is_rejected(read: Read, text: str) -> None:
    with pytest.raises(UsageError, match="`net_arch` must be a list of integers"):
        sb3(read, f'policy_kwargs: "dict({text})"')


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("nn.Tanh", "tanh"),
        ("nn.ReLU", "relu"),
        ("th.nn.ELU", "elu"),
        ("torch.nn.SiLU", "silu"),
        ("nn.GELU", "gelu"),
    ],
)
def test_activations_are_converted_from_torch_names(read: Read, name: str, expected: str) -> None:
    assert sb3(read, f'policy_kwargs: "dict(activation_fn={name})"').values["activation"] == expected


def test_unknown_activation_is_refused(read: Read) -> None:
    with pytest.raises(UsageError, match=r"`activation_fn: nn\.Mish` is not supported; unidle has tanh, relu, elu"):
        sb3(read, 'policy_kwargs: "dict(activation_fn=nn.Mish)"')


def test_log_std_init_is_kept_with_note_on_units(read: Read) -> None:
    result = sb3(read, 'policy_kwargs: "dict(log_std_init=-2)"')
    assert result.values["log_std_init"] == -2.0
    assert "action units" in result.notes[0]


def test_lstm_policy_sets_recurrent_defaults(read: Read) -> None:
    result = read("policy: MlpLstmPolicy\nn_envs: 8\nn_steps: 64\n")
    assert result.values == {
        "recurrent": "lstm",
        "recurrent_size": 256,
        "n_envs": 8,
        "n_steps": 64,
        "batch_size": 128,
    }
    assert result.notes == ["`policy: MlpLstmPolicy` becomes `recurrent: lstm`; actor and critic share the LSTM."]
    sized = read('policy: MlpLstmPolicy\npolicy_kwargs: "dict(lstm_hidden_size=16)"\n')
    assert sized.values["recurrent_size"] == 16


def test_env_kwargs_can_be_python_literal(read: Read) -> None:
    result = sb3(read, "env_kwargs: \"dict(continuous=True, wind=-1.5, kind='a', where=None)\"")
    expected = {"continuous": True, "wind": -1.5, "kind": "a", "where": None}
    assert result.values["env_kwargs"] == expected


def test_shared_settings_are_passed_through(read: Read) -> None:
    result = sb3(read, "target_kl: 0.03\nnormalize_advantage: false\nseed: null")
    assert result.values == {"n_envs": 4, "target_kl": 0.03, "normalize_advantage": False}


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (
            'policy_kwargs: "dict(squash_output=True)"',
            r"squash_output: True` is not supported: with gSDE, .* PPO clips",
        ),
        ('policy_kwargs: "dict(full_std=False)"', "learns a standard deviation for each feature and action"),
        ("vec_env_wrapper: a.b.C", "unidle wraps single environments"),
        ("callback: a.b.C", "pass callbacks in Python"),
        ("qf_lr: 9", "`qf_lr: 9` is not supported: unidle has no such setting; remove it"),
        ("clip_obs: 5.0", "`clip_obs: 5.0` is not supported"),
        ("normalize: {clip_obs: 5.0}", r"`normalize\.clip_obs: 5.0` is not supported"),
        ("policy: my.Policy", "write it as --network"),
        (
            'policy_kwargs: "dict(optimizer_class=RMSpropTFLike)"',
            r"optimizer_class: RMSpropTFLike` is not supported: unidle has adam, adamw, rmsprop, sgd; remove it",
        ),
        (
            'policy_kwargs: "dict(optimizer_kwargs=dict(amsgrad=True))"',
            r"`policy_kwargs\.optimizer_kwargs\.amsgrad: True` is not supported: unidle has no such setting; remove it",
        ),
        ('policy_kwargs: "dict(optimizer_kwargs=3)"', r"`optimizer_kwargs` must be a mapping or dict\(…\), not 3"),
        ('policy_kwargs: "dict(n_lstm_layers=2)"', "one recurrent layer"),
    ],
)
def test_setting_that_unidle_does_not_have_is_refused_with_reason(read: Read, text: str, reason: str) -> None:
    with pytest.raises(UsageError, match=reason):
        sb3(read, text)


def test_settings_without_effect_are_accepted_silently(read: Read) -> None:
    text = "use_sde: false\nsde_sample_freq: 4\nframe_stack: 1\nverbose: 1\nvec_env_wrapper: null\n"
    text += 'policy_kwargs: "dict(ortho_init=True, optimizer_class=th.optim.Adam, optimizer_kwargs=dict(eps=0.1), '
    text += 'use_expln=True, full_std=True)"'
    expected = {"n_envs": 4, "use_sde": False, "frame_stack": 1, "ortho_init": True, "adam_eps": 0.1}
    assert sb3(read, text) == ConvertedConfig(expected, [], "classic")


@pytest.mark.parametrize(("given", "expected"), [("4", 4), ("-1", None)])
def test_state_dependent_exploration_is_converted(read: Read, given: str, expected: int | None) -> None:
    result = sb3(read, f"sde_sample_freq: {given}\nuse_sde: true\n" + 'policy_kwargs: "dict(use_expln=True)"')
    values = {"n_envs": 4, "use_sde": True, "sde_sample_freq": expected, "use_expln": True}
    assert result == ConvertedConfig(values, [], "classic")


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ("optimizer_class=th.optim.Adam", {"adam_eps": 1e-5}),
        ("optimizer_kwargs=dict(weight_decay=0.1)", {"adam_eps": 1e-8, "weight_decay": 0.1}),
        ("optimizer_kwargs=dict(betas=(0.5, 0.99), eps=0.1)", {"adam_eps": 0.1, "adam_betas": (0.5, 0.99)}),
        ("optimizer_class=torch.optim.AdamW", {"optimizer": "adamw", "adam_eps": 1e-8}),
        (
            "optimizer_class=th.optim.RMSprop, optimizer_kwargs=dict(alpha=0.95, eps=1e-5, momentum=0.5)",
            {"optimizer": "rmsprop", "rmsprop_alpha": 0.95, "adam_eps": 1e-5, "momentum": 0.5},
        ),
        (
            "optimizer_class=th.optim.SGD, optimizer_kwargs=dict(momentum=0.9, nesterov=False, foreach=True)",
            {"optimizer": "sgd", "momentum": 0.9},
        ),
    ],
)
def test_optimizer_and_its_arguments_are_converted(read: Read, options: str, expected: dict[str, Any]) -> None:
    result = sb3(read, f'policy_kwargs: "dict({options})"')
    assert result == ConvertedConfig({"n_envs": 4, **expected}, [], "classic")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a.b.C", ("a.b:C",)),
        ("[a.C: {n: 2}, b.D]", ({"a:C": {"n": 2}}, "b:D")),
        ("[{a.C: {}}]", ("a:C",)),
        ("null", ()),
    ],
)
def test_env_wrapper_becomes_wrappers(read: Read, text: str, expected: tuple[Any, ...]) -> None:
    assert sb3(read, f"env_wrapper: {text}").values["wrappers"] == expected


def test_frame_stack_is_taken(read: Read) -> None:
    assert sb3(read, "frame_stack: 4").values["frame_stack"] == 4


# --- ElegantRL


def test_elegantrl_settings_are_converted(read: Read) -> None:
    result = read("num_envs: 8\ntarget_step: 4096\nrepeat_times: 12\nworker_num: 2\n")
    assert result == ConvertedConfig({"n_envs": 8, "n_steps": 512, "n_epochs": 12, "workers": 2}, [], None)


def test_elegantrl_settings_are_accepted_in_unidle_sections(read: Read) -> None:
    result = read("recipe: {num_envs: 4, target_step: 64}\nengine: {worker_num: 2}\n")
    assert result.values == {"n_envs": 4, "n_steps": 16, "workers": 2}


def test_further_elegantrl_settings_are_converted(read: Read) -> None:
    result = read(
        "net_dims: [64, 32]\nhorizon_len: 128\nratio_clip: 0.25\nlambda_gae_adv: 0.9\n"
        "lambda_entropy: 0.02\nclip_grad_norm: 3\nbreak_step: 1e5\nrandom_seed: 5\ngpu_id: 0\n"
    )
    assert result.values == {
        "net_arch": (64, 32),
        "n_steps": 128,
        "clip_range": 0.25,
        "gae_lambda": 0.9,
        "ent_coef": 0.02,
        "max_grad_norm": 3.0,
        "timesteps": 100_000,
        "seed": 5,
    }
    assert result.notes == ["`gpu_id` has no equivalent in unidle and is ignored."]


def test_target_step_is_rounded_down_to_multiple_of_n_envs_with_note(read: Read) -> None:
    result = read("num_envs: 3\ntarget_step: 100\n")
    assert result.values["n_steps"] == 33
    assert result.notes == ["`target_step` 100 becomes 99, a multiple of n_envs 3."]


def test_target_step_needs_n_envs_from_file_or_command_line(read: Read) -> None:
    unknown = read("target_step: 4096\n")
    assert unknown.values == {}
    assert "`n_envs` is unknown" in unknown.notes[0]
    assert read("target_step: 4096\n", n_envs=16).values == {"n_steps": 256}
    assert read("target_step: 4096\nn_envs: 4\n", n_envs=16).values["n_steps"] == 256


def test_target_step_is_ignored_with_note_if_n_steps_is_given(read: Read) -> None:
    result = read("target_step: 4096\nn_envs: 4\nn_steps: 32\n")
    assert result.values["n_steps"] == 32
    assert result.notes == ["`target_step` is ignored because the file also gives `n_steps`."]


def test_two_names_of_one_setting_must_agree(read: Read) -> None:
    assert read("n_envs: 8\nnum_envs: 8\n").values == {"n_envs": 8}
    with pytest.raises(UsageError, match="`num_envs` sets `n_envs` to 4, but another line sets it to 8"):
        read("n_envs: 8\nnum_envs: 4\n")


def test_misspelt_setting_is_rejected_in_elegantrl_file(read: Read) -> None:
    with pytest.raises(UsageError, match="there is no setting `n_stepz`"):
        read("num_envs: 8\nn_stepz: 4\n")


# --- Code in config files


@pytest.mark.parametrize("setting", ["policy_kwargs", "normalize", "env_kwargs"])
@pytest.mark.parametrize(
    "python",
    [
        "__import__('pathlib').Path('{}').touch()",
        "dict(a=__import__('pathlib').Path('{}').touch())",
        "[open('{}', 'w') for _ in [1]]",
        "dict(**open('{}', 'w'))",
        "{{**open('{}', 'w')}}",
        "(open('{}', 'w')).name",
        "f'{{open('{}')}}'",
        "dict(",
        "1 +",
        "{{[1]: 2}}",
    ],
)
def test_python_code_is_rejected_without_running_it(read: Read, tmp_path: Path, setting: str, python: str) -> None:
    marker = tmp_path / "ran"
    with pytest.raises(UsageError, match=f"`{setting}` contains Python code, which unidle does not run"):
        sb3(read, f'{setting}: "{python.format(marker)}"')
    assert not marker.exists()


def test_policy_kwargs_must_be_mapping(read: Read) -> None:
    with pytest.raises(UsageError, match="`policy_kwargs` must be a mapping or dict"):
        sb3(read, 'policy_kwargs: "[64, 64]"')


def test_empty_policy_kwargs_change_nothing(read: Read) -> None:
    assert sb3(read, "policy_kwargs: null").values == {"n_envs": 4}


def test_yaml_tuples_and_python_names_are_read_as_plain_values(read: Read) -> None:
    result = sb3(
        read,
        "policy_kwargs:\n  net_arch: !!python/tuple [32, 16]\n  activation_fn: !!python/name:torch.nn.ReLU ''\n",
    )
    assert result.values["net_arch"] == (32, 16)
    assert result.values["activation"] == "relu"


@pytest.mark.parametrize(
    "value",
    [
        "!!python/object/apply:pathlib.Path.touch [!!python/object/apply:pathlib.Path [{}]]",
        "!!python/object/new:pathlib.Path [{}]",
        "!custom {}",
        "!!python/tuple {}",
    ],
)
def test_yaml_tags_that_create_objects_are_rejected(read: Read, tmp_path: Path, value: str) -> None:
    marker = tmp_path / "ran"
    with pytest.raises(UsageError, match=r"my\.yaml: line 3 has the tag .*; write a plain value"):
        sb3(read, f"policy_kwargs: {value.format(marker)}")
    assert not marker.exists()


def test_target_step_with_zero_n_envs_is_left_to_validation(read: Read) -> None:
    result = read("target_step: 4096\nnum_envs: 0\nnet_dims: [8]\n")
    assert result.values["n_envs"] == 0
    assert "n_steps" not in result.values


def test_numpy_arrays_are_accepted_as_lists() -> None:
    config = Config().with_values({"net_arch": np.array([64, 32]), "n_envs": np.int64(3), "workers": None}, "flags")
    assert (config.recipe.net_arch, config.recipe.n_envs) == ((64, 32), 3)
    with pytest.raises(UsageError, match="`workers` must be"):
        Config().with_values({"workers": np.array([1, 2])}, "flags")


def test_n_steps_of_an_off_policy_algorithm_is_that_of_n_step_returns(read: Read) -> None:
    values = read("algo: dqn\nn_timesteps: 1000\nn_steps: 3\ntrain_freq: 8\n", algo="dqn").values
    assert values["n_step"] == 3
    assert values["n_steps"] == 8
