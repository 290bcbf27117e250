from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from unidle.config.config import Config
from unidle.config.foreign.files import Translated, read_config
from unidle.config.presets import load_preset
from unidle.config.validate import validated
from unidle.errors import UsageError

Read = Callable[..., Translated]

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
  frame_stack: 4
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

    def read_text(text: str, **options: Any) -> Translated:
        path = tmp_path / "my.yaml"
        path.write_text(text, encoding="utf-8")
        return read_config(path, **options)

    return read_text


def sb3(read: Read, text: str, **options: Any) -> Translated:
    """`text` in a file that is plainly Stable-Baselines3's, with n_envs said."""
    return read(f"policy: MlpPolicy\nn_envs: 4\n{text}\n", **options)


# --- unidle's own files


def test_a_run_folders_config_reads_back_whole(read: Read) -> None:
    config = Config().with_values({"env": "A-v0", "n_envs": 8, "device": "cpu"}, "test")
    assert read(config.to_yaml()) == Translated(config.flat(), [], None)


def test_settings_may_stand_outside_sections(read: Read) -> None:
    result = read("n_envs: 8\ntimesteps: 1e5\nengine: {device: cpu}\n")
    assert result == Translated({"n_envs": 8, "timesteps": 100_000, "device": "cpu"}, [], None)


def test_a_file_that_names_a_preset_starts_from_it(read: Read) -> None:
    assert read("preset: heavy\nseed: 1\n").base_preset == "heavy"


@pytest.mark.parametrize(
    "text",
    [
        "n_env: 8\n",
        "recipe: {n_env: 8}\n",
        "recipe: {n_envs: 8}\nn_env: 8\n",
    ],
)
def test_an_unknown_setting_is_refused_in_unidles_own_files(read: Read, text: str) -> None:
    with pytest.raises(UsageError, match=r"there is no setting `n_env`; did you mean `n_envs`\?"):
        read(text)


@pytest.mark.parametrize("word", ["policy_kwargs: {}", "n_minibatches: 4", "n_timesteps: 5"])
def test_sections_do_not_take_foreign_words(read: Read, word: str) -> None:
    with pytest.raises(UsageError, match="there is no setting"):
        read(f"recipe: {{{word}}}\n")


def test_a_misspelt_section_is_not_taken_for_an_environment(read: Read) -> None:
    with pytest.raises(UsageError, match=r"`recipes`; did you mean `recipe`\?"):
        read("recipes: {n_envs: 8}\n")


def test_a_wrong_type_is_refused_with_the_files_name(read: Read) -> None:
    with pytest.raises(UsageError, match=r"my\.yaml: `n_envs` must be an integer, not 'many'"):
        read("n_envs: many\n")


# --- Isaac Lab


def test_an_isaac_lab_file_moves_over_whole(read: Read) -> None:
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


def test_a_translated_file_over_its_base_is_a_valid_run(read: Read) -> None:
    result = read(ISAAC, n_envs=64)
    assert result.base_preset is not None
    config = load_preset(result.base_preset).apply(Config()).with_values(result.values, "file")
    config = config.with_values({"env": "A-v0", "n_envs": 64}, "command line")
    assert validated(config).recipe.net_arch == (48, 24)


def test_a_missing_n_envs_is_said(read: Read) -> None:
    assert read(ISAAC).notes == ["`n_envs` is not in the file; using 1, or the --preset's, unless you give --n-envs."]


def test_policy_kwargs_may_be_a_mapping(read: Read) -> None:
    text = "policy_kwargs:\n  activation_fn: nn.ELU\n  net_arch: [32, 16]\n  squash_output: false\n"
    result = sb3(read, text)
    assert result.values["activation"] == "elu"
    assert result.values["net_arch"] == (32, 16)
    assert result.notes == []


def test_minibatches_become_a_batch_size(read: Read) -> None:
    assert sb3(read, "n_steps: 24\nn_minibatches: 6").values["batch_size"] == 4 * 24 // 6
    by_default_steps = sb3(read, "n_minibatches: 32")
    assert by_default_steps.values["batch_size"] == 4 * 2048 // 32


def test_minibatches_count_the_command_lines_n_envs_before_the_files(read: Read) -> None:
    result = sb3(read, "n_steps: 24\nn_minibatches: 6\nbatch_size: 7", n_envs=100)
    assert result.values["batch_size"] == 100 * 24 // 6


def test_minibatches_without_n_envs_are_noted(read: Read) -> None:
    result = read("n_steps: 24\nn_minibatches: 6\n")
    assert "batch_size" not in result.values
    assert any("`n_minibatches` is ignored" in note for note in result.notes)


@pytest.mark.parametrize("value", ["0", "half", "2.5"])
def test_minibatches_must_be_a_count(read: Read, value: str) -> None:
    with pytest.raises(UsageError, match="`n_minibatches` must be a positive integer"):
        sb3(read, f"n_minibatches: {value}")


@pytest.mark.parametrize(
    ("device", "expected", "note"),
    [
        ("cpu", "cpu", None),
        ("auto", "auto", None),
        ("cuda", "cuda", None),
        ("cuda:1", "cuda", "choose the GPU with CUDA_VISIBLE_DEVICES=1"),
        ("mps", None, "`device: mps` is not supported"),
    ],
)
def test_devices_are_understood_or_noted(read: Read, device: str, expected: str | None, note: str | None) -> None:
    result = sb3(read, f"device: {device}")
    assert result.values.get("device") == expected
    assert len(result.notes) == (note is not None)
    assert note is None or note in result.notes[0]


# --- rl-zoo


def test_the_environment_picks_its_entry(read: Read) -> None:
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


def test_an_entry_may_build_on_another(read: Read) -> None:
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
    }
    assert result.notes == ["`policy_kwargs.ortho_init` has no equivalent in unidle and is ignored."]


@pytest.mark.parametrize("env", ["ALE/Pong-v5", "PongNoFrameskip-v4"])
def test_atari_games_use_the_group_and_keep_their_own_name(read: Read, env: str) -> None:
    result = read(ZOO, env=env)
    assert result.values == {
        "n_envs": 8,
        "n_steps": 128,
        "learning_rate": 2e-4,
        "lr_schedule": "linear",
        "clip_range": 0.15,
        "clip_schedule": "linear",
    }
    assert result.notes == [
        "`policy: CnnPolicy` is ignored; unidle chooses the network from the observation space.",
        "`frame_stack` has no equivalent in unidle and is ignored.",
    ]


def test_the_only_entry_needs_no_environment(read: Read) -> None:
    result = read("Acrobot-v1:\n  n_envs: 3\n  policy: MlpPolicy\n")
    assert result.values == {"env": "Acrobot-v1", "n_envs": 3}


def test_several_entries_need_an_environment(read: Read) -> None:
    with pytest.raises(UsageError, match=r"has entries for atari, Pendulum-v1, HalfCheetah-v4; choose one"):
        read(ZOO)


def test_an_absent_environment_is_answered_with_what_is_near(read: Read) -> None:
    with pytest.raises(UsageError) as error:
        read(ZOO, env="HalfCheetah-v5")
    assert "has no entry for HalfCheetah-v5, only for HalfCheetah-v4 and 2 more" in str(error.value)


def test_an_absent_environment_is_answered_with_what_there_is(read: Read) -> None:
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
        ("{norm_obs: true, clip_obs: 5.0}", True, True, ["`normalize.clip_obs`"]),
    ],
)
def test_normalize_is_read_in_every_form(read: Read, value: str, obs: bool, reward: bool, ignored: list[str]) -> None:
    result = sb3(read, f"normalize: {value}")
    assert result.values["normalize_obs"] is obs
    assert result.values["normalize_reward"] is reward
    assert [note.split(" has ")[0] for note in result.notes] == ignored


def test_normalize_of_another_kind_is_refused(read: Read) -> None:
    with pytest.raises(UsageError, match="`normalize` must be true, false or dict"):
        sb3(read, "normalize: 3")


@pytest.mark.parametrize("name", ["learning_rate", "clip_range"])
def test_a_linear_schedule_is_kept(read: Read, name: str) -> None:
    schedule = {"learning_rate": "lr_schedule", "clip_range": "clip_schedule"}[name]
    assert read(f"n_envs: 1\n{name}: lin_2.5e-4\n").values == {
        "n_envs": 1,
        name: 2.5e-4,
        schedule: "linear",
    }
    assert schedule not in sb3(read, f"{name}: 2.5e-4").values


def test_a_linear_schedule_of_nothing_is_refused(read: Read) -> None:
    with pytest.raises(UsageError, match="`learning_rate` must be a number"):
        sb3(read, "learning_rate: lin_fast")


@pytest.mark.parametrize(("value", "expected"), [("0.2", 0.2), ("null", None), ("-1", None), ("lin_0.2", 0.2)])
def test_the_value_clip_is_read(read: Read, value: str, expected: float | None) -> None:
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
        ("dict(pi=[32], vf=[64])", (32,), "[32] for the actor and [64] for the critic"),
        ("dict(pi=[32])", (32,), "[32] for the actor and [] for the critic"),
        ("[128, dict(pi=[32], vf=[32])]", (128, 32), "shares layers [128]"),
        ("dict(shared=[8], pi=[32], vf=[32])", (32,), "`net_arch.shared` has no equivalent"),
    ],
)
def test_the_network_is_read_in_every_form(
    read: Read, net_arch: str, expected: tuple[int, ...], note: str | None
) -> None:
    result = sb3(read, f'policy_kwargs: "dict(net_arch={net_arch})"')
    assert result.values["net_arch"] == expected
    assert len(result.notes) == (note is not None)
    assert note is None or note in result.notes[0]


@pytest.mark.parametrize("text", ["net_arch='wide'", "net_arch=dict(pi=3, vf=3)", "net_arch=[0.5]"])
def test_a_network_that_is_no_list_of_widths_is_refused(read: Read, text: str) -> None:
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
def test_activations_are_known_by_their_torch_names(read: Read, name: str, expected: str) -> None:
    assert sb3(read, f'policy_kwargs: "dict(activation_fn={name})"').values["activation"] == expected


def test_an_unknown_activation_is_noted(read: Read) -> None:
    result = sb3(read, 'policy_kwargs: "dict(activation_fn=nn.Mish)"')
    assert "activation" not in result.values
    assert result.notes == ["`activation_fn: nn.Mish` is ignored; unidle has tanh, relu, elu, silu, gelu."]


def test_the_initial_deviation_is_taken_and_its_other_unit_noted(read: Read) -> None:
    result = sb3(read, 'policy_kwargs: "dict(log_std_init=-2)"')
    assert result.values["log_std_init"] == -2.0
    assert "action units" in result.notes[0]


def test_an_lstm_policy_brings_the_recurrent_defaults(read: Read) -> None:
    result = read("policy: MlpLstmPolicy\nn_envs: 8\nn_steps: 64\n")
    assert result.values == {
        "recurrent": "lstm",
        "recurrent_size": 256,
        "n_envs": 8,
        "n_steps": 64,
        "batch_size": 128,
    }
    assert result.notes == ["`policy: MlpLstmPolicy` becomes `recurrent: lstm`."]
    sized = read('policy: MlpLstmPolicy\npolicy_kwargs: "dict(lstm_hidden_size=16)"\n')
    assert sized.values["recurrent_size"] == 16


def test_environment_arguments_may_be_python_text(read: Read) -> None:
    result = sb3(read, "env_kwargs: \"dict(continuous=True, wind=-1.5, kind='a', where=None)\"")
    expected = {"continuous": True, "wind": -1.5, "kind": "a", "where": None}
    assert result.values["env_kwargs"] == expected


def test_other_shared_settings_pass_through(read: Read) -> None:
    result = sb3(read, "target_kl: 0.03\nnormalize_advantage: false\nseed: null")
    assert result.values == {"n_envs": 4, "target_kl": 0.03, "normalize_advantage": False}


def test_what_is_not_known_is_named_unless_it_changes_nothing(read: Read) -> None:
    text = "use_sde: true\nsde_sample_freq: -1\nframe_stack: 1\nenv_wrapper: a.b.C\nqf_lr: 9"
    assert sb3(read, text).notes == [
        f"`{word}` has no equivalent in unidle and is ignored." for word in ("use_sde", "env_wrapper", "qf_lr")
    ]
    assert sb3(read, "use_sde: false").notes == []


# --- ElegantRL


def test_elegantrl_words_are_understood(read: Read) -> None:
    result = read("num_envs: 8\ntarget_step: 4096\nrepeat_times: 12\nworker_num: 2\n")
    assert result == Translated({"n_envs": 8, "n_steps": 512, "n_epochs": 12, "workers": 2}, [], None)


def test_elegantrl_words_may_stand_in_unidles_sections(read: Read) -> None:
    result = read("recipe: {num_envs: 4, target_step: 64}\nengine: {worker_num: 2}\n")
    assert result.values == {"n_envs": 4, "n_steps": 16, "workers": 2}


def test_more_of_elegantrl(read: Read) -> None:
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


def test_target_step_that_n_envs_does_not_divide_is_rounded_down_and_said(read: Read) -> None:
    result = read("num_envs: 3\ntarget_step: 100\n")
    assert result.values["n_steps"] == 33
    assert result.notes == ["`target_step` 100 becomes 99, a multiple of n_envs 3."]


def test_target_step_needs_n_envs_from_the_file_or_the_command_line(read: Read) -> None:
    unknown = read("target_step: 4096\n")
    assert unknown.values == {}
    assert "`n_envs` is unknown" in unknown.notes[0]
    assert read("target_step: 4096\n", n_envs=16).values == {"n_steps": 256}
    assert read("target_step: 4096\nn_envs: 4\n", n_envs=16).values["n_steps"] == 256


def test_target_step_beside_n_steps_is_ignored_and_said(read: Read) -> None:
    result = read("target_step: 4096\nn_envs: 4\nn_steps: 32\n")
    assert result.values["n_steps"] == 32
    assert result.notes == ["`target_step` is ignored because the file also gives `n_steps`."]


def test_two_words_for_one_setting_must_agree(read: Read) -> None:
    assert read("n_envs: 8\nnum_envs: 8\n").values == {"n_envs": 8}
    with pytest.raises(UsageError, match="`num_envs` sets `n_envs` to 4, but another line sets it to 8"):
        read("n_envs: 8\nnum_envs: 4\n")


def test_num_envs_alone_does_not_excuse_a_misspelling(read: Read) -> None:
    with pytest.raises(UsageError, match="there is no setting `n_stepz`"):
        read("num_envs: 8\nn_stepz: 4\n")


# --- Nothing in a file is run


@pytest.mark.parametrize("word", ["policy_kwargs", "normalize", "env_kwargs"])
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
def test_python_that_would_have_to_run_is_refused(read: Read, tmp_path: Path, word: str, python: str) -> None:
    trace = tmp_path / "ran"
    with pytest.raises(UsageError, match=f"`{word}` contains Python code, which unidle does not run"):
        sb3(read, f'{word}: "{python.format(trace)}"')
    assert not trace.exists()


def test_policy_kwargs_must_be_a_mapping(read: Read) -> None:
    with pytest.raises(UsageError, match="`policy_kwargs` must be a mapping or dict"):
        sb3(read, 'policy_kwargs: "[64, 64]"')


def test_empty_policy_kwargs_say_nothing(read: Read) -> None:
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
def test_yaml_tags_that_would_build_objects_are_refused(read: Read, tmp_path: Path, value: str) -> None:
    trace = tmp_path / "ran"
    with pytest.raises(UsageError, match=r"my\.yaml: line 3 has the tag .*; write a plain value"):
        sb3(read, f"policy_kwargs: {value.format(trace)}")
    assert not trace.exists()


def test_a_target_step_for_no_environments_is_left_to_the_sentence_about_those(read: Read) -> None:
    translated = read("target_step: 4096\nnum_envs: 0\nnet_dims: [8]\n")
    assert translated.values["n_envs"] == 0
    assert "n_steps" not in translated.values


def test_an_array_is_taken_as_a_list_of_its_numbers() -> None:
    config = Config().with_values({"net_arch": np.array([64, 32]), "n_envs": np.int64(3), "workers": None}, "flags")
    assert (config.recipe.net_arch, config.recipe.n_envs) == ((64, 32), 3)
    with pytest.raises(UsageError, match="`workers` must be"):
        Config().with_values({"workers": np.array([1, 2])}, "flags")
