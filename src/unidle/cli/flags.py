"""Builds flags from dataclasses with tyro; adds aliases, `auto`, `none` and one-sentence errors."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import re
from collections.abc import Callable
from pathlib import Path
from types import NoneType
from typing import Any, Literal, TypeVar, get_args, get_origin

import tyro
import yaml
from tyro.constructors import ConstructorRegistry, PrimitiveConstructorSpec, PrimitiveTypeInfo

from unidle.config import Config
from unidle.config.convert import in_brief
from unidle.config.fields import coerce, is_auto_type, refuse_other_algo, unknown_key
from unidle.config.files import parse_yaml
from unidle.config.renamed import ALIASES, RENAMED, renaming
from unidle.config.settings import RECIPES
from unidle.errors import UsageError

_Flags = TypeVar("_Flags")
Result = dict[str, Any] | None  # the object that --json prints; None: the command printed text
TABLE_WIDTH = 120  # columns of a table in a pipe, where rich would assume 80

_ALIASES = {f"--{alias.replace('_', '-')}": f"--{name.replace('_', '-')}" for alias, name in ALIASES.items()}
_AUTO_SWITCHES = ("subproc", "pin-cores")  # may also be auto
_SWITCHES = {
    f"--{no}{name}": f"--{name}={word}" for name in _AUTO_SWITCHES for no, word in (("", "on"), ("no-", "off"))
}
_SWITCHED_ON = {_SWITCHES[f"--{name}"] for name in _AUTO_SWITCHES}

_registry = ConstructorRegistry()

_DEFAULTS = {name: value for recipe in RECIPES.values() for name, value in Config(recipe()).flat().items()}
_TOGGLES = {
    f"--{prefix}{name.replace('_', '-')}"
    for name, value in _DEFAULTS.items()
    if isinstance(value, bool)
    for prefix in ("", "no-")
}
# Settings whose flag takes one value, written as in a config file; a switch takes none.
_VALUED = {name for name, value in _DEFAULTS.items() if not isinstance(value, (bool, dict))}
_VALUED -= {name.replace("-", "_") for name in _AUTO_SWITCHES}


def normalise_flags(argv: list[str], algo: str | None = None) -> list[str]:
    """`argv` with aliases replaced and each value written as in a config file (1e6, none).

    Raises UsageError for an invalid value, or for a setting that `algo` does not have.
    """
    normalised: list[str] = []
    for word in _joined_wrappers(argv):
        before = normalised[-1] if normalised else ""
        if word.startswith("--"):
            flag, equals, value = word.partition("=")
            flag = _ALIASES.get(flag.replace("_", "-"), flag.replace("_", "-"))
            if algo:
                refuse_other_algo(_setting(flag), algo)
            if equals and flag in _TOGGLES:
                raise _takes_no_value(flag, value)
            normalised.append(f"{flag}={_value_of(flag, value, algo)}" if equals else _SWITCHES.get(flag, flag))
        elif before in _SWITCHED_ON and word in ("auto", "none"):
            normalised[-1] = before.replace("=on", "=auto")
        elif (before in _TOGGLES or before in _SWITCHES.values()) and not word.startswith("-"):
            raise _takes_no_value(before.partition("=")[0], word)
        elif before.startswith("--") and "=" not in before:
            normalised.append(_value_of(before, word, algo))
        else:
            normalised.append(word)
    return normalised


def given_settings(argv: list[str]) -> set[str]:
    """The names of the settings that the flags in `argv` give a value, other than auto."""
    words = normalise_flags(replace_renamed_flags(argv)[0])
    flags = {word.partition("=")[0] for word in words if word.startswith("--")}
    return {_setting(flag) for flag in flags if peek(words, flag) != "auto"} & _DEFAULTS.keys()


def _joined_wrappers(argv: list[str]) -> list[str]:
    """`argv` with `--wrapper A --wrapper B` as `--wrappers=A,B`."""
    rest, wrappers = [], []
    words = iter(argv)
    for word in words:
        flag, equals, value = word.partition("=")
        if flag == "--wrapper":
            wrappers.append(value if equals else next(words, ""))
        else:
            rest.append(word)
    return [*rest, f"--wrappers={','.join(wrappers)}"] if wrappers else rest


def replace_renamed_flags(argv: list[str]) -> tuple[list[str], list[str]]:
    """`argv` with former flag names replaced, and a message for each."""
    replaced, notes = [], []
    for word in argv:
        flag, equals, value = word.partition("=")
        plain = flag.replace("_", "-")
        no = "--no-" if plain.startswith("--no-") else "--"
        name = plain.removeprefix(no).replace("-", "_")
        if plain.startswith("--") and name in RENAMED:
            notes.append(renaming(name))
            flag = no + RENAMED[name].replace("_", "-")
        replaced.append(flag + equals + value)
    return replaced, notes


def _takes_no_value(flag: str, value: str) -> UsageError:
    name = flag.removeprefix("--").removeprefix("no-")
    return UsageError(f"--{name} takes no value, but got `{value}`; use --{name} or --no-{name}.")


def _setting(flag: str) -> str:
    """The setting of a flag: n_envs for --n-envs, per for --no-per."""
    name = flag.removeprefix("--").replace("-", "_")
    return name.removeprefix("no_") if flag in _TOGGLES else name


def _value_of(flag: str, text: str, algo: str | None) -> str:
    name = _setting(flag)
    if name not in _VALUED:
        return text
    value = coerce(name, text, flag, algo)
    if value is None:
        return "none"
    return _write(value)


def parse(
    kind: type[_Flags] | Callable[..., _Flags], argv: list[str], command: str, default: _Flags | None = None
) -> _Flags:
    """`argv` parsed into dataclass `kind`, with flat flags for nested fields; UsageError if it is invalid."""
    kwargs: dict[str, Any] = {} if default is None else {"default": default}
    stderr = io.StringIO()
    try:
        with contextlib.redirect_stderr(stderr):
            flags, unknown = tyro.cli(
                kind,
                args=["--help" if word == "--help-all" else word for word in argv],
                prog=f"unidle {command}",
                config=(tyro.conf.OmitArgPrefixes,),
                registry=_registry,
                return_unknown_args=True,
                **kwargs,
            )
    except SystemExit as end:
        if not end.code:
            raise  # --help
        raise UsageError(f"{_error_text(stderr.getvalue())}; `unidle {command} --help` lists the options.") from None
    _reject_unknown(unknown, command, kind)
    return flags


def _error_text(box: str) -> str:
    """The error message of tyro, without the box around it and the help below it."""
    lines = [line.strip("│ ") for line in box.splitlines()[1:]]
    if lines and _is_rule(lines[0]):  # below the title, where the terminal's encoding has no box characters
        lines = lines[1:]
    end = next((i for i, line in enumerate(lines) if _is_rule(line)), len(lines))
    text = " ".join(line for line in lines[:end] if line).removesuffix(" (required)").rstrip(".:")
    text = re.sub(r"^Missing from unidle [\w-]+: (\S+) (.*)", r"Missing argument \1 (\2)", text)
    return text.removesuffix(". Expected 1 values")


def _is_rule(line: str) -> bool:
    return line.startswith(("─", "╰", "---"))


def _reject_unknown(unknown: list[str], command: str, kind: Any) -> None:
    """UsageError for unrecognised arguments."""
    if not unknown:
        return
    flag = unknown[0].partition("=")[0]
    if command in ("train", "tune", "diagnose", "sweep") and flag.startswith("--"):
        own = [f.name for f in dataclasses.fields(kind) if f.name != "engine_file"]  # whose flag is --engine
        raise UsageError(unknown_key(flag.removeprefix("--").replace("-", "_"), flag, own, command))
    raise UsageError(f"Unrecognised arguments `{' '.join(unknown)}`; `unidle {command} --help` lists the options.")


def peek(argv: list[str], flag: str) -> str | None:
    """The value of `flag` in `argv` before parsing; None if it is not there."""
    for index, word in enumerate(argv):
        name, equals, value = word.partition("=")
        if name.replace("_", "-") == flag:
            return value if equals else argv[index + 1] if index + 1 < len(argv) else None
    return None


def wants_help(argv: list[str]) -> bool:
    """Whether `argv` asks for help."""
    return not {"-h", "--help", "--help-all"}.isdisjoint(argv)


@_registry.primitive_rule
def _whole_number(info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec[int] | None:
    """20"""
    if info.type is not int:
        return None
    return PrimitiveConstructorSpec(
        nargs=1,
        metavar="INT",
        instance_from_str=lambda words: _read_int(words[0]),
        is_instance=lambda value: isinstance(value, int) and not isinstance(value, bool),
        str_from_instance=lambda value: [str(value)],
    )


def _read_int(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"{text!r} is not an integer") from None


@_registry.primitive_rule
def _number(info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec[float] | None:
    """0.5"""
    if info.type is not float:
        return None
    return PrimitiveConstructorSpec(
        nargs=1,
        metavar="FLOAT",
        instance_from_str=lambda words: _read_float(words[0]),
        is_instance=lambda value: isinstance(value, (int, float)) and not isinstance(value, bool),
        str_from_instance=lambda value: [str(value)],
    )


def _read_float(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"{text!r} is not a number") from None


@_registry.primitive_rule
def _optional(info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec[Any] | None:
    """None or 20; auto or 20 for an OrAuto"""
    none = "auto" if is_auto_type(info.type) else "none"
    readers: dict[Any, tuple[str, Callable[[str], Any]]] = {
        int: (f"{none}|INT", _read_int),
        float: (f"{none}|FLOAT", _read_float),
        str: (f"{none}|STR", str),
        Path: ("PATH", Path),  # omitted: None
        tuple[int, ...]: (f"{none}|N,N,…", _read_widths),
        tuple[str, ...]: (f"{none}|NAME,…", lambda text: tuple(text.split(","))),
    }
    kind = _if_given(info.type)
    if kind not in readers:
        return None
    metavar, read = readers[kind]
    return PrimitiveConstructorSpec(
        nargs=1,
        metavar=metavar,
        instance_from_str=lambda words: None if words[0] in (none, "none") else read(words[0]),
        is_instance=lambda value: value is None or isinstance(value, get_origin(kind) or kind),
        str_from_instance=lambda value: [none if value is None else _write(value)],
    )


def _if_given(kind: Any) -> Any:
    """The `int` of `int | None`; None for other types."""
    options = [option for option in get_args(kind) if option is not NoneType]
    if len(options) != 1 or NoneType not in get_args(kind):
        return None
    return get_args(options[0])[0] if is_auto_type(kind) else options[0]


def _read_widths(text: str) -> tuple[int, ...]:
    return tuple(_read_int(width) for width in text.split(",") if width)


def _write(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


@_registry.primitive_rule
def _numbers(info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec[tuple[Any, ...]] | None:
    """1024,512,256 or 0.9,0.999"""
    readers: dict[Any, Callable[[str], Any]] = {int: _read_int, float: _read_float}
    if info.type_origin is not tuple or get_args(info.type)[0] not in readers:
        return None
    read = readers[get_args(info.type)[0]]
    return PrimitiveConstructorSpec(
        nargs=1,
        metavar="N,N,…",
        instance_from_str=lambda words: tuple(read(number) for number in words[0].split(",") if number),
        is_instance=lambda value: isinstance(value, tuple),
        str_from_instance=lambda value: [_write(value)],
    )


@_registry.primitive_rule
def _wrappers(info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec[tuple[Any, ...]] | None:
    """gymnasium.wrappers:ClipReward"""
    if info.type_origin is not tuple or get_args(info.type)[0] in (int, float):
        return None
    kind = get_args(info.type)[0]
    return PrimitiveConstructorSpec(
        nargs=1,
        metavar="NAME,…" if kind is str or get_origin(kind) is Literal else "MODULE:CALLABLE,…",
        instance_from_str=lambda words: tuple(name for name in words[0].split(",") if name),
        is_instance=lambda value: isinstance(value, tuple),
        str_from_instance=lambda value: [_write(value)],
    )


@_registry.primitive_rule
def _mapping(info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec[dict[str, Any]] | None:
    """'{continuous: true}'"""
    if info.type_origin is not dict:
        return None
    return PrimitiveConstructorSpec(
        nargs=1,
        metavar="YAML",
        instance_from_str=lambda words: _read_mapping(words[0]),
        is_instance=lambda value: isinstance(value, dict),
        str_from_instance=lambda value: [yaml.safe_dump(value, default_flow_style=True).strip()],
    )


def _read_mapping(text: str) -> dict[str, Any]:
    try:
        return parse_yaml(text, "the flag")
    except UsageError:
        raise ValueError(f"{in_brief(text)} is not a mapping such as '{{continuous: true}}'") from None


@_registry.primitive_rule
def _switch(info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec[bool | None] | None:
    """A switch with auto: --subproc, --no-subproc or --subproc auto"""
    if _if_given(info.type) is not bool:
        return None
    words = {"on": True, "off": False, "auto": None, "none": None}

    def read(given: list[str]) -> bool | None:
        if given[0] not in words:
            raise ValueError(f"{given[0]!r} is not one of {', '.join(words)}")
        return words[given[0]]

    return PrimitiveConstructorSpec(
        nargs=1,
        metavar="| --no-…",
        instance_from_str=read,
        is_instance=lambda value: value is None or isinstance(value, bool),
        str_from_instance=lambda value: [next(word for word, meaning in words.items() if meaning is value)],
    )
