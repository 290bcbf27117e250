"""The reference pages in docs/ are what the code says."""

from __future__ import annotations

import re
import sys
from dataclasses import asdict
from pathlib import Path
from types import ModuleType

import pytest
from paths import DOCS, ROOT

import unidle
from unidle.cli.main import COMMANDS
from unidle.config.settings import RECIPES


@pytest.fixture(scope="module")
def reference() -> ModuleType:
    sys.path.insert(0, str(ROOT / "tools"))
    try:
        import reference
    finally:
        sys.path.remove(str(ROOT / "tools"))
    return reference


def test_pages_are_up_to_date(reference: ModuleType) -> None:
    pages: dict[Path, str] = reference.pages()
    assert {path.name for path in pages} == {"commands.md", "settings.md", "python-api.md"}
    for path, text in pages.items():
        assert path.read_text() == text, f"{path.name} is not up to date; run: make reference"


def test_every_command_setting_and_name_is_there() -> None:
    commands, settings, api = ((DOCS / f"{name}.md").read_text() for name in ("commands", "settings", "python-api"))
    assert re.findall(r"^## (\S+)$", commands, re.MULTILINE) == list(COMMANDS)
    for recipe in RECIPES.values():
        section = re.split(r"^## ", settings, flags=re.MULTILINE)[1 + [*RECIPES.values()].index(recipe)]
        assert re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE) == list(asdict(recipe()))
    assert {*re.findall(r"^### unidle\.(\w+)$", api, re.MULTILINE)} == {*unidle.__all__}


def test_rows_have_as_many_cells_as_their_header() -> None:
    """A bar in a cell ends it, also in code."""
    for name in ("commands", "settings", "python-api"):
        for table in re.findall(r"(?:^\|.*\n)+", (DOCS / f"{name}.md").read_text(), re.MULTILINE):
            counts = {len(re.findall(r"(?<!\\)\|", line)) for line in table.splitlines()}
            assert len(counts) == 1, table
