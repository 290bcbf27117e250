"""Writes the reference pages in docs/ from the code, for readers without the site: `make reference`.

In the site, site_hooks.py makes the same tables, and the Python page by mkdocstrings.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from types import FunctionType
from typing import Any

import site_reference

import unidle

DOCS = Path(__file__).parents[1] / "docs"
_WIDTH = 100  # of a signature on one line
_MARKED = re.compile(r"(<!-- reference: ([\w-]+) -->\n).*?(<!-- /reference -->)", re.DOTALL)
_CODE = re.compile(r"`[^`]*`")
_ADDRESS = re.compile(r"<(?:function |class ')?([\w.]+)[^>]*>")  # a default that has no other text


def pages() -> dict[Path, str]:
    """What each page with a reference should be."""
    found = {path: path.read_text() for path in sorted(DOCS.glob("*.md"))}
    return {path: _MARKED.sub(_filled, text) for path, text in found.items() if _MARKED.search(text)}


def _filled(found: re.Match[str]) -> str:
    text = python_api() if found[2] == "python-api" else site_reference.REFERENCES[found[2]]()
    lines = [_CODE.sub(_without_bars, line) if line.startswith("|") else line for line in text.splitlines()]
    return "\n".join([found[1] + lines[0], *lines[1:], found[3]])


def _without_bars(code: re.Match[str]) -> str:
    """Code in a table: on GitHub, a bar would end its cell there too."""
    return re.sub(r"(?<!\\)\|", r"\\|", code[0])


def python_api() -> str:
    """What `unidle` exports, with signatures and docstrings."""
    sections = []
    for kind, names in site_reference.public_names().items():
        sections.append(f"## {kind}")
        for name in names:
            sections.append(f"### unidle.{name}")
            sections += _entry(name, getattr(unidle, name))
    return "\n\n".join(sections)


def _entry(name: str, what: Any) -> Iterator[str]:
    """The signature, the docstring, and the methods of a class."""
    is_error = isinstance(what, type) and issubclass(what, Exception)
    if not is_error and not getattr(what, "_is_protocol", False):
        yield f"```text\n{_signature(name, what)}\n```"
    yield site_reference.escaped(inspect.getdoc(what) or "")
    if isinstance(what, type) and not is_error:
        rows = [(f"`{shown}`", " ".join(text.split())) for shown, text in _members(what)]
        if rows:
            yield site_reference.table(("", "meaning"), rows)


class _Annotation:
    """An annotation that a signature shows without quotes."""

    def __init__(self, text: Any) -> None:
        self._text = text if isinstance(text, str) else inspect.formatannotation(text)

    def __repr__(self) -> str:
        return self._text


def _signature(name: str, what: Any) -> str:
    """`name(a, b=1) -> C`, with a parameter per line if that is long."""
    try:
        signature = inspect.signature(what)
    except (TypeError, ValueError):
        return name
    parameters = [
        p if p.annotation is p.empty else p.replace(annotation=_Annotation(p.annotation))
        for p in signature.parameters.values()
    ]
    returned = signature.return_annotation
    end = "" if isinstance(what, type) or returned is signature.empty else f" -> {_Annotation(returned)!r}"
    shown: list[str] = []
    for parameter in parameters:
        if parameter.kind is parameter.KEYWORD_ONLY and "*" not in shown:
            shown.append("*")
        shown.append(_ADDRESS.sub(r"\1", str(parameter)).replace("'", '"').replace("= factory", "= …"))
    line = f"{name}({', '.join(shown)}){end}"
    return line if len(line) <= _WIDTH else "\n".join([f"{name}(", *(f"    {part}," for part in shown), f"){end}"])


def _members(what: type) -> Iterator[tuple[str, str]]:
    """The public methods and properties of a class that have a docstring."""
    for name, member in vars(what).items():
        text = inspect.getdoc(member)
        if name.startswith("_") or not text:
            continue
        if isinstance(member, property):
            yield name, text
        elif isinstance(member, (FunctionType, staticmethod, classmethod)):
            names = [p for p in inspect.signature(getattr(what, name)).parameters if p != "self"]
            yield f"{name}({', '.join(names)})", text


if __name__ == "__main__":
    for path, text in pages().items():
        path.write_text(text)
