"""Flags from dataclasses, by tyro, with the few words that its defaults do not know."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, TypeVar

import tyro
import yaml
from tyro.constructors import ConstructorRegistry, PrimitiveConstructorSpec, PrimitiveTypeInfo

from unidle.errors import UsageError

_Flags = TypeVar("_Flags")

_ALIASES = {
    "--num-envs": "--n-envs",
    "--total-timesteps": "--timesteps",
    "--subproc": "--subproc=on",
    "--no-subproc": "--subproc=off",
}

_registry = ConstructorRegistry()


def parse(
    kind: type[_Flags] | Callable[..., _Flags], argv: list[str], command: str, default: _Flags | None = None
) -> _Flags:
    """`argv` as an instance of dataclass `kind`, flags flat whatever its nesting; a mistake exits with 2."""
    argv = [_ALIASES.get(word.replace("_", "-"), word) if word.startswith("--") else word for word in argv]
    kwargs: dict[str, Any] = {} if default is None else {"default": default}
    return tyro.cli(
        kind, args=argv, prog=f"unidle {command}", config=(tyro.conf.OmitArgPrefixes,), registry=_registry, **kwargs
    )


def peek(argv: list[str], flag: str) -> str | None:
    """The value of `flag` in `argv`, for what must be known before parsing; None if it is not there."""
    for index, word in enumerate(argv):
        name, equals, value = word.partition("=")
        if name.replace("_", "-") == flag:
            return value if equals else argv[index + 1] if index + 1 < len(argv) else None
    return None


def wants_help(argv: list[str]) -> bool:
    """Whether the user only wants to read."""
    return "-h" in argv or "--help" in argv


@_registry.primitive_rule
def _layer_widths(info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec[tuple[int, ...]] | None:
    """1024,512,256"""
    if info.type_origin is not tuple:
        return None
    return PrimitiveConstructorSpec(
        nargs=1,
        metavar="N,N,…",
        instance_from_str=lambda words: tuple(int(width) for width in words[0].split(",") if width),
        is_instance=lambda value: isinstance(value, tuple),
        str_from_instance=lambda value: [",".join(map(str, value))],
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
        raise ValueError(f"{text!r} is no mapping such as '{{continuous: true}}'")
    return value


@_registry.primitive_rule
def _switch(info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec[bool | None] | None:
    """A switch that may also be left to unidle: --subproc, --no-subproc, or neither."""
    if info.type != (bool | None):
        return None
    words = {"on": True, "off": False, "auto": None}
    return PrimitiveConstructorSpec(
        nargs=1,
        metavar="| --no-…",
        instance_from_str=lambda given: words[given[0]],
        is_instance=lambda value: value is None or isinstance(value, bool),
        str_from_instance=lambda value: [next(word for word, meaning in words.items() if meaning is value)],
    )


def refuse_stray(stray: list[str]) -> None:
    """One sentence for words that belong to nothing."""
    if stray:
        raise UsageError(f"{' '.join(stray)} is not understood here; see --help.")


def print_json(result: dict[str, Any]) -> None:
    """The one object on standard output."""
    import json

    json.dump(result, sys.stdout)
    sys.stdout.write("\n")
