"""Settings: types, sections, YAML files and the help texts."""

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
from unidle.config.convert import in_brief
from unidle.config.fields import AUTO_SETTINGS, coerce, section_of, unknown_key, word_for_none
from unidle.config.files import flatten_sections, load_yaml, read_yaml
from unidle.config.settings import RECIPES, round_up_timesteps
from unidle.errors import UsageError

# PyYAML does not preserve line separators such as U+0085, which names and paths do not need.
TEXT = st.text(st.characters(exclude_categories=("Cs", "Cc", "Zl", "Zp")))
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=5,
)

_ALIAS_BOMB = b"a: &a [x, x]\n" + b"".join(b"%c: &%c [*%c, *%c]\n" % (c, c, c - 1, c - 1) for c in range(98, 123))


def any_value(hint: Any) -> st.SearchStrategy[Any]:
    """Valid values of a setting of this type, except NaN and the string "none", which is read as None."""
    if hint == dict[str, Any]:
        return st.dictionaries(TEXT, JSON, max_size=3)
    if hint == tuple[str | dict[str, Any], ...]:
        return st.lists(TEXT | st.dictionaries(TEXT, JSON, max_size=3), max_size=3).map(tuple)
    if hint == tuple[float, ...]:
        return st.lists(st.floats(allow_nan=False), max_size=3).map(tuple)
    values = {str: TEXT, str | None: TEXT | st.none()}.get(hint, st.from_type(hint))
    return values.filter(lambda value: value == value and value != "none")


def any_section(section: type) -> st.SearchStrategy[Any]:
    hints = typing.get_type_hints(section)
    # `recurrent` is the only setting with a choice named "none".
    names = [f.name for f in dataclasses.fields(section) if f.init and f.name != "recurrent"]
    return st.builds(section, **{name: any_value(hints[name]) for name in names})


any_recipe = st.one_of([any_section(recipe) for recipe in RECIPES.values()])
any_config = st.builds(Config, any_recipe, any_section(Engine), any_section(Run))


@settings(deadline=None)  # the machine is shared
@given(config=any_config)
def test_config_yaml_round_trip(config: Config, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.getbasetemp() / "config.yaml"
    path.write_text(config.to_yaml(), encoding="utf-8")
    assert load_yaml(path) == config


@settings(deadline=None)  # the machine is shared
@given(config=any_config)
def test_flat_values_rebuild_config(config: Config) -> None:
    assert Config().with_values(config.flat(), "test") == config


def test_recurrent_none_survives_yaml(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(Config().to_yaml())
    assert load_yaml(tmp_path / "config.yaml").recipe.recurrent == "none"


def test_setting_names_are_unique_across_sections() -> None:
    for recipe in RECIPES.values():
        names = [f.name for section in (recipe, Engine, Run) for f in dataclasses.fields(section)]
        assert len(names) == len(set(names))


def test_values_are_assigned_to_their_section() -> None:
    config = Config().with_values({"n_envs": 8, "device": "cpu", "seed": 3}, "test")
    assert (config.recipe.n_envs, config.engine.device, config.run.seed) == (8, "cpu", 3)
    assert [section_of(key) for key in ("n_envs", "device", "seed", "nothing")] == [
        "recipe",
        "engine",
        "run",
        None,
    ]


def test_with_values_does_not_modify_original() -> None:
    config = Config()
    config.with_values({"n_envs": 8}, "test")
    assert config == Config()


@pytest.mark.parametrize(
    ("key", "hint"),
    [
        ("n_env", "did you mean `n_envs`?"),
        ("batchsize", "did you mean `batch_size`?"),
        ("recipes", "did you mean `recipe`?"),
        ("zzz", "`unidle train --help-all` lists them all."),
    ],
)
def test_unknown_setting_error_suggests_closest_name(key: str, hint: str) -> None:
    with pytest.raises(UsageError) as error:
        Config().with_values({key: 1}, "my.yaml")
    assert str(error.value) == f"my.yaml: there is no setting `{key}`; {hint}"


def test_non_string_key_is_reported_as_unknown_setting(tmp_path: Path) -> None:
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
        ("net_arch", "", ()),
        ("adam_betas", "0.5,0.99", (0.5, 0.99)),
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
def test_values_are_converted_to_declared_type(key: str, value: Any, expected: Any) -> None:
    converted = coerce(key, value, "test")
    assert converted == expected
    assert type(converted) is type(expected)


@pytest.mark.parametrize(
    ("key", "value", "expected_type"),
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
        ("adam_betas", "high", "a list of numbers such as 0.9,0.999"),
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
def test_wrong_type_is_rejected(key: str, value: Any, expected_type: str) -> None:
    with pytest.raises(UsageError) as error:
        coerce(key, value, "my.yaml")
    assert str(error.value) == f"my.yaml: `{key}` must be {expected_type}, not {in_brief(value)}."


def test_settings_are_accepted_with_and_without_section() -> None:
    tree = {"recipe": {"n_envs": 8}, "engine": {"device": "cpu"}, "seed": 1}
    assert flatten_sections(tree, "test") == {"n_envs": 8, "device": "cpu", "seed": 1}


def test_setting_in_wrong_section_error_names_right_one() -> None:
    with pytest.raises(UsageError) as error:
        flatten_sections({"engine": {"n_envs": 8}}, "my.yaml")
    assert str(error.value) == ("my.yaml: `n_envs` belongs in section `recipe`, not `engine`; move it.")


def test_section_must_be_mapping() -> None:
    with pytest.raises(UsageError, match=r"my\.yaml: `recipe` must contain `name: value` lines"):
        flatten_sections({"recipe": 3}, "my.yaml")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"a: [1", "is not valid YAML at line 1"),
        (b"a: 1\nb: 2: 3\n", "is not valid YAML at line 2"),
        (b"a: !!float x\n", "is not valid YAML"),
        (b"a: !!python/object/apply:os.getcwd []\n", "is not valid YAML at line 1"),
        (b"\xff\xfe\x00", "cannot be read"),
        (b"a: " + b"[" * 5000, "nested too deeply"),
        (b"a: &a [*a]\n", "expands to more than 100,000 values"),
        (b"a: &a {x: *a}\n", "expands to more than 100,000 values"),
        (_ALIAS_BOMB, "expands to more than 100,000 values"),
        (b"a: 1\n" * 300_000, "is longer than 1,000,000 characters"),
        (b"a: " + b"9" * 5000, "is not valid YAML"),
        (b"a: 1" + b":1" * 400_000, "is not valid YAML"),
        (b"a: !!timestamp x\n", "is not valid YAML"),
        (b"a: !!int ''\n", "is not valid YAML"),
        (b"- 1\n", "must contain `name: value` lines"),
        (b"", "must contain `name: value` lines"),
    ],
)
def test_invalid_settings_file_is_rejected(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "c.yaml"
    path.write_bytes(content)
    with pytest.raises(UsageError) as error:
        read_yaml(path)
    assert str(error.value).startswith(str(path))
    assert message in str(error.value)


def test_missing_file_and_folder_are_rejected(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"There is no file .*nowhere\.yaml; check the path"):
        read_yaml(tmp_path / "nowhere.yaml")
    with pytest.raises(UsageError, match="cannot be read"):
        read_yaml(tmp_path)


def test_help_texts_explain_auto_or_none_as_accepted() -> None:
    """The help of an optional setting mentions the word that stands for None, and never the other one."""
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
    ("timesteps", "batch", "expected"),
    [(50_000, 2048, 51_200), (51_200, 2048, 51_200), (51_201, 2048, 53_248), (1, 64, 64)],
)
def test_timesteps_are_rounded_up_to_whole_iterations(timesteps: int, batch: int, expected: int) -> None:
    assert round_up_timesteps(timesteps, batch) == expected


@pytest.mark.parametrize("line_break", ["\n", "\x85", "\u2028", "\u2029"])
def test_settings_with_line_breaks_survive_yaml(line_break: str, tmp_path: Path) -> None:
    config = Config(run=Run(env=f"a{line_break}b", log_info=(line_break,)))
    path = tmp_path / "config.yaml"
    path.write_text(config.to_yaml())
    assert load_yaml(path) == config
