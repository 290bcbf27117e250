"""rl-zoo's files: one entry per environment, and YAML with Python tags, which are read without executing code."""

from __future__ import annotations

import difflib
import re
from typing import Any

import yaml

from unidle.config.fields import SECTIONS, section_of
from unidle.config.foreign import sb3
from unidle.errors import UsageError

ENV_ID = re.compile(r"-v\d+$")


def is_zoo(tree: dict[str, Any]) -> bool:
    """Whether it is a file of rl-zoo: `environment id: {settings}`."""
    if not all(isinstance(name, str) and isinstance(tree[name], dict) for name in tree):
        return False
    if any(name in SECTIONS or name in sb3.MARKS or section_of(name) for name in tree):
        return False
    return any(ENV_ID.search(name) or sb3.MARKS & tree[name].keys() for name in tree)


def choose_entry(tree: dict[str, Any], env: str | None, source: str) -> str:
    """The rl-zoo entry for `env`, or the only entry."""
    names = list(tree)
    if env is None and len(names) == 1:
        return names[0]
    if env in names:
        return env
    # rl-zoo keeps one entry for all Atari games.
    if env and "atari" in names and (env.startswith("ALE/") or "NoFrameskip" in env):
        return "atari"
    near = difflib.get_close_matches(env or "", names, n=8) or names[:8]
    more = f" and {len(names) - len(near)} more" if len(near) < len(names) else ""
    entries = ", ".join(near) + more
    if env is None:
        raise UsageError(f"{source} has entries for {entries}; choose one with --env.")
    raise UsageError(f"{source} has no entry for {env}, only for {entries}; add or rename one.")


class PlainLoader(yaml.SafeLoader):
    """Safe YAML loader that reads rl-zoo's tuples as lists and Python names as strings."""


def _sequence(loader: yaml.SafeLoader, node: yaml.Node) -> list[Any]:
    if not isinstance(node, yaml.SequenceNode):
        return _refuse(loader, node)
    return loader.construct_sequence(node, deep=True)


def _name(loader: yaml.SafeLoader, name: str, node: yaml.Node) -> str:
    return name


def _refuse(loader: yaml.SafeLoader, node: yaml.Node) -> Any:
    line = node.start_mark.line + 1
    raise UsageError(
        f"{loader.name}: line {line} has the tag {node.tag}, which unidle does not support; write a plain value."
    )


PlainLoader.add_constructor("tag:yaml.org,2002:python/tuple", _sequence)
PlainLoader.add_multi_constructor("tag:yaml.org,2002:python/name:", _name)
PlainLoader.add_constructor(None, _refuse)
