"""The reference pages of the site: commands from parsers, settings from dataclasses, Python from docstrings.

A page in docs/ has a place for one of them, from `<!-- reference: commands -->` to `<!-- /reference -->`, which
site_hooks.py fills.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from typing import Any
from unittest.mock import patch

import unidle
from unidle.cli.main import COMMANDS, command_function
from unidle.config import Engine, Run
from unidle.config.field_docs import field_docs
from unidle.config.fields import word_for_none
from unidle.config.settings import RECIPES

_WIDTH = "100"  # of the help: in a wider one, boxes stand side by side
_ENTRY = re.compile(r"│ (?P<option>\S.*?)(?:\s{2,}(?P<meaning>\S.*?))?\s*│")
_CONTINUED = re.compile(r"│\s{2,}(?P<meaning>\S.*?)\s*│")
_PAGE = re.compile(r"(?:see )?\bdocs/([\w-]+)\.md")


def commands() -> str:
    """A section per command: what it does, and its options."""
    return "\n\n".join(_command(name, help_text(name)) for name in COMMANDS)


def help_text(name: str) -> str:
    """What `unidle NAME --help-all` prints."""
    printed = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")  # without an encoding, boxes would be ASCII
    with patch.dict(os.environ, COLUMNS=_WIDTH), contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
        command_function(name)(["--help-all"])
    printed.seek(0)
    return printed.read()


def _command(name: str, text: str) -> str:
    """The section of a command; of one that trains, the first box has all but the settings."""
    head, *boxes = re.split(r"^╭.*╮\n", text, flags=re.MULTILINE)
    usage, _, description = head.strip().partition("\n\n")
    trains = "recipe options" in text
    options = [entry for box in (boxes[:1] if trains else boxes) for entry in _entries(box) if "--help" not in entry[0]]
    lines = [f"## {name}", f"```text\n{usage.removeprefix('usage: ')}\n```", escaped(description)]
    if options:
        lines.append(table(("option", "meaning"), options))
    if trains:
        lines.append("It also takes every [setting](settings.md) as a flag: `--n-envs 8` for `n_envs`.")
    return "\n\n".join(lines)


def _entries(box: str) -> Iterator[tuple[str, str]]:
    """(option, meaning) of each entry of a box."""
    option = meaning = ""
    for line in box.splitlines():
        if found := _ENTRY.fullmatch(line):
            if option:
                yield option, meaning
            option, meaning = f"`{found['option']}`", found["meaning"] or ""
        elif found := _CONTINUED.fullmatch(line):
            meaning = f"{meaning} {found['meaning']}".strip()
    if option:
        yield option, meaning


def settings() -> str:
    """A table per algorithm, one of the engine and one of the run."""
    parts: dict[str, type[Any]] = {recipe().algo.upper(): recipe for recipe in RECIPES.values()}
    parts |= {"Engine": Engine, "Run": Run}
    return "\n\n".join(f"## {title}\n\n{_settings_of(part)}" for title, part in parts.items())


def _settings_of(part: type[Any]) -> str:
    texts = field_docs(part)
    rows = [(f"`{name}`", _value(name, value), texts[name]) for name, value in asdict(part()).items()]
    return table(("setting", "default", "meaning"), rows)


def _value(name: str, value: Any) -> str:
    """A default as it is written in a command."""
    if value is None or isinstance(value, bool):
        return {None: word_for_none(name), True: "true", False: "false"}[value]
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


def python_api() -> str:
    """What `unidle` exports: functions, classes, errors."""
    kinds = public_names()
    sections = (f"## {kind}\n\n" + "\n\n".join(f"::: unidle.{name}" for name in names) for kind, names in kinds.items())
    return "\n\n".join(sections)


def public_names() -> dict[str, list[str]]:
    """What `unidle` exports, by kind."""
    kinds: dict[str, list[str]] = {"Functions": [], "Classes": [], "Errors": []}
    for name in unidle.__all__:
        kind = "Functions" if name.islower() else "Errors" if name.endswith("Error") else "Classes"
        kinds[kind].append(name)
    return kinds


def table(header: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    """A Markdown table."""
    lines = [" | ".join(header), " | ".join("---" for _ in header)]
    lines += [" | ".join(escaped(cell) for cell in row) for row in rows]
    return "\n".join(f"| {line} |" for line in lines)


def escaped(text: str) -> str:
    """Text of a docstring: markup as text, pages of the docs as links."""
    parts = re.split(r"(`[^`]*`)", text)
    parts[::2] = [_PAGE.sub(r"see [\1](\1.md)", part.replace("<", "&lt;").replace("|", "\\|")) for part in parts[::2]]
    return "".join(parts)


REFERENCES = {"commands": commands, "settings": settings, "python-api": python_api}
