"""Converts plain values from YAML, flags and keyword arguments to a declared type."""

from __future__ import annotations

import math
import re
import types
import typing
from typing import Any, Literal

import yaml

MISMATCH = object()


def convert(value: Any, expected: Any) -> Any:
    """`value` as type `expected`, or MISMATCH. Numbers may be text: YAML reads 1e6 as text."""
    origin = typing.get_origin(expected)
    if origin in (typing.Union, types.UnionType):
        # None first: for `str | None`, the text "none" means None.
        options = sorted(typing.get_args(expected), key=lambda option: option is not type(None))
        found = (convert(value, option) for option in options)
        return next((option for option in found if option is not MISMATCH), MISMATCH)
    if origin is Literal:
        if value is False and "off" in typing.get_args(expected):
            return "off"  # YAML reads `off` as False
        return value if value in typing.get_args(expected) else MISMATCH
    if origin is tuple:
        items = [item for item in value.split(",") if value.strip()] if isinstance(value, str) else value
        if not isinstance(items, (list, tuple)):
            return MISMATCH
        converted = tuple(convert(item, typing.get_args(expected)[0]) for item in items)
        return MISMATCH if MISMATCH in converted else converted
    if origin is dict:
        return value if isinstance(value, dict) else MISMATCH
    if expected is type(None):
        return None if value is None or value == "none" else MISMATCH
    if expected in (int, float):
        return _number(value, expected)
    return value if type(value) is expected else MISMATCH


def _number(value: Any, expected: type) -> Any:
    if isinstance(value, bool):
        return MISMATCH
    if expected is int and isinstance(value, int):
        return value  # a float would round a large seed
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        return MISMATCH
    if expected is int:
        return int(number) if number.is_integer() else MISMATCH
    return MISMATCH if math.isnan(number) else number


def describe(expected: Any, none: str) -> str:
    """Describe type `expected` in an error message; `none` is the word for None."""
    origin = typing.get_origin(expected)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(describe(option, none) for option in typing.get_args(expected))
    if origin is Literal:
        return " or ".join(repr(option) for option in typing.get_args(expected))
    if origin is tuple:
        examples = {int: "integers such as 64,64", float: "numbers such as 0.9,0.999"}
        examples[str] = "names such as policy,privileged"
        return f"a list of {examples.get(typing.get_args(expected)[0], 'module:callable')}"
    if origin is dict:
        return "a mapping"
    names = {int: "an integer", float: "a number", str: "a string", bool: "true or false"}
    return names.get(expected, none)


def in_brief(value: Any, length: int = 200) -> str:
    """`value` for an error message, cut to `length` characters."""
    try:
        text = repr(value)
    except ValueError:  # Python writes no integer with more than 4300 digits
        return "a number with thousands of digits"
    return text if len(text) <= length else text[:length] + "…"


def yaml_text(tree: dict[str, Any]) -> str:
    """`tree` as YAML, in its order, with letters of any script as they are."""
    text: str = yaml.safe_dump(tree, sort_keys=False, allow_unicode=True)
    # PyYAML writes these line breaks of Unicode as they are, and reads them as spaces.
    if re.search("[\x85\u2028\u2029]", text):
        text = yaml.safe_dump(tree, sort_keys=False)
    return text
