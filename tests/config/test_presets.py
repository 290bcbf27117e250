"""Presets: their values, the default preset, suggestions, and presets of published results."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest

from unidle.config.config import Config
from unidle.config.fields import section_of
from unidle.config.presets import default_preset, load_preset, preset_for_gpu, preset_names
from unidle.config.resolve import resolve_layers
from unidle.config.validate import validated
from unidle.errors import UsageError

# name: n_envs, n_steps, batch_size, n_epochs, net_arch
SIZES = {
    "classic": (1, 2048, 64, 10, (64, 64)),
    "fast": (16, 256, 2048, 15, (512, 512)),
    "heavy": (32, 256, 4096, 20, (1024, 512, 256)),
    "beast": (64, 512, 8192, 30, (1024, 512, 512, 256)),
    "max-gpu": (32, 8192, 512, 30, (1024, 1024, 512, 256)),
}


@pytest.mark.parametrize("name", SIZES)
def test_preset_has_documented_sizes(name: str) -> None:
    recipe = load_preset(name).apply(Config()).recipe
    sizes = (recipe.n_envs, recipe.n_steps, recipe.batch_size, recipe.n_epochs, recipe.net_arch)
    assert sizes == SIZES[name]


def test_isaac_presets_have_documented_sizes() -> None:
    isaac = load_preset("isaac").apply(Config()).recipe
    assert (isaac.n_envs, isaac.batch_size) == (128, 2048)
    largest = load_preset("isaac-max").apply(Config()).recipe
    assert (largest.n_envs, largest.n_steps, largest.batch_size) == (256, 4096, 4096)


def test_atari_presets_have_the_fields_settings() -> None:
    atari, fast = (load_preset(name).apply(Config()).recipe for name in ("atari", "atari-fast"))
    assert (atari.n_envs, atari.n_steps, atari.batch_size, atari.n_epochs, atari.overlap) == (8, 128, 256, 4, "off")
    assert (fast.n_envs, fast.n_steps, fast.batch_size, fast.n_epochs, fast.overlap) == (64, 128, 1024, 4, "auto")
    for recipe in (atari, fast):
        assert (recipe.learning_rate, recipe.lr_schedule, recipe.adam_eps) == (2.5e-4, "linear", 1e-5)
        assert (recipe.clip_range, recipe.clip_schedule, recipe.ent_coef, recipe.vf_coef) == (0.1, "linear", 0.01, 0.5)
        assert (recipe.gamma, recipe.gae_lambda, recipe.max_grad_norm, recipe.net_arch) == (0.99, 0.95, 0.5, ())


def test_classic_preset_equals_sb3_defaults() -> None:
    sb3 = pytest.importorskip("stable_baselines3")
    recipe = load_preset("classic").apply(Config()).recipe
    parameters = inspect.signature(sb3.PPO.__init__).parameters
    shared = [
        *("learning_rate", "n_steps", "batch_size", "n_epochs", "gamma", "gae_lambda"),
        *("clip_range", "clip_range_vf", "normalize_advantage", "ent_coef", "vf_coef"),
        *("max_grad_norm", "target_kl"),
    ]
    sb3_defaults = {name: parameters[name].default for name in shared}
    assert {name: getattr(recipe, name) for name in shared} == sb3_defaults
    assert (recipe.lr_schedule, recipe.clip_schedule) == ("constant", "constant")

    policy = sb3.PPO("MlpPolicy", "CartPole-v1", device="cpu").policy
    assert policy.net_arch == {"pi": list(recipe.net_arch), "vf": list(recipe.net_arch)}
    assert policy.activation_fn.__name__.lower() == recipe.activation
    assert policy.log_std_init == recipe.log_std_init


@pytest.mark.parametrize("name", preset_names())
def test_preset_is_valid_and_sets_only_recipe_unless_fixed(name: str) -> None:
    preset = load_preset(name)
    config = preset.apply(Config().with_values({"env": "CartPole-v1"}, "test"))
    assert validated(config) == config
    assert {section_of(key) for key in preset.values} == ({"recipe", "run"} if preset.fixed else {"recipe"})
    assert preset.description


def test_preset_keeps_other_settings_and_records_its_name() -> None:
    config = load_preset("fast").apply(Config().with_values({"seed": 3, "gamma": 0.9}, "test"))
    assert (config.run.seed, config.recipe.gamma, config.run.preset) == (3, 0.9, "fast")


def test_preset_names_are_sorted_by_size_then_name() -> None:
    names = preset_names()
    assert names[:4] == ["classic", "fast", "heavy", "beast"]
    assert names[4:] == sorted(names[4:])
    assert {"device", "dqn", "isaac", "isaac-max", "max-gpu", "sac", *META_WORLD} <= set(names[4:])
    cores = [load_preset(name).cores for name in names[:4]]
    assert cores == sorted(cores)


def test_unknown_preset_error_lists_names() -> None:
    with pytest.raises(UsageError) as error:
        load_preset("huge")
    assert str(error.value) == f"There is no preset `huge`; choose one of {', '.join(preset_names())}."


@pytest.mark.parametrize("name", ["../presets/fast", "", "fast.yaml"])
def test_preset_name_cannot_be_path(name: str) -> None:
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
        ("mt10-2m", 2, 64, None),  # too few cores, but there is no smaller Meta-World preset
    ],
)
def test_largest_preset_that_fits_machine_is_suggested(
    name: str, cores: int, gigabytes: float, expected: str | None
) -> None:
    assert load_preset(name).smaller(cores, int(gigabytes * 2**30)) == expected


def test_required_memory_grows_with_cores_of_preset() -> None:
    assert load_preset("classic").memory() == 1_200 * 2**20
    assert load_preset("beast").memory() == 4_200 * 2**20


@pytest.mark.parametrize("env", [None, "HalfCheetah-v5", "unidle/CartPole-v1", "unidle/SiteExplore-v0"])
@pytest.mark.parametrize("algo", [None, "ppo", "sac"])
def test_default_recipe_is_the_same_with_and_without_gpu(env: str | None, algo: str | None) -> None:
    with_gpu, without = (resolve_layers(None, None, has_gpu, env, algo=algo) for has_gpu in (True, False))
    assert with_gpu.config == without.config
    assert with_gpu.config.run.preset == default_preset(env, algo)


def test_larger_preset_is_suggested_in_one_line_with_gpu() -> None:
    assert resolve_layers(None, None, has_gpu=True, env="HalfCheetah-v5").notes == [
        "No --preset given; using `classic`. For this GPU, try --preset heavy: a larger recipe."
    ]
    (note,) = resolve_layers(None, None, has_gpu=True, env="unidle/CartPole-v1").notes
    assert "try --preset device" in note
    assert preset_for_gpu("gymnax:CartPole-v1") == "device"
    assert preset_for_gpu("ale:pong") == "atari-fast"
    (note,) = resolve_layers(None, None, has_gpu=False, env="HalfCheetah-v5").notes
    assert note == "No --preset given; using `classic`. `unidle presets` lists them all."
    assert resolve_layers("fast", None, has_gpu=True).notes == []


# -- presets of published results --------------------------------------------------------------------------------------

FIXED = [name for name in preset_names() if load_preset(name).fixed]
# name: tasks, envs, timesteps, batch, replay buffer, learning starts, UTD ratio, actor, critics, evaluation episodes
META_WORLD = {
    "mt10-2m": (10, 32, 2_000_000, 512, 2_000_000, 40_000, 0.1, (256, 256), (1024,) * 3, 50),
    "mt10-20m": (10, 48, 20_000_000, 512, 2_000_000, 40_000, 0.1, (256, 256), (1024,) * 3, 50),
    "mt10-paper-400": (10, 10, 20_000_000, 1280, 1_000_000, 40_000, 0.1, (400,) * 3, (400,) * 3, 500),
    "mt10-paper-1024": (10, 10, 20_000_000, 1280, 1_000_000, 40_000, 0.1, (400,) * 3, (1024,) * 3, 500),
    "mt50-paper-1024": (50, 50, 100_000_000, 6400, 5_000_000, 200_000, 0.02, (1024,) * 3, (1024,) * 3, 2500),
}


@pytest.mark.parametrize("name", META_WORLD)
def test_meta_world_preset_has_documented_values(name: str) -> None:
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


def test_fixed_preset_rejects_recipe_changes_unless_allowed() -> None:
    with pytest.raises(UsageError) as error:
        validated(fixed_config(batch_size=640))
    assert str(error.value) == (
        "Preset mt10-paper-1024 reproduces published results with `batch_size` 1280, not 640; remove it, or add "
        "--allow-recipe-change."
    )
    assert validated(fixed_config(batch_size=640, allow_recipe_change=True)).recipe.batch_size == 640
    # A run from before the preset had a value limit resumes without it.
    assert validated(fixed_config(value_limit=None), resumed=True).recipe.value_limit is None


@pytest.mark.parametrize("name", FIXED)
@pytest.mark.parametrize("n_envs", [1, 16, 32, 48])
def test_fixed_preset_allows_changes_to_collection(name: str, n_envs: int) -> None:
    preset = load_preset(name).apply(Config()).recipe
    config = validated(fixed_config(name, n_envs=n_envs, overlap="off", workers=4, timesteps=1000))
    assert (config.recipe.n_envs, config.recipe.overlap) == (n_envs, "off")
    assert preset.overlap == "strict"
    for setting in ("utd_ratio", "learning_starts", "n_steps", "buffer_size", "batch_size"):
        assert getattr(config.recipe, setting) == getattr(preset, setting)


def test_env_variable_sets_n_envs_of_fixed_preset_by_default(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("NUM_PARALLEL_ENVS", "16")
    layers = resolve_layers("mt10-20m", None, has_gpu=False)
    assert layers.config.recipe.n_envs == 16
    assert layers.notes == ["n_envs is 16, from the environment variable NUM_PARALLEL_ENVS."]
    by_flag = resolve_layers("mt10-20m", None, has_gpu=False, n_envs=3)
    assert by_flag.with_flags({"n_envs": 3}).recipe.n_envs == 3
    assert by_flag.notes == []
    (tmp_path / "mine.yaml").write_text("n_envs: 4\n")
    by_file = resolve_layers("mt10-20m", tmp_path / "mine.yaml", has_gpu=False)
    assert by_file.config.recipe.n_envs == 4
    assert by_file.notes == []
    assert resolve_layers("sac", None, has_gpu=False).config.recipe.n_envs == 8  # not a fixed preset, so it is ignored
    monkeypatch.setenv("NUM_PARALLEL_ENVS", "")
    assert resolve_layers("mt10-20m", None, has_gpu=False).config.recipe.n_envs == 48


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("many", "NUM_PARALLEL_ENVS: `n_envs` must be an integer, not 'many'."),
        ("1.5", "NUM_PARALLEL_ENVS: `n_envs` must be an integer, not '1.5'."),
        ("0", "`n_envs` is 0; it must be at least 1."),
    ],
)
def test_invalid_n_envs_variable_is_rejected(value: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NUM_PARALLEL_ENVS", value)
    with pytest.raises(UsageError) as error:
        validated(resolve_layers("mt10-2m", None, has_gpu=False).config)
    assert str(error.value) == message


def test_env_in_config_file_selects_same_preset_as_flag(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    for env in ("unidle/SiteExplore-v0", "unidle/CartPole-v1", "CartPole-v1"):
        file.write_text(f"env: {env}\n")
        by_flag = resolve_layers(None, None, has_gpu=True, env=env)
        by_file = resolve_layers(None, file, has_gpu=True)
        assert by_file.config.recipe == by_flag.config.recipe
        assert by_file.notes == by_flag.notes


def test_sb3_file_is_not_combined_with_defaults_of_other_algorithm(tmp_path: Path) -> None:
    file = tmp_path / "zoo.yml"
    file.write_text("Pendulum-v1:\n  n_timesteps: 20000\n  policy: MlpPolicy\n  learning_rate: 1e-3\n")
    assert resolve_layers(None, file, has_gpu=False, algo="ppo").config.run.preset == "classic"
    default = resolve_layers(None, file, has_gpu=False, algo="sac").config
    assert (default.recipe.algo, default.recipe.learning_rate, default.run.preset) == ("sac", 1e-3, "sac")
    chosen = resolve_layers("sac", file, has_gpu=False, algo="sac").config.recipe
    assert (chosen.algo, chosen.learning_rate, chosen.batch_size) == ("sac", 1e-3, 256)
