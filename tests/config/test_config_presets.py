from __future__ import annotations

import inspect
from typing import Any

import pytest

from unidle.config.presets import default_preset, load_preset, preset_names
from unidle.config.schema import Config, section_of
from unidle.config.validate import validated
from unidle.errors import UsageError

# name: n_envs, n_steps, batch_size, n_epochs, network_arch
SHAPES = {
    "classic": (1, 2048, 64, 10, (64, 64)),
    "fast": (16, 256, 2048, 15, (512, 512)),
    "heavy": (32, 256, 4096, 20, (1024, 512, 256)),
    "beast": (64, 512, 8192, 30, (1024, 512, 512, 256)),
    "max-gpu": (32, 8192, 512, 30, (1024, 1024, 512, 256)),
}


@pytest.mark.parametrize("name", SHAPES)
def test_a_preset_has_exactly_its_documented_shape(name: str) -> None:
    recipe = load_preset(name).apply(Config()).recipe
    shape = (recipe.n_envs, recipe.n_steps, recipe.batch_size, recipe.n_epochs, recipe.network_arch)
    assert shape == SHAPES[name]


def test_the_isaac_presets_have_their_documented_sizes() -> None:
    isaac = load_preset("isaac").apply(Config()).recipe
    assert (isaac.n_envs, isaac.batch_size) == (128, 2048)
    largest = load_preset("isaac-max").apply(Config()).recipe
    assert (largest.n_envs, largest.n_steps, largest.batch_size) == (256, 4096, 4096)


def test_classic_is_what_stable_baselines3_does_by_default() -> None:
    sb3 = pytest.importorskip("stable_baselines3")
    recipe = load_preset("classic").apply(Config()).recipe
    parameters = inspect.signature(sb3.PPO.__init__).parameters
    shared = [
        *("learning_rate", "n_steps", "batch_size", "n_epochs", "gamma", "gae_lambda"),
        *("clip_range", "clip_range_vf", "normalize_advantage", "ent_coef", "vf_coef"),
        *("max_grad_norm", "target_kl"),
    ]
    theirs = {name: parameters[name].default for name in shared}
    assert {name: getattr(recipe, name) for name in shared} == theirs
    assert (recipe.lr_schedule, recipe.clip_schedule) == ("constant", "constant")

    policy = sb3.PPO("MlpPolicy", "CartPole-v1", device="cpu").policy
    assert policy.net_arch == {"pi": list(recipe.network_arch), "vf": list(recipe.network_arch)}
    assert policy.activation_fn.__name__.lower() == recipe.activation
    assert policy.log_std_init == recipe.log_std_init


@pytest.mark.parametrize("name", preset_names())
def test_every_preset_is_a_valid_run_of_recipe_values_only_unless_it_reproduces_others_numbers(name: str) -> None:
    preset = load_preset(name)
    config = preset.apply(Config().with_values({"env": "CartPole-v1"}, "test"))
    assert validated(config) == config
    assert {section_of(key) for key in preset.values} == ({"recipe", "run"} if preset.fixed else {"recipe"})
    assert preset.description


def test_applying_a_preset_keeps_the_rest_and_records_its_name() -> None:
    config = load_preset("fast").apply(Config().with_values({"seed": 3, "gamma": 0.9}, "test"))
    assert (config.run.seed, config.recipe.gamma, config.run.preset) == (3, 0.9, "fast")


def test_names_are_listed_by_size_and_then_alphabetically() -> None:
    expected = ["classic", "fast", "heavy", "beast", "device", "dqn", "isaac", "isaac-max", "max-gpu"]
    expected += ["mt10-paper-1024", "mt10-paper-400", "sac"]
    assert preset_names() == expected
    cores = [load_preset(name).cores for name in expected[:4]]
    assert cores == sorted(cores)


def test_an_unknown_preset_is_answered_with_the_names() -> None:
    with pytest.raises(UsageError) as error:
        load_preset("huge")
    assert str(error.value) == (
        "There is no preset `huge`; choose one of classic, fast, heavy, beast, device, dqn, isaac, isaac-max, max-gpu, "
        "mt10-paper-1024, mt10-paper-400, sac."
    )


@pytest.mark.parametrize("name", ["../presets/fast", "", "fast.yaml"])
def test_a_preset_name_is_no_path(name: str) -> None:
    with pytest.raises(UsageError, match="There is no preset"):
        load_preset(name)


@pytest.mark.parametrize(
    ("name", "cores", "gigabytes", "expected"),
    [
        ("heavy", 8, 64, None),
        ("heavy", 64, 64, None),
        ("heavy", 7, 64, "fast"),
        ("beast", 15, 64, "heavy"),
        ("isaac-max", 16, 64, "beast"),
        ("fast", 2, 64, "classic"),
        ("beast", 64, 3, "heavy"),
        ("heavy", 64, 2, "fast"),
        ("fast", 2, 1.5, "classic"),
        ("heavy", 64, 1, None),
        ("classic", 1, 1, None),
    ],
)
def test_too_few_cores_or_too_little_memory_suggest_the_largest_preset_that_fits_both(
    name: str, cores: int, gigabytes: float, expected: str | None
) -> None:
    assert load_preset(name).smaller(cores, int(gigabytes * 2**30)) == expected


def test_memory_grows_with_the_cores_a_preset_wants() -> None:
    assert load_preset("classic").memory() == 1_200 * 2**20
    assert load_preset("beast").memory() == 4_200 * 2**20


def test_the_default_follows_the_gpu() -> None:
    assert default_preset(has_gpu=True) == "heavy"
    assert default_preset(has_gpu=False) == "classic"
    assert default_preset(has_gpu=True, env="HalfCheetah-v5") == "heavy"
    assert default_preset(has_gpu=True, env="unidle/CartPole-v1") == "device"
    assert default_preset(has_gpu=False, env="unidle/CartPole-v1") == "classic"


def fixed_config(**changes: Any) -> Config:
    return load_preset("mt10-paper-1024").apply(Config()).with_values(changes, "test")


def test_a_preset_of_fixed_numbers_keeps_them_whatever_the_number_of_environments() -> None:
    assert validated(fixed_config(n_envs=48, workers=4, timesteps=1000)).recipe.updates_per_step == 0.1
    with pytest.raises(UsageError) as error:
        validated(fixed_config(batch_size=640))
    assert str(error.value) == (
        "Preset mt10-paper-1024 reproduces fixed numbers, and `batch_size` is 1280 in them, not 640; leave it out, or "
        "say --allow-recipe-change."
    )
    assert validated(fixed_config(batch_size=640, allow_recipe_change=True)).recipe.batch_size == 640
