from __future__ import annotations

import dataclasses
import inspect
import re
import typing
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unidle.config import Config, Engine, Run
from unidle.config import settings as schema
from unidle.config.fields import AUTO_SETTINGS, coerce, section_of, unknown_key, word_for_none
from unidle.config.files import flatten_sections, load_yaml, read_yaml
from unidle.config.settings import RECIPES, whole_steps
from unidle.errors import UsageError

# PyYAML does not keep line separators such as U+0085; a name or path has no use for them.
TEXT = st.text(st.characters(exclude_categories=("Cs", "Cc", "Zl", "Zp")))
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=5,
)


def any_value(hint: Any) -> st.SearchStrategy[Any]:
    """Values a setting of this type may hold; not nan, and not "none", which is read as None."""
    if hint == dict[str, Any]:
        return st.dictionaries(TEXT, JSON, max_size=3)
    values = {str: TEXT, str | None: TEXT | st.none()}.get(hint, st.from_type(hint))
    return values.filter(lambda value: value == value and value != "none")


def any_part(part: type) -> st.SearchStrategy[Any]:
    hints = typing.get_type_hints(part)
    # `recurrent` is the one choice that is called "none".
    names = [f.name for f in dataclasses.fields(part) if f.init and f.name != "recurrent"]
    return st.builds(part, **{name: any_value(hints[name]) for name in names})


any_recipe = st.one_of([any_part(recipe) for recipe in RECIPES.values()])
any_config = st.builds(Config, any_recipe, any_part(Engine), any_part(Run))


@settings(deadline=None)  # the machine is shared
@given(config=any_config)
def test_a_config_written_as_yaml_reads_back_as_it_was(
    config: Config, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.getbasetemp() / "config.yaml"
    path.write_text(config.to_yaml(), encoding="utf-8")
    assert load_yaml(path) == config


@settings(deadline=None)  # the machine is shared
@given(config=any_config)
def test_flat_values_rebuild_the_tree(config: Config) -> None:
    assert Config().with_values(config.flat(), "test") == config


def test_the_recurrent_choice_none_survives_yaml(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(Config().to_yaml())
    assert load_yaml(tmp_path / "config.yaml").recipe.recurrent == "none"


def test_no_setting_has_the_same_name_in_two_sections() -> None:
    for recipe in RECIPES.values():
        names = [f.name for part in (recipe, Engine, Run) for f in dataclasses.fields(part)]
        assert len(names) == len(set(names))


def test_values_go_to_the_section_they_belong_to() -> None:
    config = Config().with_values({"n_envs": 8, "device": "cpu", "seed": 3}, "test")
    assert (config.recipe.n_envs, config.engine.device, config.run.seed) == (8, "cpu", 3)
    assert [section_of(key) for key in ("n_envs", "device", "seed", "nothing")] == [
        "recipe",
        "engine",
        "run",
        None,
    ]


def test_with_values_leaves_the_original_alone() -> None:
    config = Config()
    config.with_values({"n_envs": 8}, "test")
    assert config == Config()


@pytest.mark.parametrize(
    ("key", "hint"),
    [
        ("n_env", "did you mean `n_envs`?"),
        ("batchsize", "did you mean `batch_size`?"),
        ("recipes", "did you mean `recipe`?"),
        ("zzz", "`unidle train --help` lists them all."),
    ],
)
def test_an_unknown_key_is_named_with_the_nearest_one(key: str, hint: str) -> None:
    with pytest.raises(UsageError) as error:
        Config().with_values({key: 1}, "my.yaml")
    assert str(error.value) == f"my.yaml: there is no setting `{key}`; {hint}"


def test_a_key_that_is_not_text_is_unknown_rather_than_a_crash(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("7: 1\n")
    with pytest.raises(UsageError, match="there is no setting `7`"):
        load_yaml(tmp_path / "c.yaml")
    assert "`True`" in unknown_key(typing.cast(str, True), "c.yaml")  # YAML reads `on:` as True


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("timesteps", "1e6", 1_000_000),
        ("timesteps", 1e6, 1_000_000),
        ("seed", 2**53 + 1, 2**53 + 1),  # a float would lose the last digit
        ("learning_rate", "3e-4", 3e-4),
        ("learning_rate", 1, 1.0),
        ("net_arch", "64,32", (64, 32)),
        ("net_arch", [64, 32], (64, 32)),
        ("net_arch", [], ()),
        ("batch_size", "auto", "auto"),
        ("target_kl", "none", None),
        ("workers", "auto", None),
        ("workers", "none", None),
        ("subproc", "auto", None),
        ("critic_arch", "auto", None),
        ("run_name", "auto", "auto"),
        ("target_kl", None, None),
        ("run_name", "none", None),
        ("subproc", False, False),
        ("env_kwargs", {"continuous": True}, {"continuous": True}),
    ],
)
def test_values_are_taken_as_the_declared_type(key: str, value: Any, expected: Any) -> None:
    converted = coerce(key, value, "test")
    assert converted == expected
    assert type(converted) is type(expected)


@pytest.mark.parametrize(
    ("key", "value", "wanted"),
    [
        ("n_envs", 1.5, "an integer"),
        ("n_envs", True, "an integer"),
        ("n_envs", "many", "an integer"),
        ("n_envs", None, "an integer"),
        ("n_envs", float("inf"), "an integer"),
        ("gamma", "high", "a number"),
        ("gamma", float("nan"), "a number"),
        ("gamma", 10**400, "a number"),
        ("batch_size", "big", "an integer or 'auto'"),
        ("net_arch", 64, "a list of integers such as 64,64"),
        ("net_arch", [64, "wide"], "a list of integers such as 64,64"),
        ("activation", "swish", "'tanh' or 'relu' or 'elu' or 'silu' or 'gelu'"),
        ("share_trunk", "yes", "true or false"),
        ("share_trunk", 1, "true or false"),
        ("env", 3, "a string"),
        ("env_kwargs", [1], "a mapping"),
        ("target_kl", "low", "a number or none"),
        ("subproc", "maybe", "true or false or auto"),
        ("workers", "all", "an integer or auto"),
    ],
)
def test_a_wrong_type_is_refused_in_one_sentence(key: str, value: Any, wanted: str) -> None:
    with pytest.raises(UsageError) as error:
        coerce(key, value, "my.yaml")
    assert str(error.value) == f"my.yaml: `{key}` must be {wanted}, not {value!r}."


def test_sections_flatten_and_settings_may_stand_outside_them() -> None:
    tree = {"recipe": {"n_envs": 8}, "engine": {"device": "cpu"}, "seed": 1}
    assert flatten_sections(tree, "test") == {"n_envs": 8, "device": "cpu", "seed": 1}


def test_a_setting_in_the_wrong_section_is_sent_to_the_right_one() -> None:
    with pytest.raises(UsageError) as error:
        flatten_sections({"engine": {"n_envs": 8}}, "my.yaml")
    assert str(error.value) == ("my.yaml: `n_envs` belongs in section `recipe`, not `engine`; move it.")


def test_a_section_must_be_a_mapping() -> None:
    with pytest.raises(UsageError, match=r"my\.yaml: `recipe` must contain `name: value` lines"):
        flatten_sections({"recipe": 3}, "my.yaml")


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"a: [1", "is not valid YAML at line 1"),
        (b"a: 1\nb: 2: 3\n", "is not valid YAML at line 2"),
        (b"a: !!float x\n", "is not valid YAML"),
        (b"a: !!python/object/apply:os.getcwd []\n", "is not valid YAML at line 1"),
        (b"\xff\xfe\x00", "cannot be read"),
        (b"- 1\n", "must contain `name: value` lines"),
        (b"", "must contain `name: value` lines"),
    ],
)
def test_a_file_that_is_no_settings_file_is_refused(tmp_path: Path, content: bytes, sentence: str) -> None:
    path = tmp_path / "c.yaml"
    path.write_bytes(content)
    with pytest.raises(UsageError) as error:
        read_yaml(path)
    assert str(error.value).startswith(str(path))
    assert sentence in str(error.value)


def test_a_missing_file_and_a_folder_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"There is no file .*nowhere\.yaml; check the path"):
        read_yaml(tmp_path / "nowhere.yaml")
    with pytest.raises(UsageError, match="cannot be read"):
        read_yaml(tmp_path)


def test_auto_and_none_are_never_mixed_up_in_the_help_of_a_setting() -> None:
    """Each setting that may be None explains that word, if any, and not the other."""
    texts = inspect.getsource(schema)
    defaults = {name: value for recipe in RECIPES.values() for name, value in Config(recipe()).flat().items()}
    for name, value in defaults.items():
        meanings = re.findall(rf'^    {name}: .*\n    """(.*)"""$', texts, re.M)
        assert meanings
        for meaning in meanings if value is None else ():
            other = {"auto": "none", "none": "auto"}[word_for_none(name)]
            assert f"{other}:" not in meaning
            assert name not in AUTO_SETTINGS or "auto:" in meaning
    with pytest.raises(UsageError, match="a number or none"):
        coerce("target_kl", "auto", "test")


@pytest.mark.parametrize(
    ("timesteps", "batch", "whole"),
    [(50_000, 2048, 51_200), (51_200, 2048, 51_200), (51_201, 2048, 53_248), (1, 64, 64)],
)
def test_a_run_ends_after_its_first_whole_iteration_with_all_steps(timesteps: int, batch: int, whole: int) -> None:
    assert whole_steps(timesteps, batch) == whole
