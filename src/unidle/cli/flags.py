"""Builds flags from dataclasses with tyro, and adds aliases, `auto`, `none` and one-sentence errors."""

from __future__ import annotations

import contextlib
import dataclasses
import io
from collections.abc import Callable
from pathlib import Path
from types import NoneType
from typing import Any, TypeVar, get_args, get_origin

import tyro
import yaml
from tyro.constructors import ConstructorRegistry, PrimitiveConstructorSpec, PrimitiveTypeInfo

from unidle.config import Config
from unidle.config.fields import coerce, is_auto_type, refuse_other_algo, unknown_key
from unidle.config.renamed import RENAMED, renaming
from unidle.config.settings import RECIPES
from unidle.errors import UsageError

_Flags = TypeVar("_Flags")
Result = dict[str, Any] | None  # the object that --json prints; None: the command printed text
TABLE_WIDTH = 120  # columns of a table in a pipe, where rich would assume 80

_ALIASES = {"--num-envs": "--n-envs", "--n-parallel-envs": "--n-envs", "--total-timesteps": "--timesteps"}
_OPEN_SWITCHES = ("subproc", "pin-cores")  # may also be auto
_SWITCHES = {
    f"--{no}{name}": f"--{name}={word}" for name in _OPEN_SWITCHES for no, word in (("", "on"), ("no-", "off"))
}
_SWITCHED_ON = {_SWITCHES[f"--{name}"] for name in _OPEN_SWITCHES}

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
_VALUED -= {name.replace("-", "_") for name in _OPEN_SWITCHES}


def settle(argv: list[str], algo: str | None = None) -> list[str]:
    """`argv` with aliases replaced and each value written as in a config file (1e6, none).

    Raises UsageError for an invalid value, or for a setting that `algo` does not have.
    """
    settled: list[str] = []
    for word in argv:
        before = settled[-1] if settled else ""
        if word.startswith("--"):
            flag, equals, value = word.partition("=")
            flag = _ALIASES.get(flag.replace("_", "-"), flag.replace("_", "-"))
            if algo:
                refuse_other_algo(_setting(flag), algo)
            if equals and flag in _TOGGLES:
                raise _takes_no_value(flag, value)
            settled.append(f"{flag}={_value_of(flag, value, algo)}" if equals else _SWITCHES.get(flag, flag))
        elif before in _SWITCHED_ON and word in ("auto", "none"):
            settled[-1] = before.replace("=on", "=auto")
        elif (before in _TOGGLES or before in _SWITCHES.values()) and not word.startswith("-"):
            raise _takes_no_value(before.partition("=")[0], word)
        elif before.startswith("--") and "=" not in before:
            settled.append(_value_of(before, word, algo))
        else:
            settled.append(word)
    return settled


def current_flags(argv: list[str]) -> tuple[list[str], list[str]]:
    """`argv` with renamed flags replaced, and a message for each."""
    current, notes = [], []
    for word in argv:
        flag, equals, value = word.partition("=")
        plain = flag.replace("_", "-")
        no = "--no-" if plain.startswith("--no-") else "--"
        name = plain.removeprefix(no).replace("-", "_")
        if plain.startswith("--") and name in RENAMED:
            notes.append(renaming(name))
            flag = no + RENAMED[name].replace("_", "-")
        current.append(flag + equals + value)
    return current, notes


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
            flags, stray = tyro.cli(
                kind,
                args=argv,
                prog=f"unidle {command}",
                config=(tyro.conf.OmitArgPrefixes,),
                registry=_registry,
                return_unknown_args=True,
                **kwargs,
            )
    except SystemExit as end:
        if not end.code:
            raise  # --help
        raise UsageError(f"{_gist(stderr.getvalue())}; `unidle {command} --help` lists the options.") from None
    _refuse_stray(stray, command, kind)
    return flags


def _gist(box: str) -> str:
    """The error message of tyro, without its box and the help below."""
    lines = [line.strip("│ ") for line in box.splitlines()[1:]]
    end = next((i for i, line in enumerate(lines) if line.startswith(("─", "╰"))), len(lines))
    return " ".join(line for line in lines[:end] if line).removesuffix(" (required)").rstrip(".:")


def _refuse_stray(stray: list[str], command: str, kind: Any) -> None:
    """UsageError for unrecognised arguments."""
    if not stray:
        return
    flag = stray[0].partition("=")[0]
    if command in ("train", "tune", "diagnose") and flag.startswith("--"):
        own = [f.name for f in dataclasses.fields(kind) if f.name != "engine_file"]  # whose flag is --engine
        raise UsageError(unknown_key(flag.removeprefix("--").replace("-", "_"), flag, own, command))
    raise UsageError(f"Unrecognised arguments `{' '.join(stray)}`; `unidle {command} --help` lists the options.")


def peek(argv: list[str], flag: str) -> str | None:
    """The value of `flag` in `argv` before parsing; None if it is not there."""
    for index, word in enumerate(argv):
        name, equals, value = word.partition("=")
        if name.replace("_", "-") == flag:
            return value if equals else argv[index + 1] if index + 1 < len(argv) else None
    return None


def wants_help(argv: list[str]) -> bool:
    """Whether `argv` asks for help."""
    return "-h" in argv or "--help" in argv


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
    """none, or 20; auto if unidle then chooses"""
    none = "auto" if is_auto_type(info.type) else "none"
    readers: dict[Any, tuple[str, Callable[[str], Any]]] = {
        int: (f"{none}|INT", _read_int),
        float: (f"{none}|FLOAT", _read_float),
        str: (f"{none}|STR", str),
        Path: ("PATH", Path),  # omitted for none
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
def _layer_widths(info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec[tuple[int, ...]] | None:
    """1024,512,256"""
    if info.type_origin is not tuple:
        return None
    return PrimitiveConstructorSpec(
        nargs=1,
        metavar="N,N,…",
        instance_from_str=lambda words: _read_widths(words[0]),
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
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        value = None
    if not isinstance(value, dict):
        raise ValueError(f"{text!r} is not a mapping such as '{{continuous: true}}'")
    return value


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
