"""Finds the class and package of a function, since a stack sample has only file, line and bare name."""

from __future__ import annotations

import linecache
import os
import re
from functools import lru_cache

# Methods that step an environment, in a class that has both `step` and `reset` or is named like an environment. A
# subclass may define only `step`, but then its argument is an action.
_STEPPING = {"step", "reset", "step_wait", "step_async", "reset_wait", "reset_async", "send", "recv"}
_BY_NAME = re.compile(r"Env|Wrapper")
_DEFINED = re.compile(r"(\s*)(?:async\s+)?def\s+(\w+)")
_TAKES_ACTION = re.compile(r"def\s+step(_async)?\(\s*self,\s*\w*act(ion)?s?\b")
_CLASS = re.compile(r"(\s*)class\s+(\w+)(.*)")


@lru_cache(maxsize=1 << 16)
def function_at(file: str, line: int, name: str) -> tuple[str, bool]:
    """Return the name qualified by its class, and whether it steps an environment; without source, the bare name."""
    lines = linecache.getlines(file)
    start = next((i for i in range(min(line, len(lines)) - 1, -1, -1) if _is_def(lines[i], name)), None)
    if start is None:
        return name, False
    indent = _indent(lines[start])
    for i in range(start - 1, -1, -1):
        outer = _CLASS.match(lines[i]) or _DEFINED.match(lines[i])
        if outer is None or len(outer[1]) >= indent:
            continue
        if outer.re is _DEFINED:
            return name, False  # a nested function
        is_env = (
            bool(_BY_NAME.search(outer[2] + outer[3]))
            or bool(_TAKES_ACTION.search(lines[start]))
            or {"step", "reset"} <= _methods(lines, i, indent)
        )
        return f"{outer[2]}.{name}", name in _STEPPING and is_env
    return name, False


@lru_cache(maxsize=1 << 16)
def package_of(file: str) -> str:
    """Return the name of the top-level package that a file belongs to; empty for a script or a single module."""
    folder, package = os.path.dirname(file), ""
    while os.path.exists(os.path.join(folder, "__init__.py")):
        folder, package = os.path.split(folder)
    return package


def _is_def(line: str, name: str) -> bool:
    found = _DEFINED.match(line)
    return found is not None and found[2] == name


def _methods(lines: list[str], start: int, indent: int) -> set[str]:
    """Return the methods of the class defined at line `start`."""
    outside = _indent(lines[start])
    found = set()
    for line in lines[start + 1 :]:
        if line.strip() and _indent(line) <= outside and not line.lstrip().startswith((")", "#")):
            break
        method = _DEFINED.match(line)
        if method and len(method[1]) == indent:
            found.add(method[2])
    return found


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip())
