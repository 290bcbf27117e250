from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest

from unidle.config.config import Config
from unidle.config.fields import section_of
from unidle.config.presets import default_preset, load_preset, preset_names
from unidle.config.resolve import lay
from unidle.config.validate import validated
from unidle.errors import UsageError

# name: n_envs, n_steps, batch_size, n_epochs, net_arch
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
    shape = (recipe.n_envs, recipe.n_steps, recipe.batch_size, recipe.n_epochs, recipe.net_arch)
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
    assert policy.net_arch == {"pi": list(recipe.net_arch), "vf": list(recipe.net_arch)}
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
    names = preset_names()
    assert names[:4] == ["classic", "fast", "heavy", "beast"]
    assert names[4:] == sorted(names[4:])
    assert {"device", "dqn", "isaac", "isaac-max", "max-gpu", "sac", *META_WORLD} <= set(names[4:])
    cores = [load_preset(name).cores for name in names[:4]]
    assert cores == sorted(cores)


def test_an_unknown_preset_is_answered_with_the_names() -> None:
    with pytest.raises(UsageError) as error:
        load_preset("huge")
    assert str(error.value) == f"There is no preset `huge`; choose one of {', '.join(preset_names())}."


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
        ("mt10-2m", 2, 64, None),  # it is too small for it, and nothing else is Meta-World
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


# -- presets of fixed numbers ------------------------------------------------------------------------------------------

FIXED = [name for name in preset_names() if load_preset(name).fixed]
# name: tasks, envs, steps in all, batch, memory, warm-up, updates per step, actor, critics, episodes of an evaluation
META_WORLD = {
    "mt10-2m": (10, 32, 2_000_000, 512, 2_000_000, 40_000, 0.1, (256, 256), (1024,) * 3, 50),
    "mt10-20m": (10, 48, 20_000_000, 512, 2_000_000, 40_000, 0.1, (256, 256), (1024,) * 3, 50),
    "mt10-paper-400": (10, 10, 20_000_000, 1280, 1_000_000, 40_000, 0.1, (400,) * 3, (400,) * 3, 500),
    "mt10-paper-1024": (10, 10, 20_000_000, 1280, 1_000_000, 40_000, 0.1, (400,) * 3, (1024,) * 3, 500),
    "mt50-paper-1024": (50, 50, 100_000_000, 6400, 5_000_000, 200_000, 0.02, (1024,) * 3, (1024,) * 3, 2500),
}


@pytest.mark.parametrize("name", META_WORLD)
def test_a_preset_of_meta_world_has_its_documented_numbers(name: str) -> None:
    config = load_preset(name).apply(Config())
    recipe, run = config.recipe, config.run
    assert (
        *(recipe.n_tasks, recipe.n_envs, run.timesteps, recipe.batch_size, recipe.buffer_size, recipe.learning_starts),
        *(recipe.utd_ratio, recipe.net_arch, recipe.critic_arch, run.eval_episodes),
    ) == META_WORLD[name]
    assert (recipe.gamma, recipe.tau, recipe.learning_rate, recipe.target_entropy) == (0.99, 0.005, 3e-4, -4.0)
    assert recipe.value_limit == 5000.0
    assert (recipe.adam_eps, recipe.max_grad_norm, recipe.weight_init, recipe.activation) == (1e-5, 1.0, "he", "relu")
    assert run.env == f"metaworld:MT{recipe.n_tasks}"
    assert run.eval_every == (200_000 if recipe.n_tasks == 10 else 1_000_000)


def fixed_config(name: str = "mt10-paper-1024", **changes: Any) -> Config:
    return load_preset(name).apply(Config()).with_values(changes, "test")


def test_a_preset_of_fixed_numbers_keeps_them_unless_told_otherwise() -> None:
    with pytest.raises(UsageError) as error:
        validated(fixed_config(batch_size=640))
    assert str(error.value) == (
        "Preset mt10-paper-1024 reproduces published results with `batch_size` 1280, not 640; remove it, or add "
        "--allow-recipe-change."
    )
    assert validated(fixed_config(batch_size=640, allow_recipe_change=True)).recipe.batch_size == 640
    # A run that was begun when the preset had no such limit goes on without it.
    assert validated(fixed_config(value_limit=None), resumed=True).recipe.value_limit is None


@pytest.mark.parametrize("name", FIXED)
@pytest.mark.parametrize("n_envs", [1, 16, 32, 48])
def test_how_its_steps_are_collected_is_open(name: str, n_envs: int) -> None:
    preset = load_preset(name).apply(Config()).recipe
    config = validated(fixed_config(name, n_envs=n_envs, overlap="off", workers=4, timesteps=1000))
    assert (config.recipe.n_envs, config.recipe.overlap) == (n_envs, "off")
    assert preset.overlap == "strict"
    for setting in ("utd_ratio", "learning_starts", "n_steps", "buffer_size", "batch_size"):
        assert getattr(config.recipe, setting) == getattr(preset, setting)


def test_a_variable_gives_the_environments_of_a_fixed_preset_if_nobody_else_does(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("NUM_PARALLEL_ENVS", "16")
    layers = lay("mt10-20m", None, has_gpu=False)
    assert layers.config.recipe.n_envs == 16
    assert layers.notes == ["n_envs is 16, from the environment variable NUM_PARALLEL_ENVS."]
    by_flag = lay("mt10-20m", None, has_gpu=False, n_envs=3)
    assert by_flag.settled_with({"n_envs": 3}).recipe.n_envs == 3
    assert by_flag.notes == []
    (tmp_path / "mine.yaml").write_text("n_envs: 4\n")
    by_file = lay("mt10-20m", tmp_path / "mine.yaml", has_gpu=False)
    assert by_file.config.recipe.n_envs == 4
    assert by_file.notes == []
    assert lay("sac", None, has_gpu=False).config.recipe.n_envs == 8  # whose recipe it would change
    monkeypatch.setenv("NUM_PARALLEL_ENVS", "")
    assert lay("mt10-20m", None, has_gpu=False).config.recipe.n_envs == 48


@pytest.mark.parametrize(
    ("value", "sentence"),
    [
        ("many", "NUM_PARALLEL_ENVS: `n_envs` must be an integer, not 'many'."),
        ("1.5", "NUM_PARALLEL_ENVS: `n_envs` must be an integer, not '1.5'."),
        ("0", "`n_envs` is 0; it must be at least 1."),
    ],
)
def test_a_variable_that_is_no_number_of_environments_is_refused(
    value: str, sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NUM_PARALLEL_ENVS", value)
    with pytest.raises(UsageError) as error:
        validated(lay("mt10-2m", None, has_gpu=False).config)
    assert str(error.value) == sentence


def test_the_environment_of_a_file_chooses_the_preset_as_that_of_a_flag_does(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    for env in ("unidle/SiteExplore-v0", "unidle/CartPole-v1", "CartPole-v1"):
        file.write_text(f"env: {env}\n")
        by_flag = lay(None, None, has_gpu=True, env=env)
        by_file = lay(None, file, has_gpu=True)
        assert by_file.config.recipe == by_flag.config.recipe
        assert by_file.notes == by_flag.notes


def test_an_sb3_file_is_not_combined_with_the_defaults_of_another_algorithm(tmp_path: Path) -> None:
    file = tmp_path / "zoo.yml"
    file.write_text("Pendulum-v1:\n  n_timesteps: 20000\n  policy: MlpPolicy\n  learning_rate: 1e-3\n")
    assert lay(None, file, has_gpu=False, algo="ppo").config.run.preset == "classic"
    with pytest.raises(UsageError, match=r"default to those of its PPO, not of SAC; add --preset sac\."):
        lay(None, file, has_gpu=False, algo="sac")
    chosen = lay("sac", file, has_gpu=False, algo="sac").config.recipe
    assert (chosen.algo, chosen.learning_rate, chosen.batch_size) == ("sac", 1e-3, 256)
