"""Extras, as the metadata of installed packages describes them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from unidle.tuning.extras import find_extras

METADATA = """Metadata-Version: 2.1
Name: {name}
Version: {version}
"""


def install(folder: Path, name: str, version: str, lines: str = "") -> None:
    info = folder / f"{name}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(METADATA.format(name=name, version=version) + lines)


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    extras = "".join(f"Provides-Extra: {name}\n" for name in ("web", "old", "deep", "elsewhere", "dev"))
    requirements = [
        "always-there",
        'spider>=2 ; extra == "web"',
        'spider>=3 ; extra == "old"',
        'other[inner] ; extra == "deep"',
        'windows-only ; extra == "elsewhere" and sys_platform == "win32"',
        'nowhere ; extra == "dev"',
    ]
    install(tmp_path, "mine", "1.0", extras + "".join(f"Requires-Dist: {text}\n" for text in requirements))
    install(tmp_path, "spider", "2.5")
    install(tmp_path, "other", "1.0", 'Provides-Extra: inner\nRequires-Dist: leaf ; extra == "inner"\n')
    return tmp_path


def test_extras_are_complete_if_every_package_fits(packages: Path) -> None:
    found = find_extras("mine")
    assert found is not None
    assert found.complete == ("web", "elsewhere")
    assert found.missing == {"old": ("spider",), "deep": ("leaf",)}


def test_extras_of_required_packages_count(packages: Path) -> None:
    install(packages, "leaf", "0.1")
    found = find_extras("mine")
    assert found is not None
    assert "deep" in found.complete


def test_package_that_is_not_installed_has_no_known_extras(packages: Path) -> None:
    assert find_extras("nowhere") is None
