"""Trees of spaces: Dict and Tuple are the branches, every other space is a leaf, and a path leads to a leaf.

    {"sensors": (Box, Discrete), "goal": Box}        ("sensors", 0), ("sensors", 1), ("goal",)

Values come in the same structure, with dicts and tuples as the branches.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gymnasium import spaces

Path = tuple[str | int, ...]


def walk(space: spaces.Space, path: Path = ()) -> list[tuple[Path, Any]]:
    """Each leaf of `space` with its path, in the order of the space."""
    if isinstance(space, spaces.Dict):
        return [leaf for key, part in space.spaces.items() for leaf in walk(part, (*path, key))]
    if isinstance(space, spaces.Tuple):
        return [leaf for index, part in enumerate(space.spaces) for leaf in walk(part, (*path, index))]
    return [(path, space)]


def rebuild(space: spaces.Space, values: Mapping[Path, Any], path: Path = ()) -> Any:
    """The structure of `space` with `values` as its leaves; a dict has no key for a leaf that has no value."""
    if isinstance(space, spaces.Dict):
        there = {key: part for key, part in space.spaces.items() if _is_branch(part) or (*path, key) in values}
        return {key: rebuild(part, values, (*path, key)) for key, part in there.items()}
    if isinstance(space, spaces.Tuple):
        return tuple(rebuild(part, values, (*path, index)) for index, part in enumerate(space.spaces))
    return values[path]


def _is_branch(space: spaces.Space) -> bool:
    return isinstance(space, (spaces.Dict, spaces.Tuple))


def follow(value: Any, path: Path) -> Any:
    """The part of a value at `path`."""
    for key in path:
        value = value[key]
    return value


def find(value: Any, path: Path) -> Any:
    """The part of a value at `path`; None if a dict on the way has no such key or a branch is None."""
    for key in path:
        value = None if value is None else value.get(key) if isinstance(value, dict) else value[key]
    return value


def describe_path(what: str, path: Path) -> str:
    """observation, ("sensors", 0) → observation['sensors'][0]"""
    return what + "".join(f"[{key!r}]" for key in path)
