"""Looks up a setting by its flat name: its section, its type, and the algorithms that have it."""

from __future__ import annotations

import dataclasses
import difflib
import typing
from collections.abc import Iterable
from typing import Any

from unidle.config.convert import MISMATCH, convert, describe, in_brief
from unidle.config.settings import RECIPES, Engine, Run
from unidle.errors import UsageError

SECTIONS = ("recipe", "engine", "run")


def _types(part: type, annotated: bool = False) -> dict[str, Any]:
    """Field → declared type."""
    hints = typing.get_type_hints(part, include_extras=annotated)
    return {f.name: hints[f.name] for f in dataclasses.fields(part)}


_RECIPE_TYPES: dict[str, dict[str, Any]] = {algo: _types(part) for algo, part in RECIPES.items()}
_SECTION_TYPES = {"engine": _types(Engine), "run": _types(Run)}
_OWNERS: dict[str, list[str]] = {}  # setting of a recipe → algorithms that have it
for _algo, _names in _RECIPE_TYPES.items():
    for _name in _names:
        _OWNERS.setdefault(_name, []).append(_algo)
SETTINGS = [*_OWNERS, *_SECTION_TYPES["engine"], *_SECTION_TYPES["run"]]


def owners_of(key: str) -> list[str]:
    """The algorithms that have setting `key` of the recipe."""
    return _OWNERS.get(key, [])


def section_of(key: str) -> str | None:
    """The section a flat name belongs to; None if there is no such setting."""
    if key in _OWNERS:
        return "recipe"
    return next((section for section, names in _SECTION_TYPES.items() if key in names), None)


def _types_of(key: str, algo: str | None = None) -> list[Any]:
    """The declared types of setting `key`: in `algo`'s recipe, or in every recipe that has it."""
    if key in _OWNERS:
        return [_RECIPE_TYPES[owner][key] for owner in ([algo] if algo else _OWNERS[key])]
    return [names[key] for names in _SECTION_TYPES.values() if key in names]


def is_auto_type(kind: Any) -> bool:
    """Whether an annotated type is an `OrAuto`."""
    return any("auto" in getattr(option, "__metadata__", ()) for option in typing.get_args(kind))


AUTO_SETTINGS = {
    name
    for part in (*RECIPES.values(), Engine, Run)
    for name, kind in _types(part, annotated=True).items()
    if is_auto_type(kind)
}


def word_for_none(key: str) -> str:
    """How None is written for a setting: `auto` if unidle chooses the value then, else `none`."""
    return "auto" if key in AUTO_SETTINGS else "none"


def unknown_key(key: str, source: str, more: Iterable[str] = (), command: str = "train") -> str:
    """The error message for a setting that does not exist; `more` are further valid names."""
    near = difflib.get_close_matches(str(key), [*SETTINGS, *SECTIONS, *more], n=1)
    hint = f"did you mean `{near[0]}`?" if near else f"`unidle {command} --help-all` lists them all."
    return f"{source}: there is no setting `{key}`; {hint}"


def refuse_other_algo(key: str, algo: str) -> None:
    """UsageError if `key` is a setting of other algorithms only."""
    owners = owners_of(key)
    if owners and algo not in owners:
        names = " and ".join(", ".join(owners).upper().rsplit(", ", 1))
        raise UsageError(
            f"`{key}` is a setting of {names}, not of {algo.upper()}; remove it, or use --algo {owners[0]}."
        )


def coerce(key: str, value: Any, source: str, algo: str | None = None) -> Any:
    """`value` as the declared type of setting `key`, or a UsageError that names the type.

    Without `algo`, a value that any algorithm accepts is accepted.
    """
    if algo:
        refuse_other_algo(key, algo)
    if hasattr(value, "tolist"):
        value = value.tolist()  # NumPy scalars and arrays
    if value == "auto" and key in AUTO_SETTINGS:
        return None
    kinds = _types_of(key, algo)
    converted = next((found for kind in kinds if (found := convert(value, kind)) is not MISMATCH), MISMATCH)
    if converted is MISMATCH:
        raise UsageError(f"{source}: `{key}` must be {describe(kinds[0], word_for_none(key))}, not {in_brief(value)}.")
    return converted
